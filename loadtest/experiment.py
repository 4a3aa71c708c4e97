"""A whole measurement: every plan on every target, several times, in random order.

Each pass has text of its own (a nonce), so that none finds another's prefixes in a cache. What makes
a pass worthless is found here and said in the report: a busy client, a warm cache, prompts of other
lengths than planned, an end before the end.
"""

import asyncio
import datetime as dt
import random
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import msgspec

from loadtest.arrivals import DEFAULT_CV, Process, schedule, spread_plan
from loadtest.bench import Bench, Say, TargetOptions, open_bench
from loadtest.calibration import estimate, shrink
from loadtest.checks import control_of_pass
from loadtest.errors import PlanInvalid
from loadtest.health import HealthBounds
from loadtest.ideal import IdealHit, ideal_hit
from loadtest.memory import memory_of
from loadtest.metrics import SLO, measure
from loadtest.plan import Plan
from loadtest.report import Repeat, Report, make_report, plan_facts, rows_of
from loadtest.resources import ResourceMeter
from loadtest.runner import Pass, Progress, check_history, run_once
from loadtest.servers import ServerState

MIN_REPEATS = 3
INTERRUPTED = "it was stopped before its end"


class ExperimentOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How plans are played, and what counts."""

    rate: float = 1.0
    process: Process = "plan"
    cv: float = DEFAULT_CV
    seed: int = 0
    num_repeats: int = MIN_REPEATS
    slo: SLO = SLO()
    bounds: HealthBounds = HealthBounds()
    max_drift: float = 0.02
    """Prompt tokens counted against planned ones."""
    max_seconds: float | None = None
    """Of all passes together, as expected after the calibration."""
    shrink: bool = False
    """Too long a plan is cut to its first sessions; else refused."""
    server_pid: int | None = None
    look_every_s: float = 1.0
    """How often the server's own numbers are read during a pass; 0: before and after alone."""

    def validated(self) -> "ExperimentOptions":
        """Return self.

        Raises:
            PlanInvalid: naming the first option out of its bounds.
        """
        bounds: tuple[tuple[str, float | None, float, float], ...] = (
            ("--repeats", self.num_repeats, 1, 1000),
            ("--max-drift", self.max_drift, 0.0, 1.0),
            ("--max-seconds", self.max_seconds, 1.0, 1e7),
            ("--look-every", self.look_every_s, 0.0, 3600.0),
            ("--max-cpu", self.bounds.max_cpu_share, 0.0, 1e4),
            ("--max-lag", self.bounds.max_lag_p99_s, 0.0, 1e4),
        )
        for name, value, low, high in bounds:
            if value is not None and not low <= value <= high:  # NaN fails too
                raise PlanInvalid(f"{name} is {value:g}; it must be between {low:g} and {high:g}")
        self.slo.validated()
        return self


class Watcher(msgspec.Struct, frozen=True, kw_only=True):
    """Who is told what happens."""

    say: Say
    on_progress: Callable[[str, Progress], None]
    """The name of the pass, and how far it is."""


class _Cell(msgspec.Struct, kw_only=True):
    """One plan on one target, and its passes so far. Changed by `run_experiment` alone."""

    bench: Bench
    plan: Plan
    ideal: IdealHit
    repeats: list[Repeat] = msgspec.field(default_factory=list)
    interrupted: bool = False

    @property
    def name(self) -> str:
        return f"{self.plan.name} on {self.bench.target.url}"


async def run_experiment(
    plans: Sequence[Plan],
    targets: Sequence[TargetOptions],
    options: ExperimentOptions,
    *,
    watcher: Watcher,
    stop: asyncio.Event | None = None,
) -> tuple[Report, ...]:
    """One report for each plan on each target, plans first.

    Args:
        stop: set it to end early; reports of what there is are void.
    Raises:
        PlanInvalid, TargetUnusable: before any load.
    """
    options = options.validated()
    started_at = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    plans = [spread_plan(plan, seed=options.seed) for plan in plans]
    ResourceMeter(options.server_pid).start()
    for plan in plans:  # what cannot be played is refused before a server is asked anything
        _starts(plan, options)
        for target in targets:
            check_history(plan, target.history)
    async with AsyncExitStack() as scope:
        benches = [
            await scope.enter_async_context(open_bench(target, plans=plans, say=watcher.say))
            for target in targets
        ]
        cells = [_cell(plan, bench) for plan in plans for bench in benches]
        cells = _in_time(cells, options, say=watcher.say)
        order = pass_order(len(cells), num_repeats=options.num_repeats, seed=options.seed)
        for number, indices in enumerate(order):
            for cell in (cells[index] for index in indices):
                if stop is None or not stop.is_set():
                    await _play(cell, options, number=number, watcher=watcher, stop=stop)
                else:
                    cell.interrupted = True
    return tuple(_report(cell, options, started_at=started_at) for cell in cells)


def pass_order(num_cells: int, *, num_repeats: int, seed: int) -> list[list[int]]:
    """In each repeat each cell once, in random order: what drifts on a machine meets all of them."""
    generator = random.Random(f"{seed} order")
    return [generator.sample(range(num_cells), num_cells) for _ in range(num_repeats)]


def _cell(plan: Plan, bench: Bench) -> _Cell:
    ideal = ideal_hit(plan, live=bench.options.history == "live")
    return _Cell(bench=bench, plan=plan, ideal=ideal)


def _starts(plan: Plan, options: ExperimentOptions) -> dict[str, float]:
    """The same in every repeat, so that repeats differ by the server alone."""
    return schedule(plan, rate=options.rate, process=options.process, cv=options.cv, seed=options.seed)


def _in_time(cells: list[_Cell], options: ExperimentOptions, *, say: Say) -> list[_Cell]:
    """Say how long it should take; refuse or shrink what is above `max_seconds`.

    A plan is shrunk alike for all targets, to what the slowest of them can do: they must do the same work.
    """
    expected = {id(cell): _expected_s(cell, options, say=say) for cell in cells}
    total_s = sum(expected.values()) * options.num_repeats
    if not all(cell.bench.speed for cell in cells):
        return cells
    say(f"expected: {total_s:,.0f} s in all, {options.num_repeats * len(cells)} passes")
    if options.max_seconds is None or total_s <= options.max_seconds:
        return cells
    if not options.shrink:
        raise PlanInvalid(
            f"{options.num_repeats} repeats are expected to take {total_s:,.0f} s, above --max-seconds "
            f"{options.max_seconds:g}: raise it, or let the plan be cut with --shrink"
        )
    share = options.max_seconds / total_s
    smallest: dict[str, Plan] = {}
    for cell in cells:
        assert cell.bench.speed is not None
        cut = shrink(
            cell.plan,
            max_s=expected[id(cell)] * share,
            speed=cell.bench.speed,
            starts=_starts(cell.plan, options),
            concurrency=cell.bench.options.concurrency,
        )
        best = smallest.get(cell.plan.name)
        if best is None or len(cut.requests) < len(best.requests):
            smallest[cell.plan.name] = cut
    for plan in smallest.values():
        say(f"{plan.name}: {plan.notes[-1] if plan.notes else 'as it is'}")
    return [_cell(smallest[cell.plan.name], cell.bench) for cell in cells]


def _expected_s(cell: _Cell, options: ExperimentOptions, *, say: Say) -> float:
    if cell.bench.speed is None:
        return 0.0
    found = estimate(
        cell.plan,
        speed=cell.bench.speed,
        starts=_starts(cell.plan, options),
        concurrency=cell.bench.options.concurrency,
        ideal=cell.ideal,
    )
    say(
        f"{cell.name}: about {found.expected_s:,.0f} s a pass with every prefix cached, "
        f"{found.uncached_s:,.0f} s with none"
    )
    return found.expected_s


async def _play(
    cell: _Cell, options: ExperimentOptions, *, number: int, watcher: Watcher, stop: asyncio.Event | None
) -> None:
    """One pass, with the server looked at before, during and after."""
    bench, name = cell.bench, f"{cell.name}, repeat {number + 1} of {options.num_repeats}"
    filler = bench.filler()
    meter = ResourceMeter(options.server_pid)
    meter.start()
    looks: list[ServerState] = [await bench.looker.state(bench.server)]
    async with asyncio.TaskGroup() as tasks:
        looking = tasks.create_task(_keep_looking(bench, looks, every_s=options.look_every_s))
        played = await run_once(
            cell.plan,
            starts=_starts(cell.plan, options),
            client=bench.client,
            filler=filler,
            encode=bench.encode,
            options=bench.options,
            on_progress=lambda progress: watcher.on_progress(name, progress),
            stop=stop,
        )
        looking.cancel()
    resources = meter.stop()
    looks.append(await bench.looker.state(bench.server))
    overhead = _overheads(cell)
    measures = measure(
        played.records,
        plan=cell.plan,
        duration_s=played.duration_s,
        slo=options.slo,
        ideal=cell.ideal.num_cached_tokens,
        overhead=overhead,
    )
    cell.interrupted = cell.interrupted or played.interrupted
    cell.repeats.append(
        Repeat(
            nonce=filler.nonce,
            measures=measures,
            health=played.health,
            resources=resources,
            memory=memory_of(looks[-1], peak=max(looks, key=lambda look: look.kv_live_bytes or 0)),
            rows=rows_of(played.records, started_at=played.started_at),
            void_reasons=_void_reasons(
                cell, played, drift=measures.drift.share, overhead=overhead, options=options
            ),
        )
    )


async def _keep_looking(bench: Bench, looks: list[ServerState], *, every_s: float) -> None:
    """Read the server's numbers until cancelled; only where there are any, and never beside one another."""
    if not every_s or looks[0] == ServerState():
        return
    while True:
        started = time.monotonic()
        await asyncio.sleep(every_s)
        looks.append(await bench.looker.state(bench.server))
        # A server that takes long to answer is not asked more often for it.
        await asyncio.sleep(max(0.0, time.monotonic() - started - every_s))


def _overheads(cell: _Cell) -> dict[str, int] | None:
    overhead = cell.bench.overhead
    if overhead is None:
        return None
    return {request.id: overhead.of(request) for request in cell.plan.requests}


def _void_reasons(
    cell: _Cell,
    played: Pass,
    *,
    drift: float | None,
    overhead: dict[str, int] | None,
    options: ExperimentOptions,
) -> tuple[str, ...]:
    reasons = list(played.health.void_reasons(options.bounds))
    if played.interrupted:
        reasons.append(INTERRUPTED)
    if drift is not None and abs(drift) > options.max_drift and cell.bench.options.history == "recorded":
        reasons.append(
            f"the server counted {drift:+.1%} prompt tokens against the plan, beyond "
            f"{options.max_drift:.0%}: it did other work"
        )
    if not any(cell.ideal.num_cached_tokens.values()):
        control = control_of_pass(played.records, overhead_of=lambda name: (overhead or {}).get(name, 0))
        reasons += control.void_reasons()
    return tuple(reasons)


def _report(cell: _Cell, options: ExperimentOptions, *, started_at: str) -> Report:
    bench = cell.bench
    reasons = list(bench.control.void_reasons())
    notes = list(bench.notes)
    if cell.interrupted:
        reasons.append(INTERRUPTED)
    if options.num_repeats < MIN_REPEATS:
        notes.append(f"fewer than {MIN_REPEATS} repeats: their intervals say little")
    return make_report(
        target=bench.facts(),
        plan=plan_facts(cell.plan, ideal=dict(cell.ideal.num_cached_tokens)),
        slo=options.slo,
        options=_told(cell, options),
        repeats=tuple(cell.repeats),
        started_at=started_at,
        void_reasons=tuple(reasons),
        notes=tuple(notes),
    )


def _told(cell: _Cell, options: ExperimentOptions) -> dict[str, Any]:
    """Everything that a second run would need to be the same; no key."""
    bench = cell.bench
    told: dict[str, Any] = msgspec.to_builtins(options)
    told |= {
        "concurrency": bench.options.concurrency,
        "history": bench.options.history,
        "ignore_eos": bench.options.ignore_eos,
        "extra": bench.options.extra,
        "words": bench.words.source,
        "template_tokens": msgspec.to_builtins(bench.overhead),
        "control_hit": bench.control.hit,
    }
    return told
