"""Two reports of the same work: ratios of B to A, request by request, and whether B is worse.

Each request of each repeat of A is paired with the same request of the same repeat of B, so what differs
between requests cancels out. A figure is a regression when the whole bootstrap interval of its median
ratio lies beyond the bound on the worse side. Whole-pass figures, such as throughput, pair by repeat.
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import msgspec
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from loadtest.bootstrap import Interval, grouped_median_interval
from loadtest.errors import PlanInvalid
from loadtest.figures import KINDS, Better, Pass
from loadtest.report import Repeat, Report, Row

BOUND = 0.05
"""A median may be worse by so much."""
MIN_PAIRS = 3
"""With fewer, an interval is too short to trust, and no verdict is given."""

FAILURES = "failures"

Verdict = Literal["better", "same", "worse", "unclear", "unknown"]


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of B divided by that of A. None is unknown: too few pairs with a value on both sides."""

    name: str
    better: Better
    num_pairs: int
    num_unknown: int
    """Pairs that one side has no value for; a failure is a value."""
    ratio: float | None
    low: float | None
    high: float | None
    verdict: Verdict


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Of two reports of one plan. `failed_more` is how many more requests failed in B."""

    a: str
    b: str
    bound: float
    ratios: tuple[Ratio, ...]
    failed_more: int
    warnings: tuple[str, ...] = ()

    @property
    def regressions(self) -> tuple[Ratio, ...]:
        return tuple(ratio for ratio in self.ratios if ratio.verdict == "worse")

    @property
    def exit_code(self) -> int:
        """1 on a regression."""
        return 1 if self.regressions else 0


class _Paired(NamedTuple):
    name: str
    read: Callable[[Row], float | None]


_BY_REQUEST = (
    _Paired("TTFT", lambda row: row.ttft),
    _Paired("TTFT_s", lambda row: row.ttft_sched),
    _Paired("TPOT", lambda row: row.tpot),
    _Paired("max gap", lambda row: row.max_gap),
    _Paired("E2E", lambda row: row.e2e),
    _Paired("E2E_s", lambda row: row.e2e_sched),
)
_BY_REPEAT = (
    *("ITL p50", "ITL p99", "job completion p50", "TTFT_s p99", "max gap p99"),
    *("output tok/s", "requests/s", "request goodput", "token goodput", "session goodput", "fluidity"),
    *("hit", "later-turn hit", "server PSS", "kv live memory", "CPU-s per 1,000 tokens"),
    "joules per 1,000 tokens",
)


def compare(a: Report, b: Report, *, bound: float = BOUND, seed: int = 0) -> Comparison:
    """
    Args:
        bound: how much worse a median may be, as a share of it.
    Raises:
        PlanInvalid: different plans or SLOs, a void run, or nothing to pair.
    """
    _refuse_unlike(a, b)
    pairs = list(zip(a.repeats, b.repeats, strict=False))
    ratios = [
        _judge(paired.name, "lower", _request_pairs(pairs, paired.read), bound=bound, seed=seed)
        for paired in _BY_REQUEST
    ]
    for name in _BY_REPEAT:
        kind = KINDS[name]
        values = [[(kind.read(_pass(x)), kind.read(_pass(y))) for x, y in pairs]]
        ratios.append(_judge(name, kind.better, values, bound=bound, seed=seed))
    failed_more = sum(y.measures.num_failed - x.measures.num_failed for x, y in pairs)
    ratios.append(_errors(pairs))
    return Comparison(
        a=_name(a),
        b=_name(b),
        bound=bound,
        ratios=tuple(ratios),
        failed_more=failed_more,
        warnings=_warnings(a, b),
    )


def comparison_table(comparison: Comparison) -> RenderableType:
    """Ratios below 1 are B being lower; the verdict says whether that is good."""
    table = Table(title=f"B / A, median of paired ratios; bound {comparison.bound:.0%}", title_justify="left")
    for column in ("figure", "better", "pairs", "B / A", "95 % interval", "verdict"):
        table.add_column(column, justify="left" if column in ("figure", "better", "verdict") else "right")
    colours = {"worse": "red", "better": "green"}
    for ratio in comparison.ratios:
        colour = colours.get(ratio.verdict)
        verdict = f"[{colour}]{ratio.verdict}[/{colour}]" if colour else ratio.verdict
        interval = f"{_format(ratio.low)} to {_format(ratio.high)}" if ratio.low is not None else ""
        pairs = f"{ratio.num_pairs}" + (f" ({ratio.num_unknown} unknown)" if ratio.num_unknown else "")
        told = f"{comparison.failed_more:+d}" if ratio.name == FAILURES else _format(ratio.ratio)
        table.add_row(ratio.name, ratio.better, pairs, told, interval, verdict)
    warnings = [f"[yellow]{escape(text)}[/yellow]" for text in comparison.warnings]
    worse = ", ".join(ratio.name for ratio in comparison.regressions)
    closing = f"[bold red]regression: {escape(worse)}[/bold red]" if worse else "no regression"
    return Group(escape(f"A: {comparison.a}"), escape(f"B: {comparison.b}"), *warnings, table, closing)


def _judge(
    name: str,
    better: Better,
    groups: Sequence[Sequence[tuple[float | None, float | None]]],
    *,
    bound: float,
    seed: int,
) -> Ratio:
    """
    Args:
        groups: pairs of values, A's first, one group per repeat.
    """
    found = [[_ratio(x, y) for x, y in group] for group in groups]
    known = [[value for value in group if value is not None] for group in found]
    num_pairs = sum(len(group) for group in known)
    num_unknown = sum(len(group) for group in found) - num_pairs
    if not num_pairs:
        return Ratio(
            name=name,
            better=better,
            num_pairs=0,
            num_unknown=num_unknown,
            ratio=None,
            low=None,
            high=None,
            verdict="unknown",
        )
    interval = grouped_median_interval(known, seed=seed)
    return Ratio(
        name=name,
        better=better,
        num_pairs=num_pairs,
        num_unknown=num_unknown,
        ratio=interval.median,
        low=interval.low,
        high=interval.high,
        verdict=_verdict(interval, better, bound) if num_pairs >= MIN_PAIRS else "unclear",
    )


def _verdict(interval: Interval, better: Better, bound: float) -> Verdict:
    """Beyond the bound as a whole, within it as a whole, or neither."""
    above, below = 1.0 + bound, 1.0 - bound
    if interval.low > above:
        return "worse" if better == "lower" else "better" if better == "higher" else "unclear"
    if interval.high < below:
        return "better" if better == "lower" else "worse" if better == "higher" else "unclear"
    return "same" if interval.low >= below and interval.high <= above else "unclear"


def _ratio(a: float | None, b: float | None) -> float | None:
    """Failed on both sides is no difference; on B's alone infinitely more, on A's alone infinitely less."""
    if a is None or b is None:
        return None
    if a == b:
        return 1.0
    if math.isinf(b) or a == 0:
        return math.inf
    return b / a


def _request_pairs(
    pairs: Sequence[tuple[Repeat, Repeat]], read: Callable[[Row], float | None]
) -> list[list[tuple[float | None, float | None]]]:
    found = []
    for x, y in pairs:
        of_b = {row.id: row for row in y.rows}
        found.append([(read(row), read(of_b[row.id])) for row in x.rows if row.id in of_b])
    return found


def _errors(pairs: Sequence[tuple[Repeat, Repeat]]) -> Ratio:
    """Failures are counted, not sampled: worse where more requests failed in every single repeat."""
    counts = [(x.measures.num_failed, y.measures.num_failed) for x, y in pairs]
    num_a, num_b = sum(x for x, _ in counts), sum(y for _, y in counts)
    verdict: Verdict = "same" if num_a == num_b else "unclear"
    if all(y > x for x, y in counts):
        verdict = "worse"
    elif all(y < x for x, y in counts):
        verdict = "better"
    return Ratio(
        name=FAILURES,
        better="lower",
        num_pairs=len(counts),
        num_unknown=0,
        ratio=_ratio(num_a, num_b),
        low=None,
        high=None,
        verdict=verdict,
    )


def _refuse_unlike(a: Report, b: Report) -> None:
    if a.plan.sha256 != b.plan.sha256:
        raise PlanInvalid(
            f"A did plan {a.plan.name} ({a.plan.sha256[:12]}), B did {b.plan.name} ({b.plan.sha256[:12]}): "
            "only runs of the same plan compare"
        )
    for name, report in (("A", a), ("B", b)):
        if report.void_reasons:
            raise PlanInvalid(f"{name} is void, so its figures mean nothing: {report.void_reasons[0]}")
        if not report.repeats:
            raise PlanInvalid(f"{name} has no repeats")
    if a.slo != b.slo:
        raise PlanInvalid("A and B had different SLOs, so their goodput does not compare; use the same")


def _warnings(a: Report, b: Report) -> tuple[str, ...]:
    """What differs besides the server, so that nobody reads it as the server's doing."""
    found = []
    if a.machine != b.machine:
        found.append("the client ran on different machines")
    if len(a.repeats) != len(b.repeats):
        found.append(f"A has {len(a.repeats)} repeats and B {len(b.repeats)}: the first ones are paired")
    names = sorted(
        name for name in a.options.keys() | b.options.keys() if a.options.get(name) != b.options.get(name)
    )
    if names:
        found.append(f"options differ: {', '.join(names)}")
    if a.target.dialect != b.target.dialect:
        found.append(f"dialects differ: {a.target.dialect} and {b.target.dialect}")
    return tuple(found)


def _pass(repeat: Repeat) -> Pass:
    return Pass(repeat.measures, repeat.resources, repeat.memory)


def _name(report: Report) -> str:
    target = report.target
    return f"{target.described} at {target.url}, {target.model}, {report.started_at}"


def _format(ratio: float | None) -> str:
    if ratio is None:
        return "unknown"
    return "failed" if math.isinf(ratio) else f"{ratio:.3f}"
