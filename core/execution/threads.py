"""How many compute threads a step should use, found by trying.

Two threads on two cores are the fastest while nothing else runs, and by far the slowest when
something does: each parallel region then waits for the thread that lost its core. A small step may
be faster on one thread at any time. So steps of like size are timed, the next fewer or more
threads are tried now and then, and the faster stay. Results do not change with the number of
threads: the worker checks that before it lets the number change.
"""

from collections import deque
from dataclasses import dataclass, field
from statistics import median

TRIAL_EVERY = 48
"""Steps of one size between two trials: 3 in 51 may be slower than need be."""
TRIAL_STEPS = 3
REMEMBERED_STEPS = 5
WORTHWHILE = 0.93
"""A trial wins below this share of the usual time."""
ALARM = 1.8
"""A step this much slower than usual brings the next trial forward."""


def thread_counts(most: int) -> tuple[int, ...]:
    """The numbers that are tried: powers of two below `most`, and `most` itself."""
    return (*(1 << power for power in range(most.bit_length()) if 1 << power < most), most)


@dataclass(slots=True)
class _Size:
    """Steps of like size: what they used to take, and the trial that is on, if one is."""

    place: int
    """Index of the number in use."""
    times_s: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED_STEPS))
    steps_to_trial: int = REMEMBERED_STEPS
    trial_place: int | None = None
    trial_times_s: list[float] = field(default_factory=list)
    upwards: bool = False
    """Which way the next trial looks."""


class ThreadGovernor:
    """Chooses a step's number of threads. Knows no torch and reads no clock.

    Args:
        counts: the numbers to choose from, ascending; with a single one nothing is tried.
    """

    def __init__(self, counts: tuple[int, ...]) -> None:
        assert list(counts) == sorted(set(counts)), counts
        self._counts = counts
        self._sizes: dict[int, _Size] = {}

    def choose(self, num_tokens: int) -> int:
        """Threads for a step of so many tokens."""
        size = self._size(num_tokens)
        return self._counts[size.place if size.trial_place is None else size.trial_place]

    def saw(self, num_tokens: int, seconds: float) -> None:
        """Learn what the step that was last chosen for took."""
        size = self._size(num_tokens)
        if size.trial_place is not None:
            size.trial_times_s.append(seconds)
            if len(size.trial_times_s) == TRIAL_STEPS:
                self._judge(size)
            return
        if len(size.times_s) == REMEMBERED_STEPS and seconds > ALARM * median(size.times_s):
            size.steps_to_trial = min(size.steps_to_trial, 2)
        size.times_s.append(seconds)
        size.steps_to_trial -= 1
        if size.steps_to_trial <= 0 and len(size.times_s) == REMEMBERED_STEPS:
            self._begin_trial(size)

    def _size(self, num_tokens: int) -> _Size:
        return self._sizes.setdefault(num_tokens.bit_length(), _Size(len(self._counts) - 1))

    def _begin_trial(self, size: _Size) -> None:
        """Try the next number up or down, in turn; at either end the only way there is."""
        step = 1 if size.upwards else -1
        if not 0 <= size.place + step < len(self._counts):
            step = -step
        size.upwards = not size.upwards
        size.steps_to_trial = TRIAL_EVERY
        if 0 <= size.place + step < len(self._counts):
            size.trial_place, size.trial_times_s = size.place + step, []

    def _judge(self, size: _Size) -> None:
        assert size.trial_place is not None
        if median(size.trial_times_s) < WORTHWHILE * median(size.times_s):
            size.place = size.trial_place
            size.times_s = deque(size.trial_times_s, maxlen=REMEMBERED_STEPS)
        size.trial_place = None
