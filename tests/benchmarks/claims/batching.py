"""Throughput where KV memory is short: pages and continuous batches against runs and static ones.

The claim: 2 to 4 times the throughput (vLLM, arXiv 2309.06180), because more requests fit into the same
memory, and a finished one makes room at once (Orca, OSDI'22).
"""

from loadtest.plan import Plan, PlannedRequest, Segment, plan_of
from tests.benchmarks.claims.kv_waste import lengths
from tests.benchmarks.claims.row import Finding, Row
from tests.benchmarks.claims.serving import Server, figure, load, serving
from tests.benchmarks.claims.simulated import BLOCK_SIZE

NUM_REQUESTS = 32
SCALE = 8
"""Outputs are divided by it, as is the longest context."""
PROMPT_SCALE = 32
"""Prompts are divided by more: these have 1.5 times the tokens of their outputs, where the claim's had half,
and on a CPU a prompt's tokens cost nearly what generated ones do.
"""
MAX_MODEL_LEN = 2048 // SCALE
MEMORY_SHARE = 0.25
"""KV memory, of what all requests together would fill at their ends."""
GOAL = 2.0

MODES = {
    "paged, continuous": (),
    "reserved at most, static": ("--kv-reservation", "max", "--batching", "static"),
    "reserved by oracle, continuous": ("--kv-reservation", "oracle"),
}


def measure() -> Finding:
    plan = lengths_plan()
    demand = sum(request.num_prompt_tokens + request.max_tokens for request in plan.requests)
    num_blocks = round(MEMORY_SHARE * demand / BLOCK_SIZE)
    results = {
        mode: run(plan, "--num-blocks", str(num_blocks), *arguments) for mode, arguments in MODES.items()
    }
    ours, *others = results
    condition = (
        f"{NUM_REQUESTS} ShareGPT prompts / {PROMPT_SCALE} and outputs / {SCALE} at once, "
        f"context {MAX_MODEL_LEN}, "
        f"KV memory {num_blocks * BLOCK_SIZE} tokens, a quarter of the demand; default model"
    )
    rows = [
        Row(
            claim=f"paging and continuous batching multiply {what}",
            condition=condition,
            unit=unit,
            baseline=other,
            baseline_value=results[other][name],
            ours=ours,
            our_value=results[ours][name],
            ratio=results[ours][name] / results[other][name],
            goal="at least 2x" if name == "tokens_per_s" and "static" in other else "",
            holds=results[ours][name] >= GOAL * results[other][name]
            if name == "tokens_per_s" and "static" in other
            else None,
        )
        for other in others
        for what, unit, name in (
            ("throughput", "output tok/s", "tokens_per_s"),
            ("the batch", "requests in a step, mean", "batch"),
        )
    ]
    return Finding(rows=tuple(rows), figures=results)


def lengths_plan() -> Plan:
    requests = []
    for number, (prompt_tokens, output_tokens) in enumerate(lengths()[:NUM_REQUESTS]):
        prompt, output = max(1, prompt_tokens // PROMPT_SCALE), max(1, output_tokens // SCALE)
        segment = Segment(f"u{number}", prompt)
        requests.append(
            PlannedRequest(
                id=f"r{number}", session=f"s{number}", segments=(segment,), max_tokens=output, at_s=0.0
            )
        )
    return plan_of("sharegpt-lengths", requests)


def run(plan: Plan, *arguments: str) -> dict[str, float]:
    with serving("--no-prefix-cache", "--max-model-len", str(MAX_MODEL_LEN), *arguments) as server:
        before = steps(server)
        report = load(plan, server, "--dialect", "completions")
        after = steps(server)
    (repeat,) = report.repeats
    return {
        "tokens_per_s": figure(report, "output tok/s"),
        "batch": (after["rows"] - before["rows"]) / (after["steps"] - before["steps"]),
        "kv_waste": repeat.memory.kv_waste_share or 0.0,
    }


def steps(server: Server) -> dict[str, float]:
    """Steps so far, and requests in them."""
    metrics = server.metrics()
    return {
        "steps": metrics["tidegate_steps_total"],
        "rows": metrics["tidegate_batched_requests_total"],
    }
