"""How long running streams stand still while a long prompt comes in, in chunks or whole.

The claim: chunks keep the time between tokens flat (Sarathi-Serve, OSDI'24).
"""

import statistics

from loadtest.plan import Plan, PlannedRequest, Segment, plan_of
from tests.benchmarks.claims.row import Finding, Row
from tests.benchmarks.claims.serving import load, serving

PROMPT_TOKENS = 4000
NUM_PROMPTS = 5
"""One after the other; each is an arrival of its own while the streams run."""
NUM_STREAMS = 3
LATER_S = 2.0
"""The long prompt comes so long after the streams."""
GOAL = 5.0


def measure() -> Finding:
    chunked = gaps()
    whole = gaps("--no-chunked-prefill")
    ours, theirs = statistics.median(chunked), statistics.median(whole)
    row = Row(
        claim="a long prompt in chunks does not stop running streams",
        condition=f"{PROMPT_TOKENS} tokens beside {NUM_STREAMS} streams, median of {NUM_PROMPTS}",
        unit="s, longest gap between tokens",
        baseline="prompt in one step",
        baseline_value=theirs,
        ours="in chunks",
        our_value=ours,
        ratio=theirs / ours,
        goal="at least 5x lower",
        holds=theirs >= GOAL * ours,
    )
    return Finding(rows=(row,), figures={"chunked_s": chunked, "whole_s": whole})


def gaps(*arguments: str) -> list[float]:
    """Per long prompt, the longest gap of any stream that ran beside it."""
    with serving(*arguments) as server:
        report = load(stream_plan(), server, "--dialect", "completions")
    (repeat,) = report.repeats
    longest = []
    for number in range(NUM_PROMPTS):
        beside = [row.max_gap for row in repeat.rows if row.session == f"streams{number}"]
        longest.append(max(gap for gap in beside if gap is not None))
    return longest


def stream_plan() -> Plan:
    """Rounds: streams begin, the long prompt comes 2 s later, and the next round when all have ended."""
    requests: list[PlannedRequest] = []
    for number in range(NUM_PROMPTS):
        before = tuple(request.id for request in requests[-NUM_STREAMS - 1 :])
        begun_s = None if before else 0.0
        requests += [
            PlannedRequest(
                id=f"stream{number}-{stream}",
                session=f"streams{number}",
                segments=(Segment(f"s{number}-{stream}", 32),),
                max_tokens=96,
                at_s=begun_s,
                after=before,
            )
            for stream in range(NUM_STREAMS)
        ]
        requests.append(
            PlannedRequest(
                id=f"long{number}",
                session=f"long{number}",
                segments=(Segment(f"l{number}", PROMPT_TOKENS),),
                max_tokens=1,
                at_s=None if before else LATER_S,
                after=before,
                delay_s=LATER_S if before else 0.0,
            )
        )
    return plan_of("streams-and-long-prompts", requests)
