"""Which of its parts a machine will be short of first, by the work that a trace brings.

Work is seconds of the machine for each second of the trace: above 1 it falls behind for good. The parts
are prefill of what no cache could have, prefill of what a larger cache would have had, and decode. Where
they leave room on average but not in the busiest ten seconds, arrivals come in bursts.
"""

from typing import Literal

import msgspec
import numpy as np

Kind = Literal["prefill", "decode", "KV capacity", "arrival bursts", "none"]

WINDOW_S = 10.0
MAX_WINDOWS = 1_000_000
"""Of a trace of years the windows are longer."""
BUSY = 0.7
"""Mean load from which queues grow long, and the largest part of the work is called the bottleneck."""


class Speeds(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens a second of the whole machine."""

    prefill_tokens_per_s: float
    decode_tokens_per_s: float


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """A trace's work. `times` never fall; hits are shares of the prompt tokens."""

    times: tuple[float, ...]
    input_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]
    ideal_hit: float
    hit_here: float


class Bottleneck(msgspec.Struct, frozen=True, kw_only=True):
    """Loads are seconds of work per second."""

    kind: Kind
    prefill_load: float
    """Of tokens that even an infinite cache has not."""
    missed_load: float
    """Prefill of tokens that an infinite cache has and this one has dropped."""
    decode_load: float
    peak_load: float
    """All of it in the 99th percentile of windows of ten seconds."""
    reason: str


def find_bottleneck(demand: Demand, *, machine: Speeds) -> Bottleneck:
    """Name the part that is short, and say why in numbers."""
    duration = max(demand.times[-1] - demand.times[0], WINDOW_S)
    fresh = sum(demand.input_tokens) / machine.prefill_tokens_per_s / duration
    prefill = fresh * (1.0 - demand.ideal_hit)
    missed = fresh * max(0.0, demand.ideal_hit - demand.hit_here)
    decode = sum(demand.output_tokens) / machine.decode_tokens_per_s / duration
    peak = _peak(demand, machine, duration=duration)
    parts: dict[Kind, float] = {"prefill": prefill, "KV capacity": missed, "decode": decode}
    total = sum(parts.values())
    largest = max(parts, key=parts.__getitem__)
    kind: Kind = largest if total > BUSY else "arrival bursts" if peak > 1.0 else "none"
    said = (
        f"prefill {prefill:.2f} + dropped KV computed again {missed:.2f} + decode {decode:.2f} "
        f"= {total:.2f} s of work a second"
    )
    why = {
        "prefill": f"{prefill / max(total, 1e-12):.0%} of it is prefill that no cache saves",
        "decode": f"{decode / max(total, 1e-12):.0%} of it is decode",
        "KV capacity": f"the cache hits {demand.hit_here:.1%} where {demand.ideal_hit:.1%} are possible",
        "arrival bursts": f"on average there is room, but busy stretches of {WINDOW_S:g} s bring {peak:.2f}",
        "none": f"there is room, also in busy stretches of {WINDOW_S:g} s ({peak:.2f})",
    }[kind]
    return Bottleneck(
        kind=kind,
        prefill_load=prefill,
        missed_load=missed,
        decode_load=decode,
        peak_load=peak,
        reason=f"{said}; {why}",
    )


def _peak(demand: Demand, machine: Speeds, *, duration: float) -> float:
    """Load of the 99th percentile of windows, a request's work counted where it arrives."""
    work = (
        np.array(demand.input_tokens)
        * (1.0 - min(demand.hit_here, demand.ideal_hit))
        / machine.prefill_tokens_per_s
        + np.array(demand.output_tokens) / machine.decode_tokens_per_s
    )
    window = max(WINDOW_S, duration / MAX_WINDOWS)
    windows = ((np.array(demand.times) - demand.times[0]) // window).astype(np.int64)
    loads = np.bincount(windows, weights=work, minlength=int(duration // window)) / window
    return float(np.percentile(loads, 99))
