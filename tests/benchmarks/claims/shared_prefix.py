"""What finding a shared prefix is worth, over the share of the prompt that is shared, and what it costs.

The claim: up to 6.4 times the throughput where prompts share much, almost nothing lost where they share
nothing (SGLang, arXiv 2312.07104).
"""

import statistics

from loadtest.plan import Plan, PlannedRequest, Segment, plan_of
from tests.benchmarks.claims.row import Curve, Finding, Row
from tests.benchmarks.claims.serving import Server, figure, load, serving

SHARES = (0.0, 0.5, 0.9, 0.98)
NUM_REQUESTS = 16
PROMPT_TOKENS = 768
ANSWER_TOKENS = 1
CLAIMED = 6.4
PAIRS = 3
"""Of the comparison without sharing."""
COSTS = 0.01


def measure() -> Finding:
    with serving("--no-prefix-cache") as off, serving() as on:
        without = throughput(off, SHARES[-1])
        with_tree = {share: throughput(on, share) for share in SHARES}
        pairs = [(throughput(off, 0.0, small=True), throughput(on, 0.0, small=True)) for _ in range(PAIRS)]
    multiples = {share: value / without for share, value in with_tree.items()}
    overhead = statistics.median(1 - ours / theirs for theirs, ours in pairs)
    condition = f"{NUM_REQUESTS} prompts of {PROMPT_TOKENS}, {ANSWER_TOKENS} out, 4 at a time; default model"
    rows = [
        Row(
            claim=f"a shared prefix is computed once: {share:.0%} shared",
            condition=condition,
            unit="requests/s",
            baseline="radix off",
            baseline_value=without,
            ours="radix on",
            our_value=with_tree[share],
            ratio=multiples[share],
            goal="above 6.4x" if share == SHARES[-1] else "",
            holds=multiples[share] > CLAIMED if share == SHARES[-1] else None,
        )
        for share in SHARES
    ]
    rows.append(
        Row(
            claim="and costs nothing where nothing is shared",
            condition=f"median of {PAIRS} pairs of runs",
            unit="requests/s",
            baseline="radix off",
            baseline_value=statistics.median(theirs for theirs, _ in pairs),
            ours="radix on",
            our_value=statistics.median(ours for _, ours in pairs),
            ratio=1 - overhead,
            goal="under 1 % lost",
            holds=overhead < COSTS,
        )
    )
    curve = Curve(
        panel="throughput with the radix tree, times without",
        x_label="share of the prompt that is shared",
        y_label="times",
        label=f"{PROMPT_TOKENS} tokens in, {ANSWER_TOKENS} out",
        points=tuple(multiples.items()),
    )
    return Finding(
        rows=tuple(rows), curves=(curve,), figures={"without": without, "with": with_tree, "pairs": pairs}
    )


def throughput(server: Server, share: float, *, small: bool = False) -> float:
    """Requests per second."""
    plan = shared_plan(share, num_requests=4 if small else NUM_REQUESTS)
    return figure(load(plan, server, "--dialect", "completions", "--concurrency", "4"), "requests/s")


def shared_plan(share: float, *, num_requests: int) -> Plan:
    shared = round(share * PROMPT_TOKENS)
    prefix = (Segment("prefix", shared),) if shared else ()
    return plan_of(
        f"shared-{share:.2f}",
        [
            PlannedRequest(
                id=f"r{number}",
                session=f"s{number}",
                segments=(*prefix, Segment(f"q{number}", PROMPT_TOKENS - shared)),
                max_tokens=ANSWER_TOKENS,
                at_s=0.0,
            )
            for number in range(num_requests)
        ],
    )
