"""The curves of all claims on one sheet."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

from tests.benchmarks.claims.row import Curve

COLUMNS = 2


def draw(curves: Sequence[Curve], path: Path) -> None:
    """Write a PNG with one panel per `Curve.panel`; nothing where there is no curve."""
    panels = list(dict.fromkeys(curve.panel for curve in curves))
    if not panels:
        return
    mpl.use("agg")  # no screen is needed
    from matplotlib import pyplot as plt

    rows = -(-len(panels) // COLUMNS)
    figure, axes = plt.subplots(rows, COLUMNS, figsize=(7 * COLUMNS, 4 * rows), squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for panel, axis in zip(panels, axes.flat, strict=False):
        shown = [curve for curve in curves if curve.panel == panel]
        for curve in shown:
            axis.plot(*zip(*curve.points, strict=True), marker="o", label=curve.label)
        axis.set(title=panel, xlabel=shown[0].x_label, ylabel=shown[0].y_label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
