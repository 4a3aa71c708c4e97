"""The `tidegate-loadtest` command."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any, TypeAlias, get_args

import msgspec
import typer
import uvloop
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from loadtest.arrivals import DEFAULT_CV, Process
from loadtest.bench import TargetOptions
from loadtest.characterise import Machine, characterise, describe
from loadtest.client import Deadlines
from loadtest.compare import BOUND, compare, comparison_table
from loadtest.dialects import dialect_names
from loadtest.errors import LoadTestError, PlanInvalid
from loadtest.experiment import MIN_REPEATS, ExperimentOptions
from loadtest.health import HealthBounds
from loadtest.metrics import SLO
from loadtest.mock.script import MockOptions
from loadtest.mock.server import serve_mock
from loadtest.plan import Plan, dump_plan, load_plan
from loadtest.replay import ReplayOptions, replay
from loadtest.report import Report, read_report, write_json
from loadtest.runner import History
from loadtest.table import print_report
from loadtest.terminal import Stopped, play
from loadtest.traces import read_trace, trace_format_names
from loadtest.transport import raise_open_files
from loadtest.workloads import WorkloadOptions, find_workload, workload_names

EXIT_WORTHLESS = 1
"""The run is void, or every request failed; or `compare` found a regression."""
EXIT_UNUSABLE = 2
EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="tidegate-loadtest",
    help="Play a plan against any inference server, and tell the truth about it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    add_completion=False,
)


def _option(what: str, metavar: str | None = None, **more: Any) -> Any:
    return typer.Option(help=what, metavar=metavar, **more)


_BOUNDS = HealthBounds()
_Number: TypeAlias = float | None
_Plans = Annotated[list[str], typer.Argument(metavar="PLAN...", help="plan files, or names of workloads")]
_Targets = Annotated[list[str], _option("server to measure (repeatable)", "URL")]
_Out = Annotated[Path | None, _option("write the report as JSON; a folder where there are several", "FILE")]
_Dialect = Annotated[str, _option(f"one of {', '.join(dialect_names())}", "NAME")]
_Model = Annotated[str | None, _option("model to ask for [the server's first]", "NAME")]
_ApiKey = Annotated[str | None, _option("bearer token", "KEY", envvar="TIDEGATE_LOADTEST_API_KEY")]
_Repeats = Annotated[int, _option("passes of each plan on each target", "N")]
_Rate = Annotated[float, _option("requests a second, for arrivals", "R")]
_Arrivals = Annotated[str, _option(f"one of {', '.join(get_args(Process))}", "NAME")]
_Cv = Annotated[float, _option("of the gaps of gamma arrivals", "X")]
_Concurrency = Annotated[
    int | None, _option("closed loop over so many live sessions [open loop]", "N", min=1)
]
_History = Annotated[str, _option(f"answers in the history: {' or '.join(get_args(History))}", "KIND")]
_Seed = Annotated[int, _option("of arrivals, order and workloads", "N")]
_SloTtft = Annotated[_Number, _option("from the intended start to the first token", "SECONDS")]
_SloTpot = Annotated[_Number, _option("between tokens", "SECONDS")]
_SloE2e = Annotated[_Number, _option("from the intended start to the end", "SECONDS")]
_SloSession = Annotated[_Number, _option("of a whole session", "SECONDS")]
_IgnoreEos = Annotated[bool, _option("ask for answers of exactly the planned length")]
_Extra = Annotated[str, _option("more body fields; null takes one away", "JSON")]
_MaxSeconds = Annotated[_Number, _option("refuse what is expected to take longer, all passes", "SECONDS")]
_Shrink = Annotated[bool, _option("cut a plan that takes too long to its first sessions")]
_Calibrate = Annotated[bool, _option("measure speed first, to say how long it will take")]
_WarmUps = Annotated[int, _option("requests before the first pass", "N", min=0, max=1000)]
_Pid = Annotated[int | None, _option("server process, for its CPU and memory, children included", "PID")]
_LookEvery = Annotated[float, _option("read the server's numbers so often; 0: before and after", "SECONDS")]
_MaxCpu = Annotated[float, _option("void where the client used more of a core", "X")]
_MaxLag = Annotated[float, _option("void where the client's loop lagged more (p99)", "SECONDS")]
_MaxDrift = Annotated[float, _option("void where prompts are off by more", "X")]
_Idle = Annotated[float, _option("a request without an event for so long failed", "SECONDS", min=0.001)]
_Sessions = Annotated[int | None, _option("workloads: how many sessions", "N")]
_Turns = Annotated[int | None, _option("workloads: calls of each session", "N")]
_Scale = Annotated[float, _option("workloads: times their tokens", "X")]
_TimeScale = Annotated[float, _option("workloads: times their pauses", "X")]
_MaxContext = Annotated[int, _option("workloads: longest prompt and answer", "N")]
_TraceFormat = Annotated[str, _option(f"one of {', '.join(trace_format_names())} [seen from it]", "NAME")]
_Share = Annotated[float, _option("workloads: share of prompts in common", "X")]


@app.command()
def run(
    plans: _Plans,
    *,
    target: _Targets,
    out: _Out = None,
    dialect: _Dialect = "chat",
    model: _Model = None,
    api_key: _ApiKey = None,
    repeats: _Repeats = MIN_REPEATS,
    rate: _Rate = 1.0,
    arrivals: _Arrivals = "plan",
    cv: _Cv = DEFAULT_CV,
    concurrency: _Concurrency = None,
    history: _History = "recorded",
    seed: _Seed = 0,
    slo_ttft: _SloTtft = None,
    slo_tpot: _SloTpot = None,
    slo_e2e: _SloE2e = None,
    slo_session: _SloSession = None,
    ignore_eos: _IgnoreEos = True,
    extra: _Extra = "{}",
    max_seconds: _MaxSeconds = None,
    shrink: _Shrink = False,
    calibrate: _Calibrate = True,
    warm_ups: _WarmUps = 8,
    server_pid: _Pid = None,
    look_every: _LookEvery = 1.0,
    max_cpu: _MaxCpu = _BOUNDS.max_cpu_share,
    max_lag: _MaxLag = _BOUNDS.max_lag_p99_s,
    max_drift: _MaxDrift = 0.02,
    idle_timeout: _Idle = 300.0,
    sessions: _Sessions = None,
    turns: _Turns = None,
    scale: _Scale = 1.0,
    time_scale: _TimeScale = 1.0,
    max_context: _MaxContext = 131_072,
    share: _Share = 0.5,
) -> None:
    """Play plans against servers. Exit code 1: void, or all failed; 2: nothing could be measured."""
    given = dict(locals())
    chosen = [_plan(name, _workload_options(given)) for name in plans]
    _check_out(out, num_reports=len(plans) * len(target))
    reports = play(chosen, _targets(given), _experiment(given), console=Console(stderr=True))
    for report in reports:
        print_report(report, _stdout())
    if out is not None:
        _write(reports, out)
    raise typer.Exit(EXIT_WORTHLESS if any(_is_worthless(report) for report in reports) else 0)


@app.command("compare")
def compare_command(
    a: Annotated[Path, typer.Argument(metavar="A.json", help="the report to compare with")],
    b: Annotated[Path, typer.Argument(metavar="B.json", help="the report to judge")],
    *,
    bound: Annotated[float, _option("how much worse a median may be", "X", min=0.0, max=10.0)] = BOUND,
) -> None:
    """Ratios of two reports of one plan. Exit code 1: B is worse by more than the bound and the noise."""
    comparison = compare(read_report(a), read_report(b), bound=bound)
    _stdout().print(comparison_table(comparison))
    raise typer.Exit(comparison.exit_code)


@app.command("characterise")
def characterise_command(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="a trace or a plan, plain or gzipped")],
    *,
    trace_format: _TraceFormat = "",
    bytes_per_token: Annotated[int, _option("of KV", "N")] = Machine().bytes_per_token,
    block_tokens: Annotated[int, _option("tokens per KV block", "N")] = Machine().block_tokens,
    kv_bytes: Annotated[int, _option("of the KV pool", "N")] = Machine().kv_bytes,
    prefill_tokens_per_s: Annotated[float, _option("of the server", "R")] = Machine().prefill_tokens_per_s,
    decode_tokens_per_s: Annotated[float, _option("of all requests", "R")] = Machine().decode_tokens_per_s,
    live_sessions: Annotated[
        int, _option("at once, where each has its own clock", "N")
    ] = Machine().live_sessions,
) -> None:
    """What a trace is like, and what it will be short of."""
    machine = Machine(
        bytes_per_token=bytes_per_token,
        block_tokens=block_tokens,
        kv_bytes=kv_bytes,
        prefill_tokens_per_s=prefill_tokens_per_s,
        decode_tokens_per_s=decode_tokens_per_s,
        live_sessions=live_sessions,
    ).validated()
    character = characterise(read_trace(trace, format_name=trace_format), machine)
    table = Table(show_header=False, box=None)
    for what, figures in describe(character):
        table.add_row(what, escape(figures))
    _stdout().print(table)


@app.command()
def mock(
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME=VALUE]...", help=f"any of {', '.join(MockOptions.__struct_fields__)}"),
    ] = None,
    *,
    host: Annotated[str, _option("address to listen on", "HOST")] = "127.0.0.1",
    port: Annotated[int, _option("port to listen on; 0: any", "N", min=0, max=65535)] = 8001,
) -> None:
    """A server with exact timing and chosen faults."""
    options = _mock_options(settings or [])
    raise_open_files()
    uvloop.run(serve_mock(options, host=host, port=port, on_ready=lambda url: print(url, flush=True)))


@app.command("plan")
def plan_command(
    workload: Annotated[str, typer.Argument(help=f"one of {', '.join(workload_names())}")],
    out: Annotated[Path, typer.Argument(metavar="FILE", help="gzipped where it ends in .gz")],
    *,
    sessions: _Sessions = None,
    turns: _Turns = None,
    scale: _Scale = 1.0,
    time_scale: _TimeScale = 1.0,
    max_context: _MaxContext = 131_072,
    share: _Share = 0.5,
    seed: _Seed = 0,
) -> None:
    """Write a workload as a plan file."""
    _write_plan(find_workload(workload).build(_workload_options(dict(locals()))), out)


@app.command("replay")
def replay_command(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="a trace, plain or gzipped")],
    out: Annotated[Path, typer.Argument(metavar="FILE", help="gzipped where it ends in .gz")],
    *,
    trace_format: _TraceFormat = "",
    scale: Annotated[float, _option("times its tokens", "X")] = 1.0,
    time_scale: Annotated[float, _option("times its arrivals and pauses", "X")] = 1.0,
    max_requests: Annotated[int | None, _option("the first so many; whole sessions", "N")] = None,
    max_context: Annotated[int, _option("longest prompt and answer", "N")] = 131_072,
    seed: Annotated[int, _option("of spreading its clock's bursts", "N")] = 0,
) -> None:
    """Write a trace as a plan file, at any size."""
    options = ReplayOptions(
        scale=scale, time_scale=time_scale, max_requests=max_requests, max_context=max_context, seed=seed
    ).validated()
    _write_plan(replay(read_trace(trace, format_name=trace_format), options), out)


def _write_plan(made: Plan, out: Path) -> None:
    try:
        dump_plan(made, out)
    except OSError as error:
        raise PlanInvalid(f"{out} cannot be written: {error.strerror or error}") from None
    print(f"{out}: {len(made.requests)} requests, {made.sha256}")
    for note in made.notes:
        print(note)


def _stdout() -> Console:
    """A pipe or a file has no width of its own, and eighty columns break the tables."""
    return Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 120)


def _plan(name: str, options: WorkloadOptions) -> Plan:
    """A file, or a workload where there is no such file."""
    path = Path(name)
    if path.exists():
        return load_plan(path)
    if name.replace("-", "_") in workload_names():
        return find_workload(name).build(options)
    raise PlanInvalid(f"there is no file {name}, and the workloads are {', '.join(workload_names())}")


def _workload_options(given: dict[str, Any]) -> WorkloadOptions:
    names = WorkloadOptions.__struct_fields__
    return WorkloadOptions(**{name: given[name] for name in names}).validated()


def _targets(given: dict[str, Any]) -> list[TargetOptions]:
    if given["history"] not in get_args(History):
        raise PlanInvalid(f"--history is {given['history']!r}; it must be {' or '.join(get_args(History))}")
    try:
        extra = msgspec.json.decode(given["extra"], type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise PlanInvalid(f"--extra is no JSON object: {error}") from None
    return [
        TargetOptions(
            url=url,
            dialect=given["dialect"],
            model=given["model"],
            api_key=given["api_key"],
            deadlines=Deadlines(idle_s=given["idle_timeout"]),
            history=given["history"],
            concurrency=given["concurrency"],
            ignore_eos=given["ignore_eos"],
            extra=extra,
            num_warm_ups=given["warm_ups"],
            calibrate=given["calibrate"],
        )
        for url in given["target"]
    ]


def _experiment(given: dict[str, Any]) -> ExperimentOptions:
    return ExperimentOptions(
        rate=given["rate"],
        process=given["arrivals"],
        cv=given["cv"],
        seed=given["seed"],
        num_repeats=given["repeats"],
        slo=SLO(
            ttft_s=given["slo_ttft"],
            tpot_s=given["slo_tpot"],
            e2e_s=given["slo_e2e"],
            session_s=given["slo_session"],
        ),
        bounds=HealthBounds(max_cpu_share=given["max_cpu"], max_lag_p99_s=given["max_lag"]),
        max_drift=given["max_drift"],
        max_seconds=given["max_seconds"],
        shrink=given["shrink"],
        server_pid=given["server_pid"],
        look_every_s=given["look_every"],
    ).validated()


def _mock_options(settings: list[str]) -> MockOptions:
    pairs = dict(setting.partition("=")[::2] for setting in settings)
    try:
        return msgspec.convert(pairs, MockOptions, strict=False)
    except msgspec.ValidationError as error:
        raise PlanInvalid(f"mock options: {error}") from None


def _check_out(out: Path | None, *, num_reports: int) -> None:
    """Before the run rather than after it."""
    if out is None:
        return
    many = num_reports > 1
    if out.is_file() if many else out.is_dir():
        kind = "a folder" if many else "a file"
        raise PlanInvalid(f"--out is {out}; for {num_reports} reports it must be {kind}")
    folder = out if many else out.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlanInvalid(f"--out is {out}; its folder cannot be made: {error.strerror or error}") from None


def _write(reports: tuple[Report, ...], out: Path) -> None:
    for number, report in enumerate(reports, start=1):
        path = out if len(reports) == 1 else out / f"{number}-{report.plan.name}.json"
        write_json(report, path)
        print(f"written: {path}")


def _is_worthless(report: Report) -> bool:
    measures = [repeat.measures for repeat in report.repeats]
    return bool(report.void_reasons) or not any(one.num_succeeded + one.num_cancelled for one in measures)


def main() -> None:
    try:
        app()
    except LoadTestError as error:
        print(f"tidegate-loadtest: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(EXIT_UNUSABLE)
    except (Stopped, KeyboardInterrupt):
        print("tidegate-loadtest: stopped before anything was measured", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
