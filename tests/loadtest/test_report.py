import contextlib
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from loadtest.errors import PlanInvalid
from loadtest.figures import KINDS, Figure
from loadtest.memory import memory_of
from loadtest.metrics import SLO
from loadtest.report import SCHEMA, Report, plan_facts, read_report, write_json
from loadtest.resources import Resources
from loadtest.servers import ServerState
from loadtest.table import format_figure, format_value, print_report
from tests.loadtest.record_factory import answered, failed, plan_for, report_of


def a_report(**fields: Any) -> Report:
    """Three repeats of two requests; in the last, one failed."""
    good = [answered("r0", times=[0.5, 0.6, 0.7]), answered("r1", times=[0.7, 0.8, 0.9])]
    bad = [good[0], failed("r1", status=500)]
    return report_of([good, good, bad], slo=SLO(ttft_s=1.0, tpot_s=0.2), **fields)


def printed(report: Report) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    print_report(report, console)
    return console.export_text()


def test_a_report_reads_back_as_it_was_written(tmp_path: Path) -> None:
    report = a_report()
    write_json(report, tmp_path / "a.json")
    assert read_report(tmp_path / "a.json") == report
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_in_the_file_failed_is_a_word_and_unknown_is_null_and_neither_is_zero(tmp_path: Path) -> None:
    write_json(a_report(), tmp_path / "a.json")
    text = (tmp_path / "a.json").read_text()
    assert "Infinity" not in text
    found = json.loads(text)
    last = found["repeats"][2]
    assert last["measures"]["ttft"]["p99"] == "failed"
    assert last["measures"]["ttft"]["num_failed"] == 1
    assert last["measures"]["hits"]["hit"] is None
    assert last["rows"][1]["ttft"] == "failed"
    assert last["rows"][1]["fault"] == "http 500: it went wrong"
    assert found["summary"]["hit"]["median"] is None
    assert found["summary"]["server RSS"]["median"] is None


def test_a_text_that_reads_failed_stays_a_text(tmp_path: Path) -> None:
    report = a_report(options={"plan": "failed"}, notes=("failed",))
    write_json(report, tmp_path / "a.json")
    assert read_report(tmp_path / "a.json") == report


def test_the_report_says_what_was_run_on_what_and_by_which_definitions() -> None:
    report = a_report()
    assert report.schema == SCHEMA
    assert report.machine.num_cpus >= 1
    assert report.machine.memory_bytes > 0
    assert "msgspec" in report.versions
    assert report.plan.sha256 == "a" * 64
    assert (report.plan.num_requests, report.plan.num_sessions) == (2, 2)
    assert {"TTFT", "TTFT_s", "ITL", "TPOT", "goodput", "capture"} <= report.definitions.keys()
    assert report.target.server == "unknown"


def test_every_figure_stands_in_the_summary_with_its_unit() -> None:
    summary = a_report(resources=Resources(cpu_s=3.0, rss_bytes=1 << 20)).summary
    assert summary.keys() == KINDS.keys()
    assert summary["TTFT p50"].median == pytest.approx(0.6)
    assert summary["TTFT p99"].unit == "s"
    assert summary["CPU-s per 1,000 tokens"].median == pytest.approx(500.0)
    assert summary["server RSS"].median == 1 << 20
    assert summary["joules per 1,000 tokens"].median is None
    assert summary["joules per 1,000 tokens"].num_unknown == 3


def test_the_median_of_three_repeats_has_the_worst_as_its_upper_end() -> None:
    figure = a_report().summary["TTFT p99"]
    assert figure.median is not None
    assert math.isfinite(figure.median)
    assert figure.high == math.inf


def test_void_reasons_of_a_repeat_are_the_runs_too() -> None:
    report = a_report(void_reasons=("the control plan had 3 % hits",))
    assert report.void_reasons == ("the control plan had 3 % hits",)
    text = printed(report)
    assert "VOID: the control plan had 3 % hits" in text


def test_the_table_says_unknown_and_failed_in_words() -> None:
    text = printed(a_report())
    assert "median over the repeats [interval]" in text
    assert "unknown" in text
    assert "failed]" in text
    assert "failures over all repeats: 1 http 500" in text
    assert "r1: http 500: it went wrong" in text
    lines = [line for line in text.splitlines() if "hit" in line and "%" in line]
    assert not [line for line in lines if " 0.0 %" in line]


def test_markup_in_names_and_messages_is_printed_and_not_obeyed() -> None:
    assert "[bold]x[/bold]" in printed(a_report(notes=("[bold]x[/bold]",)))


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (None, "s", "unknown"),
        (math.inf, "s", "failed"),
        (0.0123, "s", "12.3 ms"),
        (2.5, "s", "2.50 s"),
        (0.456, "share", "45.6 %"),
        (3 << 29, "bytes", "1.50 GiB"),
        (1 << 20, "bytes", "1.0 MiB"),
        (12345.6, "count", "12,346"),
    ],
)
def test_values_read_as_people_write_them(value: float | None, unit: Any, text: str) -> None:
    assert format_value(value, unit) == text


@pytest.mark.parametrize(
    ("figure", "text"),
    [
        (Figure(median=None, unit="s"), "unknown"),
        (Figure(median=0.05, low=0.04, high=1.5, unit="s"), "50.0 ms [40.0, 1,500.0]"),
        (Figure(median=0.05, low=0.05, high=0.05, unit="s"), "50.0 ms"),
        (Figure(median=0.05, low=0.04, high=math.inf, unit="s"), "50.0 ms [40.0, failed]"),
        (Figure(median=math.inf, low=0.04, high=math.inf, unit="s"), "failed [40.0, failed]"),
        (Figure(median=math.inf, low=math.inf, high=math.inf, unit="s"), "failed"),
        (Figure(median=0.5, low=0.25, high=0.75, unit="share"), "50.0 % [25.0, 75.0]"),
    ],
)
def test_a_figure_has_its_interval_in_the_same_unit(figure: Figure, text: str) -> None:
    assert format_figure(figure) == text


def _broken(tmp_path: Path, change: Any) -> Path:
    write_json(a_report(), tmp_path / "a.json")
    found = json.loads((tmp_path / "a.json").read_text())
    change(found)
    (tmp_path / "b.json").write_text(json.dumps(found))
    return tmp_path / "b.json"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda found: found.update(schema="tidegate-loadtest/9"), "tidegate-loadtest/9"),
        (lambda found: found.pop("schema"), "schema is None"),
        (lambda found: found.pop("plan"), "plan"),
        (lambda found: found["repeats"][0].update(rows="none"), "repeats"),
        (lambda found: found["plan"].update(num_requests="failed"), "num_requests"),
        (lambda found: found["repeats"][1]["measures"]["ttft"].update(p50="fast"), "ttft.p50"),
    ],
)
def test_a_report_that_is_not_one_is_refused_by_file_and_field(
    tmp_path: Path, change: Any, words: str
) -> None:
    path = _broken(tmp_path, change)
    with pytest.raises(PlanInvalid) as caught:
        read_report(path)
    assert words in str(caught.value)
    assert "b.json" in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"{", b"[1, 2]", b"null", b"\xff\xfe", b"[" * 100_000])
def test_bytes_that_are_no_report_are_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.json").write_bytes(data)
    with pytest.raises(PlanInvalid):
        read_report(tmp_path / "a.json")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.floats(min_value=0.0, max_value=0.999), put=st.binary(max_size=4), cut=st.integers(0, 4))
def test_a_damaged_file_is_read_or_refused_and_never_a_traceback(
    tmp_path: Path, at: float, put: bytes, cut: int
) -> None:
    path = tmp_path / "a.json"
    write_json(a_report(), path)
    data = path.read_bytes()
    where = int(at * len(data))
    path.write_bytes(data[:where] + put + data[where + cut :])
    with contextlib.suppress(PlanInvalid):
        assert isinstance(read_report(path), Report)


def test_a_file_that_is_not_there_or_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanInvalid, match=r"none\.json"):
        read_report(tmp_path / "none.json")
    with pytest.raises(PlanInvalid, match="cannot be written"):
        write_json(a_report(), tmp_path / "no" / "a.json")


def test_the_ideal_hit_of_a_plan_is_a_share_of_its_prompt_tokens() -> None:
    plan = plan_for([answered("r0", times=[1.0]), answered("r1", times=[1.0])])
    assert plan_facts(plan, ideal={"r0": 0, "r1": 50}).ideal_hit == 0.25
    assert plan_facts(plan).ideal_hit is None


def test_memory_is_split_where_the_server_tells() -> None:
    end = ServerState(
        server_bytes=1000, weights_bytes=300, kv_pool_bytes=500, kv_live_bytes=0, kv_cached_bytes=400
    )
    peak = ServerState(kv_pool_bytes=500, kv_live_bytes=200, kv_cached_bytes=200, kv_live_token_bytes=150)
    found = memory_of(end, peak=peak)
    assert found.other_bytes == 200
    assert found.kv_live_bytes == 200
    assert found.kv_waste_share == pytest.approx(0.25)
    assert found.kv_idle_share == pytest.approx(0.2)


def test_memory_that_the_server_does_not_tell_is_unknown() -> None:
    found = memory_of(ServerState())
    assert {getattr(found, name) for name in found.__struct_fields__} == {None}
