"""When waiting requests may join those that run."""

from typing import Protocol

from core.config import BatchingKind


class Batching(Protocol):
    """Asked once per step, before anybody is admitted."""

    fills_at_once: bool
    """Admit all there is room for in one step, even whom the step's budget leaves nothing."""

    def num_admissible(self, *, num_running: int, max_running: int) -> int:
        """The most requests that this step may admit."""
        ...


class ContinuousBatching:
    """A request joins as soon as there is room for it."""

    fills_at_once = False

    def num_admissible(self, *, num_running: int, max_running: int) -> int:
        return max_running - num_running


class StaticBatching:
    """A batch is filled while nobody runs, and the next one when the last of it has ended. For comparison:
    this is what servers did before batching went by steps, less their padding.
    """

    fills_at_once = True

    def num_admissible(self, *, num_running: int, max_running: int) -> int:
        return 0 if num_running else max_running


def find_batching(kind: BatchingKind) -> Batching:
    kinds: dict[BatchingKind, type[Batching]] = {"continuous": ContinuousBatching, "static": StaticBatching}
    return kinds[kind]()
