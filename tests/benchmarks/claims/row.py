"""One line of the table: a claim, its baseline in the same run, and whether the goal was met."""

from typing import Any

import msgspec


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """`ratio` says how many times better ours is than the baseline; None where there is no such number."""

    claim: str
    condition: str
    """Model, scale and load: what the figures hold for."""
    unit: str
    baseline: str
    baseline_value: float | None
    ours: str
    our_value: float | None
    ratio: float | None = None
    goal: str = ""
    holds: bool | None = None
    """None: nothing was promised."""


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the plot."""

    panel: str
    x_label: str
    y_label: str
    label: str
    points: tuple[tuple[float, float], ...]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What one claim's file returns."""

    rows: tuple[Row, ...]
    curves: tuple[Curve, ...] = ()
    figures: dict[str, Any] = {}
    """Everything measured, for the JSON file."""
