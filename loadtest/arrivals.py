"""When requests start: the plan's own times, or a random process; and bursts that clocks made.

Some traces carry timestamps that were rounded to whole quanta: everything of three seconds at one
instant. Replayed as they are, they send bursts that never were (Mooncake FAST'25: 72 % of the
timestamps are multiples of 3 s). Such bursts are spread over their quantum, and the plan's notes say so.
"""

import itertools
import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Literal, get_args

import msgspec

from loadtest.errors import PlanInvalid
from loadtest.plan import Plan, PlannedRequest, plan_of

Process = Literal["plan", "poisson", "gamma", "constant"]

DEFAULT_CV = 1.5
"""Gaps' standard deviation over their mean: the rate-weighted median of 65,845 client windows (ServeGen)."""
MIN_BURST = 3
"""Timestamps at one instant before it is taken for a burst that a clock made."""
MIN_BURSTS = 10
MIN_QUANTISED_SHARE = 0.5


def schedule(
    plan: Plan, *, rate: float, process: Process = "plan", cv: float = DEFAULT_CV, seed: int = 0
) -> dict[str, float]:
    """Start times, in seconds from the run's start, of the requests that wait for no other.

    Args:
        rate: requests a second; `plan` divides `at_unit` by it and leaves `at_s` as it is.
        process: the other three give the plan's starts, in their order, new times from 0 on.
        cv: of the gaps of `gamma`.
    Raises:
        PlanInvalid: a rate or cv out of bounds, a process there is not.
    """
    _check(rate=rate, process=process, cv=cv)
    own = {request.id: _own_time(request, rate) for request in plan.requests if not request.after}
    if process == "plan":
        return own
    shape = {"poisson": 1.0, "gamma": 1.0 / (cv * cv), "constant": math.inf}[process]
    generator = random.Random(f"{seed} arrivals")
    now = 0.0
    times: dict[str, float] = {}
    for request_id in sorted(own, key=own.__getitem__):
        times[request_id] = now
        now += 1.0 / rate if math.isinf(shape) else generator.gammavariate(shape, 1.0 / (shape * rate))
    return {request_id: times[request_id] for request_id in own}


def quantum_of(times: Sequence[float]) -> float | None:
    """The clock's quantum in seconds where most timestamps are whole bursts of it, else None."""
    bursts = sorted(at for at, count in Counter(times).items() if count >= MIN_BURST)
    if len(bursts) < MIN_BURSTS:
        return None
    gaps = Counter(round(after - before, 6) for before, after in itertools.pairwise(bursts))
    quantum, _ = gaps.most_common(1)[0]
    share = sum(_is_multiple(at, quantum) for at in times) / len(times)
    return quantum if share >= MIN_QUANTISED_SHARE else None


def spread_bursts(times: Sequence[float], quantum: float, *, seed: int = 0) -> list[float]:
    """The same arrivals, those on whole quanta spread evenly at random over the quantum that follows.

    Order is kept among the arrivals of one instant. Units: seconds.
    """
    generator = random.Random(f"{seed} bursts")
    sizes = Counter(at for at in times if _is_multiple(at, quantum))
    offsets = {
        at: iter(sorted(generator.random() * quantum for _ in range(size)))
        for at, size in sorted(sizes.items())
    }
    return [at + next(offsets[at]) if at in offsets else at for at in times]


def spread_plan(plan: Plan, *, seed: int = 0) -> Plan:
    """The plan with the bursts that its clock made spread, and a note of it; itself where there are none."""
    starts = [request for request in plan.requests if request.at_s is not None]
    times = [request.at_s or 0.0 for request in starts]
    quantum = quantum_of(times)
    if quantum is None:
        return plan
    spread = dict(
        zip((request.id for request in starts), spread_bursts(times, quantum, seed=seed), strict=True)
    )
    requests = [
        msgspec.structs.replace(request, at_s=spread[request.id]) if request.id in spread else request
        for request in plan.requests
    ]
    share = sum(_is_multiple(at, quantum) for at in times) / len(times)
    note = (
        f"{share:.0%} of the start times were multiples of {quantum:g} s: spread over that time, seed {seed}"
    )
    return plan_of(plan.name, requests, notes=(*plan.notes, note))


def _own_time(request: PlannedRequest, rate: float) -> float:
    return request.at_s if request.at_s is not None else (request.at_unit or 0.0) / rate


def _is_multiple(at: float, quantum: float) -> bool:
    return abs(at - quantum * round(at / quantum)) < 1e-6


def _check(*, rate: float, process: str, cv: float) -> None:
    if process not in get_args(Process):
        raise PlanInvalid(f"the arrivals are {process!r}; they must be one of {', '.join(get_args(Process))}")
    for name, number, low, high in (("the rate", rate, 1e-6, 1e6), ("cv", cv, 0.05, 100.0)):
        if not low <= number <= high:  # NaN fails too
            raise PlanInvalid(f"{name} is {number}; it must be between {low:g} and {high:g}")
