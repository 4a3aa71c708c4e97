"""A report as tables in a terminal. Unknown is "unknown", infinite is "failed"; neither is ever 0."""

import math
from typing import NamedTuple

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table

from loadtest.figures import KINDS, LATENCIES, Figure, Unit
from loadtest.report import Report

_COLUMNS = ("p50", "p90", "p99", "max")


def print_report(report: Report, console: Console) -> None:
    console.print(report_table(report))


def report_table(report: Report) -> RenderableType:
    """What was run, whether it counts, and every figure."""
    parts: list[RenderableType] = [*_headings(report), _latency_table(report), _other_table(report)]
    faults: dict[str, int] = {}
    for repeat in report.repeats:
        for kind, count in repeat.measures.faults.items():
            faults[kind] = faults.get(kind, 0) + count
    if faults:
        told = ", ".join(f"{count} {kind}" for kind, count in faults.items())
        parts.append(f"[red]failures over all repeats: {escape(told)}[/red]")
        parts.extend(f"  {escape(text)}" for text in _examples(report))
    return Group(*parts)


def format_value(value: float | None, unit: Unit) -> str:
    """As people read it: 12.3 ms, 45.6 %, 1.2 GiB."""
    if value is None:
        return "unknown"
    if math.isinf(value):
        return "failed"
    scale = _scale(value, unit)
    number = _number(value, scale)
    return f"{number} {scale.name}" if scale.name else number


def format_figure(figure: Figure) -> str:
    """The median with its interval in the same unit, where there is one to speak of."""
    text = format_value(figure.median, figure.unit)
    if figure.median is None or figure.low is None or figure.high is None or figure.low == figure.high:
        return text
    # Among failures the lower end says in which unit to read.
    scale = _scale(figure.low if math.isinf(figure.median) else figure.median, figure.unit)
    return f"{text} [{_number(figure.low, scale)}, {_number(figure.high, scale)}]"


class _Scale(NamedTuple):
    """A unit that people read, how much of it one of ours is, and its decimals."""

    name: str
    factor: float
    decimals: int


def _scale(value: float, unit: Unit) -> _Scale:
    if unit == "s":
        return _Scale("ms", 1000, 1) if abs(value) < 1 else _Scale("s", 1, 2)
    if unit == "share":
        return _Scale("%", 100, 1)
    if unit == "bytes":
        return _Scale("GiB", 2**-30, 2) if value >= 2**30 else _Scale("MiB", 2**-20, 1)
    return _Scale("", 1, 2 if abs(value) < 1000 else 0)


def _number(value: float, scale: _Scale) -> str:
    return "failed" if math.isinf(value) else f"{value * scale.factor:,.{scale.decimals}f}"


def _headings(report: Report) -> list[RenderableType]:
    target, plan = report.target, report.plan
    ideal = "unknown" if plan.ideal_hit is None else f"{plan.ideal_hit:.1%}"
    work = (
        f"[bold]{escape(plan.name)}[/bold]: {plan.num_requests} requests, {plan.num_sessions} sessions, "
        f"{plan.num_prompt_tokens:,} prompt tokens, ideal hit {ideal}; {len(report.repeats)} repeats"
    )
    where = escape(f"{target.url} ({target.dialect}), model {target.model}, {target.described}")
    notes = [escape(f"note: {note}") for note in (*plan.notes, *report.notes)]
    reasons = [f"[bold red]VOID: {escape(reason)}[/bold red]" for reason in report.void_reasons]
    return [work, where, *notes, *reasons]


def _latency_table(report: Report) -> Table:
    table = Table(title=escape("latency: median over the repeats [interval]"), title_justify="left")
    table.add_column("figure")
    for column in _COLUMNS:
        table.add_column(column, justify="right")
    for name in LATENCIES:
        figures = [report.summary.get(f"{name} {column}", Figure(median=None)) for column in _COLUMNS]
        table.add_row(name, *(escape(format_figure(figure)) for figure in figures))
    return table


def _other_table(report: Report) -> Table:
    table = Table(title="work, reuse and cost", title_justify="left")
    table.add_column("figure")
    table.add_column(escape("median [interval]"), justify="right")
    of_latency = {name for name in KINDS if name.rpartition(" ")[0] in LATENCIES}
    for name, figure in report.summary.items():
        if name not in of_latency:
            unit = " /s" if figure.unit == "1/s" and not name.endswith("/s") else ""
            table.add_row(name, escape(format_figure(figure)) + unit)
    return table


def _examples(report: Report) -> list[str]:
    """The first message of each kind of failure, at most five."""
    found: dict[str, str] = {}
    for repeat in report.repeats:
        for row in repeat.rows:
            if row.fault is not None:
                found.setdefault(row.fault.partition(":")[0], f"{row.id}: {row.fault}")
    return list(found.values())[:5]
