"""Whole measurements against the mock, in one loop: short answers, everything on real sockets."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
import pytest

from loadtest.bench import TargetOptions
from loadtest.client import Deadlines
from loadtest.errors import PlanInvalid, TargetUnusable
from loadtest.experiment import INTERRUPTED, ExperimentOptions, Watcher, pass_order, run_experiment
from loadtest.health import HealthBounds
from loadtest.metrics import SLO
from loadtest.mock.script import MockOptions
from loadtest.mock.server import running_mock
from loadtest.plan import Plan
from loadtest.report import Report
from tests.gateway.serving import scripted
from tests.loadtest.plans import plan, request


def quick(**changes: Any) -> MockOptions:
    """A mock that answers at once."""
    return MockOptions(**{"ttft_s": 0.002, "itl_s": 0.001, **changes})


ANY_CLIENT = HealthBounds(max_cpu_share=1000.0, max_lag_p99_s=1000.0)
"""Mock and client share a loop here, on a machine that may be busy: its health is not what is tested."""
CALM = ExperimentOptions(rate=1000.0, bounds=ANY_CLIENT)


def sharing() -> Plan:
    """Two sessions of two turns; the second turn repeats the first."""
    return plan(
        request("a0", ("sys", 40), ("qa", 20), session="a", max_tokens=3),
        request("a1", ("sys", 40), ("qa", 20), ("ra", 20), session="a", max_tokens=3, after=("a0",)),
        request("b0", ("sys", 40), ("qb", 20), session="b", max_tokens=3, after=("a1",)),
        request("b1", ("sys", 40), ("qb", 20), ("rb", 20), session="b", max_tokens=3, after=("b0",)),
    )


def alone() -> Plan:
    return plan(*(request(f"r{i}", (f"a{i}", 100), session=f"s{i}", max_tokens=2) for i in range(4)))


class Log:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.passes: list[str] = []

    def watcher(self) -> Watcher:
        return Watcher(say=self.lines.append, on_progress=lambda name, _: self.note(name))

    def note(self, name: str) -> None:
        if not self.passes or self.passes[-1] != name:
            self.passes.append(name)


@asynccontextmanager
async def mocks(*several: MockOptions) -> AsyncIterator[list[str]]:
    async with AsyncExitStack() as scope:
        servers = [await scope.enter_async_context(running_mock(options)) for options in several]
        yield [f"http://127.0.0.1:{server.port}" for server in servers]


async def measured(
    some: Plan,
    mock: MockOptions,
    options: ExperimentOptions = CALM,
    *,
    log: Log | None = None,
    **changes: Any,
) -> Report:
    async with mocks(mock) as (url,):
        target = msgspec.structs.replace(TargetOptions(url=url, num_warm_ups=2, calibrate=False), **changes)
        (report,) = await run_experiment([some], [target], options, watcher=(log or Log()).watcher())
        return report


async def test_a_run_is_three_repeats_of_everything_and_not_void():
    report = await measured(sharing(), quick())
    assert report.void_reasons == ()
    assert len(report.repeats) == 3
    assert all(repeat.measures.num_succeeded == 4 for repeat in report.repeats)
    assert [row.id for row in report.repeats[0].rows] == ["a0", "a1", "b0", "b1"]
    assert report.target.model == "mock"
    assert report.options["words"] == "/tokenize"


async def test_warm_cache_repeats_never_find_what_earlier_ones_left():
    report = await measured(sharing(), quick())
    nonces = [repeat.nonce for repeat in report.repeats]
    assert len(set(nonces)) == 3
    hits = {repeat.measures.hits.num_cached_tokens for repeat in report.repeats}
    assert len(hits) == 1, "the later repeats had no more hits than the first"
    for repeat in report.repeats:
        assert repeat.measures.hits.capture == pytest.approx(1.0, abs=0.05)


async def test_warm_cache_a_server_that_hits_what_is_new_makes_the_run_void():
    report = await measured(alone(), quick(cached="warm"))
    assert any("the cache is warm" in reason for reason in report.void_reasons)
    assert any(reason.startswith("repeat 1: ") for reason in report.void_reasons), "its own plan is a control"


async def test_hit_rate_misread_a_server_that_says_nothing_is_unknown_and_noted():
    report = await measured(sharing(), quick(cached="silent"))
    assert report.void_reasons == ()
    assert report.repeats[0].measures.hits.hit is None
    assert any("hits are unknown" in note for note in report.notes)


async def test_token_length_drift_the_plans_tokens_and_the_templates_are_told_apart():
    report = await measured(sharing(), quick())
    drift = report.repeats[0].measures.drift
    assert drift.share == pytest.approx(0.0, abs=1e-9)
    assert drift.num_counted - drift.num_overhead == 280


async def test_token_length_drift_a_server_of_other_tokens_makes_the_run_void():
    """Our gateway's scripted backend: its usage is of its script, whatever it was asked."""
    async with scripted() as (gateway, _):
        target = TargetOptions(url=gateway.url, num_warm_ups=0, calibrate=False)
        (report,) = await run_experiment([alone()], [target], CALM, watcher=Log().watcher())
    assert report.target.server == "tidegate"
    assert sum("it did other work" in reason for reason in report.void_reasons) == 3
    assert any("words could not be checked" in note for note in report.notes)


async def test_client_is_the_bottleneck_a_client_beyond_its_bounds_makes_the_run_void():
    options = msgspec.structs.replace(CALM, bounds=HealthBounds(max_cpu_share=0.0, max_lag_p99_s=1000.0))
    report = await measured(alone(), quick(), options)
    assert all("of a core" in reason for reason in report.void_reasons)
    assert len(report.void_reasons) == 3


async def test_fewer_repeats_than_three_are_noted():
    report = await measured(alone(), quick(), msgspec.structs.replace(CALM, num_repeats=1))
    assert any("fewer than 3 repeats" in note for note in report.notes)


async def test_a_server_that_only_fails_is_unusable_before_any_load():
    with pytest.raises(TargetUnusable, match="HTTP 503"):
        await measured(alone(), quick(fail="status"))


async def test_a_server_that_hangs_is_given_up_before_any_load():
    with pytest.raises(TargetUnusable, match="timeout"):
        await measured(alone(), quick(fail="hang"), deadlines=Deadlines(idle_s=0.2))


async def test_a_key_is_asked_for_and_never_written_down():
    with pytest.raises(TargetUnusable, match="HTTP 401: give its key with --api-key"):
        await measured(alone(), quick(api_key="hush-hush"))
    report = await measured(alone(), quick(api_key="hush-hush"), api_key="hush-hush")
    assert b"hush-hush" not in msgspec.json.encode(msgspec.to_builtins(report))


async def test_each_target_has_a_report_of_its_own():
    log = Log()
    async with mocks(quick(model="one"), quick(model="two")) as urls:
        targets = [TargetOptions(url=url, num_warm_ups=0, calibrate=False) for url in urls]
        options = msgspec.structs.replace(CALM, num_repeats=1)
        reports = await run_experiment([alone()], targets, options, watcher=log.watcher())
    assert [report.target.model for report in reports] == ["one", "two"]
    assert [len(report.repeats) for report in reports] == [1, 1]
    assert len(log.passes) == 2


def test_the_order_of_passes_is_random_each_once_a_repeat_and_the_same_for_a_seed():
    order = pass_order(4, num_repeats=50, seed=0)
    assert all(sorted(one) == [0, 1, 2, 3] for one in order)
    assert len({tuple(one) for one in order}) > 10
    assert order == pass_order(4, num_repeats=50, seed=0)
    assert order != pass_order(4, num_repeats=50, seed=1)


async def test_coordinated_omission_a_stall_of_the_server_shows_in_the_time_from_the_intended_start():
    """One request at a time, each longer than the gap between them: those behind wait, and that counts."""
    some = plan(
        *(request(f"r{i}", (f"a{i}", 20), session=f"s{i}", max_tokens=3, at_s=0.02 * i) for i in range(20))
    )
    mock = quick(stall_after_tokens=1, stall_s=0.05, max_running=1)
    report = await measured(some, mock, msgspec.structs.replace(CALM, num_repeats=1))
    rows = report.repeats[0].rows
    # The server needs 50 ms for each and they come every 20 ms: the last waits for all before it.
    assert rows[-1].ttft_sched is not None
    assert rows[-1].ttft_sched >= 19 * 0.05 - 19 * 0.02
    assert (report.repeats[0].measures.ttft_sched.p99 or 0.0) >= 0.5


async def test_the_time_from_the_intended_start_is_the_other_and_the_wait_in_the_client():
    some = plan(request("r0"), request("r1", session="x", at_s=0.05))
    report = await measured(some, quick(ttft_s=0.2), msgspec.structs.replace(CALM, num_repeats=1))
    for row in report.repeats[0].rows:
        assert row.ttft is not None
        assert row.ttft_sched is not None
        assert row.sent_at is not None
        assert row.ttft_sched == pytest.approx(row.ttft + (row.sent_at - row.scheduled_at))


async def test_a_stopped_run_reports_what_there_is_and_is_void():
    stop, log = asyncio.Event(), Log()

    def on_progress(name: str, _: object) -> None:
        log.note(name)
        if "repeat 2" in name:
            stop.set()

    async with mocks(quick()) as (url,):
        (report,) = await run_experiment(
            [alone()],
            [TargetOptions(url=url, num_warm_ups=0, calibrate=False)],
            CALM,
            watcher=Watcher(say=log.lines.append, on_progress=on_progress),
            stop=stop,
        )
    assert len(report.repeats) == 2
    assert all(len(repeat.rows) == 4 for repeat in report.repeats)
    assert INTERRUPTED in report.void_reasons


async def test_the_expected_time_is_said_and_too_long_a_plan_is_refused_or_cut():
    log = Log()
    some = plan(*(request(f"r{i}", session=f"s{i}", max_tokens=2, at_s=float(i)) for i in range(100)))
    options = msgspec.structs.replace(CALM, max_seconds=3.0)
    with pytest.raises(
        PlanInvalid, match=r"3 repeats are expected to take .* above --max-seconds 3: .*--shrink"
    ):
        await measured(some, quick(), options, log=log, calibrate=True)
    assert any(line.startswith("expected: ") for line in log.lines)
    cut = await measured(
        some,
        quick(),
        msgspec.structs.replace(options, shrink=True, num_repeats=1),
        calibrate=True,
    )
    assert 1 <= cut.plan.num_requests <= 4
    assert any("shrunk to the first" in note for note in cut.plan.notes)


async def test_the_slos_and_all_options_stand_in_the_report():
    options = msgspec.structs.replace(CALM, slo=SLO(ttft_s=100.0, tpot_s=100.0), num_repeats=1)
    report = await measured(alone(), quick(), options, concurrency=2)
    assert report.slo.ttft_s == 100.0
    assert report.repeats[0].measures.request_goodput.num_good == 4
    assert report.options["concurrency"] == 2
    assert report.options["rate"] == 1000.0
    assert report.options["template_tokens"] == {"first": 0, "system": 0, "turn": 0}


async def test_completions_are_measured_as_chats_are():
    report = await measured(
        sharing(), quick(), msgspec.structs.replace(CALM, num_repeats=1), dialect="completions"
    )
    assert report.target.dialect == "completions"
    assert report.repeats[0].measures.num_succeeded == 4


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_repeats": 0}, "--repeats is 0; it must be between 1 and 1000"),
        ({"max_drift": float("nan")}, "--max-drift is nan"),
        ({"max_seconds": 0.0}, "--max-seconds is 0"),
        ({"rate": 0.0}, "the rate is 0"),
        ({"process": "lunar"}, "arrivals are 'lunar'"),
    ],
)
async def test_an_option_out_of_its_bounds_is_refused_by_name(changes, says):
    with pytest.raises(PlanInvalid, match=says):
        await measured(alone(), quick(), msgspec.structs.replace(CALM, **changes))
