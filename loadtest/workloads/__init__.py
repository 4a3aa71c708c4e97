"""Synthetic workloads, one file each, with a `WORKLOAD` that is the contract's. `ls` is the list.

Each is a twin of a published shape: its lengths, pauses and sharing, in made-up text, at any size.
"""

import importlib
import pkgutil
from typing import Protocol

import msgspec

from loadtest.errors import PlanInvalid
from loadtest.plan import Plan


class WorkloadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How much of it. None takes the workload's own published number."""

    sessions: int | None = None
    turns: int | None = None
    """Calls of each session."""
    scale: float = 1.0
    """Multiplies every number of tokens."""
    time_scale: float = 1.0
    """Multiplies every pause."""
    max_context: int = 131_072
    """Prompt and answer together never pass it."""
    share: float = 0.5
    """Part of each prompt that others begin with too; for workloads that have such a part to choose."""
    seed: int = 0

    def validated(self) -> "WorkloadOptions":
        """Return self.

        Raises:
            PlanInvalid: naming the first option out of its bounds.
        """
        bounds: tuple[tuple[str, float | None, float, float], ...] = (
            ("--sessions", self.sessions, 1, 1_000_000),
            ("--turns", self.turns, 1, 10_000),
            ("--scale", self.scale, 1e-4, 100.0),
            ("--time-scale", self.time_scale, 0.0, 1000.0),
            ("--max-context", self.max_context, 16, 10_000_000),
            ("--share", self.share, 0.0, 1.0),
        )
        for name, value, low, high in bounds:
            if value is not None and not low <= value <= high:  # NaN fails too
                raise PlanInvalid(f"{name} is {value}; it must be between {low:g} and {high:g}")
        return self


class Workload(Protocol):
    """Makes plans. Stateless: the same options give the same plan."""

    name: str
    summary: str
    """One line, with the source of its numbers."""

    def build(self, options: WorkloadOptions) -> Plan:
        """Raises PlanInvalid for options out of bounds, or where not even one call fits."""
        ...


def find_workload(name: str) -> Workload:
    """The workload of that name; hyphens are as good as underscores.

    Raises:
        PlanInvalid: naming those there are.
    """
    module = name.replace("-", "_")
    if module not in workload_names():
        raise PlanInvalid(f"there is no workload {name!r}; there are {', '.join(workload_names())}")
    workload: Workload = importlib.import_module(f"{__name__}.{module}").WORKLOAD
    return workload


def workload_names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(__path__))
