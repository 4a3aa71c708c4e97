"""What the radix tree finds of what it could find, on the six plans: the real scheduler, no tensors.

Capture is prompt tokens found over those an infinite cache would find. Requests come when the plan says,
on a clock that steps move by what they cost on a small CPU. The working set is what an unbounded pool
holds at the end.
"""

import heapq
import random
from pathlib import Path

from loadtest.ideal import ideal_hit
from loadtest.plan import Plan, Segment, load_plan
from tests.benchmarks.claims.row import Curve, Finding, Row
from tests.benchmarks.claims.simulated import BLOCK_SIZE, Simulated

PLANS = Path(__file__).parents[2] / "loadtest" / "data" / "plans"
SHARED = ("shared-fewshot", "chat-multiturn", "tool-agent", "tot-fanout", "rag-long")
SIZES = (0.2, 0.3, 0.5, 0.75, 1.0, 1.5)
"""Pool sizes, as shares of the working set."""
STEP_S, TOKEN_S = 0.03, 0.0045
"""A step's cost and each of its tokens', measured with the default model on two cores."""
MAX_RUNNING = 8


def measure() -> Finding:
    rows: list[Row] = []
    curves: list[Curve] = []
    figures: dict[str, object] = {}
    for name in SHARED:
        plan = load_plan(PLANS / f"{name}.plan.jsonl.gz")
        ideal = ideal_hit(plan).share()
        working_set = play(plan, num_blocks=20_000)["cached_blocks"]
        captured = {
            size: play(plan, num_blocks=pool_blocks(plan, size * working_set))["hit"] / ideal
            for size in SIZES
        }
        figures[name] = {"ideal": ideal, "working_set_blocks": working_set, "capture": captured}
        rows.append(
            Row(
                claim="the radix tree finds what could be found",
                condition=f"{name}, scheduler and pool without tensors",
                unit="% of an infinite cache's hits",
                baseline="pool of 30 % of the working set",
                baseline_value=100 * captured[0.3],
                ours="pool of 150 %",
                our_value=100 * captured[1.5],
                goal="at least 85 % and 95 %",
                holds=captured[0.3] >= 0.85 and captured[1.5] >= 0.95,
            )
        )
        curves.append(
            Curve(
                panel="hits found, of those an infinite cache has",
                x_label="pool size / working set",
                y_label="%",
                label=name,
                points=tuple((size, 100 * share) for size, share in captured.items()),
            )
        )
    control = play(load_plan(PLANS / "random-control.plan.jsonl.gz"), num_blocks=20_000)
    figures["random-control"] = control
    rows.append(
        Row(
            claim="nothing is found where nothing is shared",
            condition="random-control",
            unit="% hit",
            baseline="infinite cache",
            baseline_value=0.0,
            ours="found",
            our_value=100 * control["hit"],
            goal="under 1 %",
            holds=control["hit"] < 0.01,
        )
    )
    return Finding(rows=tuple(rows), curves=tuple(curves), figures=figures)


def pool_blocks(plan: Plan, wanted: float) -> int:
    """A pool that holds at least the longest request."""
    longest = max(request.num_prompt_tokens + request.max_tokens for request in plan.requests)
    return max(round(wanted), -(-longest // BLOCK_SIZE) + 1)


def play(plan: Plan, *, num_blocks: int, policy: str = "first_come", gated: bool = True) -> dict[str, float]:
    """The whole plan on a clock of its own."""
    simulated = Simulated(
        num_blocks=num_blocks, max_model_len=1 << 16, prefix_cache=True, max_running=MAX_RUNNING,
        max_step_tokens=512, gated=gated, policy=policy,
    )  # fmt: skip
    by_id = {request.id: request for request in plan.requests}
    waits = {request.id: set(request.after) for request in plan.requests}
    due = [
        (request.at_s if request.at_s is not None else request.at_unit or 0.0, request.id)
        for request in plan.requests
        if not request.after
    ]
    heapq.heapify(due)
    now, num_open = 0.0, 0
    while due or num_open:
        if not num_open and due:
            now = max(now, due[0][0])
        while due and due[0][0] <= now:
            request = by_id[heapq.heappop(due)[1]]
            ids = [token for segment in request.segments for token in filler(segment)]
            simulated.add(request.id, ids, max_tokens=request.max_tokens, session_id=request.session)
            num_open += 1
        finished = simulated.step()
        now += STEP_S + TOKEN_S * simulated.num_step_tokens
        for done in finished:
            num_open -= 1
            for request_id, waiting in waits.items():
                if done in waiting:
                    waiting.discard(done)
                    if not waiting:
                        heapq.heappush(due, (now + by_id[request_id].delay_s, request_id))
    stats = simulated.scheduler.stats()
    return {
        "hit": stats.num_hit_tokens / stats.num_query_tokens,
        "cached_blocks": float(stats.num_cached_blocks),
        "preemptions": float(stats.num_preemptions),
    }


def filler(segment: Segment) -> list[int]:
    """The same ids for the same segment, wherever it stands."""
    rng = random.Random(segment.segment_id)
    return [rng.randrange(49_000) for _ in range(segment.num_tokens)]
