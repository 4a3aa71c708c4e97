"""Reproduce the field's claims on this machine: a table, a JSON file and a plot.

    make claims                      all of them, in under 15 minutes on two cores
    make claims ARGS="kv_waste"      some of them
    make claims ARGS="--out DIR"     where to write (build/claims)

Leave the machine alone meanwhile: the figures are ratios of runs that follow each other.
"""

import argparse
import importlib
import os
import platform
import time
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from tests.benchmarks.claims.plot import draw
from tests.benchmarks.claims.row import Finding, Row
from tests.benchmarks.claims.serving import compile_ahead

CLAIMS = (
    "kv_waste", "prefix_hits", "loop_stalls", "batching", "shared_prefix", "chunked_prefill",
    "session_growth",
)  # fmt: skip
"""Modules of this package, each with a `measure() -> Finding`."""
SERVED = {"batching", "shared_prefix", "chunked_prefill", "session_growth"}
"""Those that put work on a server."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("claims", nargs="*", default=CLAIMS, metavar="CLAIM", help=", ".join(CLAIMS))
    parser.add_argument("--out", type=Path, default=Path("build/claims"))
    options = parser.parse_args()
    if unknown := set(options.claims) - set(CLAIMS):
        parser.error(f"no such claim: {', '.join(sorted(unknown))}; there are {', '.join(CLAIMS)}")
    console = Console(width=150)
    findings: dict[str, Finding] = {}
    seconds: dict[str, float] = {}
    began_at = time.monotonic()
    if not SERVED.isdisjoint(options.claims):
        console.print("[dim]compiling what is not compiled yet ...[/dim]")
        compile_ahead()
    seconds["compiling"] = time.monotonic() - began_at
    for name in options.claims:
        began_at = time.monotonic()
        console.print(f"[dim]{name} ...[/dim]")
        measure = importlib.import_module(f"tests.benchmarks.claims.{name}").measure
        findings[name] = measure()
        seconds[name] = time.monotonic() - began_at
        console.print(f"[dim]  {seconds[name]:.0f} s[/dim]")
    console.print(table([row for finding in findings.values() for row in finding.rows]))
    options.out.mkdir(parents=True, exist_ok=True)
    document = {
        "schema": "tidegate-claims/1",
        "machine": machine(),
        "seconds": seconds,
        "findings": msgspec.to_builtins(findings),
    }
    (options.out / "claims.json").write_bytes(msgspec.json.format(msgspec.json.encode(document)))
    draw([curve for finding in findings.values() for curve in finding.curves], options.out / "claims.png")
    console.print(f"{sum(seconds.values()):.0f} s; {options.out}/claims.json, {options.out}/claims.png")


def machine() -> dict[str, object]:
    return {
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "load_before": os.getloadavg()[0],
    }


def table(rows: list[Row]) -> Table:
    shown = Table(title="The field's claims on this machine")
    for heading in ("claim", "condition", "baseline", "ours", "unit", "ratio", "goal", "holds"):
        shown.add_column(heading, overflow="fold")
    for row in rows:
        shown.add_row(
            row.claim,
            row.condition,
            f"{row.baseline} {number(row.baseline_value)}",
            f"{row.ours} {number(row.our_value)}",
            row.unit,
            number(row.ratio),
            row.goal,
            {None: "-", True: "yes", False: "[red]no[/red]"}[row.holds],
        )
    return shown


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


if __name__ == "__main__":
    main()
