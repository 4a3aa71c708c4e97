"""The command as a person uses it: what it prints, what it writes, and how it ends."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from loadtest.cli import main
from loadtest.mock.script import MockOptions
from loadtest.plan import dump_plan, load_plan
from loadtest.report import read_report
from tests.loadtest.mock_process import ROOT, mock_process
from tests.loadtest.plans import PLANS, plan, request

PATIENT = ["--max-cpu", "1000", "--max-lag", "1000", "--no-calibrate", "--warm-ups", "0"]
"""The machine may be busy: the client's health is not what these tests are about."""


@pytest.fixture(scope="module")
def mock_url():
    with mock_process(MockOptions(ttft_s=0.002, itl_s=0.001)) as url:
        yield url


@pytest.fixture
def plan_file(tmp_path):
    path = tmp_path / "small.plan.jsonl"
    dump_plan(plan(*(request(f"r{i}", (f"a{i}", 60), session=f"s{i}", max_tokens=3) for i in range(3))), path)
    return path


@pytest.fixture
def command(monkeypatch, capsys):
    """Run the command in this process: gives its exit code, stdout and stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["tidegate-loadtest", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as ended:
            main()
        told = capsys.readouterr()
        return int(ended.value.code or 0), told.out, told.err

    return run


def test_a_run_prints_a_table_writes_its_report_and_ends_with_zero(command, mock_url, plan_file, tmp_path):
    out = tmp_path / "new folder" / "report.json"
    code, told, said = command("run", plan_file, "--target", mock_url, "--out", out, *PATIENT)
    assert code == 0, told + said
    assert "TTFT_s" in told
    assert f"written: {out}" in told
    assert "repeat 3 of 3" in said
    report = read_report(out)
    assert report.void_reasons == ()
    assert report.plan.name == "small"
    assert report.plan.sha256 == load_plan(plan_file).sha256


def test_a_report_compares_with_itself_without_regression(command, mock_url, plan_file, tmp_path):
    out = tmp_path / "a.json"
    assert command("run", plan_file, "--target", mock_url, "--out", out, *PATIENT)[0] == 0
    code, told, _ = command("compare", out, out)
    assert code == 0
    assert "no regression" in told


def test_two_plans_are_two_reports_in_a_folder(command, mock_url, plan_file, tmp_path):
    out = tmp_path / "reports"
    other = tmp_path / "other.plan.jsonl"
    dump_plan(plan(request("x", ("x", 50), max_tokens=2)), other)
    code, _, _ = command(
        "run", plan_file, other, "--target", mock_url, "--repeats", 1, "--out", out, *PATIENT
    )
    assert code == 0
    assert sorted(path.name for path in out.iterdir()) == ["1-small.json", "2-other.json"]


def test_a_workload_is_played_by_its_name(command, mock_url):
    code, told, _ = command(
        *("run", "control", "--sessions", 2, "--scale", 0.02, "--rate", 1000, "--repeats", 1),
        *("--target", mock_url, *PATIENT),
    )
    assert code == 0
    assert "2 sessions" in told


def test_a_void_run_ends_with_one(command, plan_file):
    with mock_process(MockOptions(ttft_s=0.002, itl_s=0.001, cached="warm")) as url:
        code, told, _ = command("run", plan_file, "--target", url, "--repeats", 1, *PATIENT)
    assert code == 1
    assert "the cache is warm" in told


def test_a_dead_server_is_one_line_and_no_traceback(command, plan_file):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    code, told, said = command("run", plan_file, "--target", f"http://127.0.0.1:{port}")
    assert code == 2
    assert told == ""
    (line,) = said.splitlines()
    assert line.startswith(f"tidegate-loadtest: no connection to http://127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--dialect", "morse"], "--dialect is 'morse'; it must be one of"),
        (["--history", "oral"], "--history is 'oral'; it must be recorded or live"),
        (["--extra", "[1]"], "--extra is no JSON object"),
        (["--repeats", "0"], "--repeats is 0; it must be between 1 and 1000"),
        (["--arrivals", "sometimes"], "sometimes"),
        (["--scale", "0"], "--scale is 0"),
        (["--out", "."], "--out is .; for 1 reports it must be a file"),
        (["--server-pid", "4194305"], "--server-pid is 4194305: there is no such process"),
    ],
)
def test_an_option_that_cannot_be_is_one_line(command, mock_url, plan_file, options, says):
    code, _, said = command("run", plan_file, "--target", mock_url, *options, *PATIENT)
    assert code == 2
    assert says in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "there is no file"),
        ("{", "line 1"),
        ('{"id":"a","session":"s","segments":[],"max_tokens":1,"at_s":0}\n', "prompt's tokens is 0"),
        ("", "holds no request"),
    ],
)
def test_a_bad_plan_names_its_file_and_what_is_wrong(command, tmp_path, text, says):
    path = tmp_path / "bad.plan.jsonl"
    if text is not None:
        path.write_text(text)
    code, _, said = command("run", path, "--target", "http://127.0.0.1:9")
    assert code == 2
    assert str(path) in said
    assert says in said


def test_a_workload_is_written_as_a_plan_that_can_be_read_again(command, tmp_path):
    path = tmp_path / "control.plan.jsonl.gz"
    code, told, _ = command("plan", "control", path, "--sessions", 3)
    assert code == 0
    assert load_plan(path).sha256 in told


@pytest.mark.parametrize("path", PLANS[:1], ids=lambda path: path.name.partition(".")[0])
def test_a_trace_is_characterised(command, path):
    code, told, _ = command("characterise", path)
    assert code == 0
    assert "ideal hit" in told
    assert "bottleneck" in told


def test_what_is_no_trace_is_refused(command, tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("hello\n")
    code, _, said = command("characterise", path)
    assert code == 2
    assert str(path) in said


def test_a_mock_option_that_is_none_is_refused(command):
    code, _, said = command("mock", "ttft=1")
    assert code == 2
    assert "ttft" in said


def child(*arguments: object) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "loadtest", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"},
    )


def test_the_mock_is_served_until_it_is_interrupted():
    server = child("mock", "ttft_s=0.001", "--port", 0)
    assert server.stdout is not None
    assert server.stdout.readline().startswith("http://127.0.0.1:")
    server.send_signal(signal.SIGINT)
    _, said = server.communicate(timeout=60)
    assert server.returncode == 0
    assert said == ""


def test_ctrl_c_ends_a_run_with_what_there_is_and_no_traceback(mock_url, tmp_path):
    path, out = tmp_path / "long.plan.jsonl", tmp_path / "report.json"
    dump_plan(plan(request("now", max_tokens=2), request("later", session="x", at_s=3600.0)), path)
    run = child("run", path, "--target", mock_url, "--out", out, *PATIENT)
    assert run.stderr is not None
    while "repeat 1 of 3" not in run.stderr.readline():
        assert run.poll() is None, "the run ended before its first pass"
    run.send_signal(signal.SIGINT)
    told, said = run.communicate(timeout=60)
    assert run.returncode == 1, said
    assert "Traceback" not in said
    report = read_report(Path(out))
    assert "it was stopped before its end" in report.void_reasons
    (repeat,) = report.repeats
    assert {row.id: row.fault is None for row in repeat.rows}["later"] is False
    assert "it was stopped" in told


def test_the_key_may_stand_in_the_environment(command, monkeypatch, plan_file, tmp_path):
    out = tmp_path / "report.json"
    monkeypatch.setenv("TIDEGATE_LOADTEST_API_KEY", "hush-hush")
    with mock_process(MockOptions(ttft_s=0.002, itl_s=0.001, api_key="hush-hush")) as url:
        code, _, _ = command("run", plan_file, "--target", url, "--repeats", 1, "--out", out, *PATIENT)
    assert code == 0
    assert "hush-hush" not in out.read_text()
    assert msgspec.json.decode(out.read_bytes())["schema"] == "tidegate-loadtest/1"
