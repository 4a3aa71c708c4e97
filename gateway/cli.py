"""The `tidegate` command. Heavy modules are imported inside the commands, so that `--version` is quick."""

import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeAlias

import msgspec
import typer
import typer.core

from core import EngineError
from gateway import __version__
from gateway.api_keys import read_key_file
from gateway.commands import CommandFailed
from gateway.config import ENVIRONMENT_PREFIX, Options, ServerConfig, build_config, gather_options
from gateway.hub import check_readable, default_model_id, resolve_model
from gateway.model_store import DEFAULT_MODEL, ModelUnavailable, cache_folder, cached_model, pull


class _Commands(typer.core.TyperGroup):
    """All commands. One whose reader has seen enough (`doctor | head`) has not failed for that."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise typer.Exit(0) from None
        finally:
            try:
                sys.stdout.flush()
            except BrokenPipeError:
                _discard_output()


app = typer.Typer(
    name="tidegate",
    cls=_Commands,
    help="A streaming inference gateway for long-running agents.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Text: TypeAlias = str | None
Many: TypeAlias = list[str] | None
Flag: TypeAlias = bool | None
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="print JSON")]


def _option(what: str, metavar: str = "N") -> Any:
    """An option whose text `gateway.config` checks, so that flags, environment and file share one judge."""
    return typer.Option(metavar=metavar, help=what, show_default=False)


def _flag(what: str) -> Any:
    """A switch with both names, `--x` and `--no-x`."""
    return typer.Option(help=what, show_default=False)


def _naming_variables(command: Callable[..., None]) -> Callable[..., None]:
    """Add to each option's help the variable that sets it. Typer must not read it: `gateway.config` does."""
    for name, parameter in inspect.signature(command).parameters.items():
        (described,) = parameter.annotation.__metadata__
        if name not in ("config", "print_config"):
            described.help += f" ({ENVIRONMENT_PREFIX}{name.upper()})"
    return command


ServedModel: TypeAlias = Annotated[
    Text, typer.Argument(help="A .gguf file, a model folder or ORG/NAME [default: SmolLM2-135M-Instruct]")
]
KVReservation: TypeAlias = Annotated[
    Text, _option("for comparison: paged, max, power_of_two or oracle [paged]", "KIND")
]
Compile: TypeAlias = Annotated[
    Text, _option("auto: run compiled parts, and make them in the background; off [auto]", "WHEN")
]
Policy: TypeAlias = Annotated[
    Text,
    _option("first_come, longest_prefix, least_attained or fair_tenants goes first [first_come]", "NAME"),
]
PrintConfig: TypeAlias = Annotated[
    bool, typer.Option("--print-config", help="print all options as TOML, and exit")
]


@app.command()
@_naming_variables
def serve(
    *,
    model: ServedModel = None,
    config: Annotated[Text, _option("TOML file with options; also TIDEGATE_CONFIG", "FILE")] = None,
    host: Annotated[Text, _option("address to listen on [127.0.0.1]", "HOST")] = None,
    port: Annotated[Text, _option("port to listen on; 0: any [8000]")] = None,
    model_id: Annotated[Text, _option("name clients ask for [smollm2-135m, or the file's]", "NAME")] = None,
    alias: Annotated[Many, _option("one more name for it; '*': any name (repeatable)", "NAME")] = None,
    device: Annotated[Text, _option("auto, cpu or cuda [auto]", "DEVICE")] = None,
    numerics: Annotated[Text, _option("stable, fast or reference [stable]", "KIND")] = None,
    executor: Annotated[Text, _option("process or thread [process]", "KIND")] = None,
    block_size: Annotated[Text, _option("tokens per KV block [16]")] = None,
    num_blocks: Annotated[Text, _option("KV blocks [as many as kv-bytes holds]")] = None,
    kv_bytes: Annotated[Text, _option("bytes for the KV pool, as 2G or 512M [25 % of free memory]")] = None,
    max_model_len: Annotated[Text, _option("longest context in tokens [the model's own]")] = None,
    allow_longer_context: Annotated[Flag, _flag("let max-model-len pass the model's own context")] = None,
    max_step_tokens: Annotated[Text, _option("tokens computed in one step [512]")] = None,
    max_prefill_tokens: Annotated[Text, _option("tokens of one request in one step [256]")] = None,
    max_running: Annotated[Text, _option("requests computed in one step [64]")] = None,
    threads: Annotated[Text, _option("compute threads [chosen step by step]")] = None,
    step_deadline: Annotated[Text, _option("a longer step counts as hung [120]", "SECONDS")] = None,
    load_deadline: Annotated[Text, _option("longer loading counts as hung [600]", "SECONDS")] = None,
    cache_dir: Annotated[Text, _option("where packed weights are kept", "FOLDER")] = None,
    compile: Compile = None,  # noqa: A002  -- the option's name
    prefix_cache: Annotated[Flag, _flag("reuse KV of equal prefixes")] = None,
    kv_reservation: KVReservation = None,
    batching: Annotated[Text, _option("for comparison: continuous or static [continuous]", "KIND")] = None,
    chunked_prefill: Annotated[Flag, _flag("compute long prompts in pieces, or not to compare")] = None,
    policy: Policy = None,
    trace: Annotated[Text, _option("write a Chrome trace there, for Perfetto", "FILE")] = None,
    session_gate: Annotated[Flag, _flag("let sessions wait that the cache has no room for")] = None,
    api_key_file: Annotated[Text, _option("keys that may ask, one per line [everybody may]", "FILE")] = None,
    cors_origin: Annotated[Many, _option("web page that may ask; '*': any (repeatable)", "ORIGIN")] = None,
    max_body_bytes: Annotated[Text, _option("largest request body [4194304]")] = None,
    max_json_depth: Annotated[Text, _option("deepest nesting of a body [64]")] = None,
    max_connections: Annotated[Text, _option("open connections [1024]")] = None,
    max_queued: Annotated[Text, _option("waiting requests before 429 [256]")] = None,
    keep_alive: Annotated[Text, _option("silence before an SSE comment [15]", "SECONDS")] = None,
    send_timeout: Annotated[Text, _option("how long a client may not read [30]", "SECONDS")] = None,
    send_buffer_bytes: Annotated[Text, _option("bytes waiting for one slow reader [65536]")] = None,
    drain_timeout: Annotated[Text, _option("time to finish after SIGTERM [30]", "SECONDS")] = None,
    log_level: Annotated[Text, _option("debug, info, warning or error [info]", "LEVEL")] = None,
    log_format: Annotated[Text, _option("auto, console or json [auto]", "FORMAT")] = None,
    access_log: Annotated[Flag, _flag("one log line per request")] = None,
    print_config: PrintConfig = False,
) -> None:
    """Serve a model over HTTP. Variables and keys of a TOML file are named as the options are."""
    flags: dict[str, object] = dict(locals())
    del flags["print_config"]
    config_and_options = _checked(flags)
    if print_config:
        from gateway.commands.print_config import config_as_toml

        typer.echo(config_as_toml(*config_and_options), nl=False)
        return
    settings = _with_model(config_and_options[0])
    from gateway.lifespan import serve as serve_until_stopped

    raise typer.Exit(serve_until_stopped(settings, explain=config_and_options[1].explain))


Model: TypeAlias = Annotated[
    Text,
    typer.Option("--model", "-m", metavar="PATH", help=".gguf file, folder or ORG/NAME [the default model]"),
]
ConfigFile: TypeAlias = Annotated[Text, _option("TOML file with options; also TIDEGATE_CONFIG", "FILE")]
DeviceName: TypeAlias = Annotated[Text, _option("auto, cpu or cuda [auto]", "DEVICE")]
Threads: TypeAlias = Annotated[Text, _option("compute threads [chosen step by step]")]
MaxTokens: TypeAlias = Annotated[Text, _option("longest answer in tokens [512]")]
Temperature: TypeAlias = Annotated[Text, _option("0: always the likeliest token [0.7]", "X")]
TopP: TypeAlias = Annotated[Text, _option("sample among this share of the likeliest [1]", "X")]
Seed: TypeAlias = Annotated[Text, _option("the same seed gives the same answer [random]")]
System: TypeAlias = Annotated[Text, _option("system message", "TEXT")]


@app.command("generate")
def generate_command(
    prompt: Annotated[str, typer.Argument(help="what to answer; -: read it from stdin", show_default=False)],
    *,
    model: Model = None,
    system: System = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
    raw: Annotated[bool, typer.Option("--raw", help="complete the text itself, without a template")] = False,
    config: ConfigFile = None,
    device: DeviceName = None,
    threads: Threads = None,
) -> None:
    """Answer one prompt at the terminal, without a server."""
    from gateway.commands.sampling_flags import read_sampling

    sampling = read_sampling(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    checked, options = _checked({"model": model, "config": config, "device": device, "threads": threads})
    from gateway.commands.generate import generate

    with options.explaining():
        generate(_with_model(checked), prompt, system=system, raw=raw, sampling=sampling)


@app.command("chat")
def chat_command(
    *,
    model: Model = None,
    system: System = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
    config: ConfigFile = None,
    device: DeviceName = None,
    threads: Threads = None,
) -> None:
    """Talk with a model at the terminal, without a server."""
    from gateway.commands.sampling_flags import read_sampling

    sampling = read_sampling(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    checked, options = _checked({"model": model, "config": config, "device": device, "threads": threads})
    from gateway.commands.chat import chat

    with options.explaining():
        chat(_with_model(checked), system=system, sampling=sampling)


@app.command("doctor")
def doctor_command(
    *,
    model: Model = None,
    host: Annotated[Text, _option("address to listen on [127.0.0.1]", "HOST")] = None,
    port: Annotated[Text, _option("port to listen on [8000]")] = None,
    numerics: Annotated[Text, _option("stable, fast or reference [stable]", "KIND")] = None,
    config: ConfigFile = None,
    device: DeviceName = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Say what this machine has, what will be used and why. Exit code 1: serving would fail."""
    from gateway.commands.doctor import doctor

    flags = {"model": model, "host": host, "port": port, "numerics": numerics, "config": config}
    checked, _ = _checked({**flags, "device": device, "threads": threads})
    raise typer.Exit(doctor(checked, as_json=as_json))


@app.command("inspect")
def inspect_command(
    file: Annotated[str, typer.Argument(help="a .gguf file, or a folder of safetensors", show_default=False)],
    *,
    as_json: Json = False,
) -> None:
    """Say what a model file holds, and how much context fits here. Loads nothing."""
    from gateway.commands.inspect_file import inspect_file

    inspect_file(resolve_model(file) if Path(file).exists() else file, as_json=as_json)


@app.command("top")
def top_command(
    *,
    url: Annotated[Text, _option("the server [from host and port, as for serve]", "URL")] = None,
    api_key: Annotated[
        Text,
        typer.Option(metavar="KEY", envvar="TIDEGATE_API_KEY", help="where the server wants one"),
    ] = None,
    every: Annotated[float, typer.Option(metavar="SECONDS", min=0.05, max=60.0, help="between looks")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="print one frame and exit")] = False,
    config: ConfigFile = None,
) -> None:
    """Watch a running server: queues, blocks, speed, memory."""
    from gateway.commands.top import top

    if url is None:
        checked, _ = _checked({"config": config})
        host = f"[{checked.host}]" if ":" in checked.host else checked.host
        url = f"http://{host}:{checked.port}"
    top(url, api_key=api_key, every_s=every, once=once)


@app.command("pull")
def pull_command() -> None:
    """Fetch the default model into the cache and print where it is."""
    typer.echo(_pull_with_progress())


@app.callback(invoke_without_command=True)
def root(
    *,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)
    ] = False,
) -> None:
    if version:
        typer.echo(f"tidegate {__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command line; what the user can mend ends in one line on stderr and exit code 1."""
    _replace_closed_streams()
    try:
        app(prog_name="tidegate")  # however it was started: completion looks for this name
    except (CommandFailed, EngineError, ModelUnavailable) as error:
        _fail(str(error))
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except OSError as error:  # a full disk behind stdout, say; what the commands expect they name themselves
        _discard_output()
        _fail(f"{error.strerror or error}" + (f": {error.filename}" if error.filename else ""))


def _discard_output() -> None:
    """What is still buffered would fail again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _replace_closed_streams() -> None:
    """Give a program that was started without stdin, stdout or stderr empty ones: Python has None there."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: PTH123, SIM115 -- for the process's life


def _checked(flags: dict[str, object]) -> tuple[ServerConfig, Options]:
    """Merge and check all options. Nothing is fetched: a wrong option fails before a long download."""
    file = flags.pop("config") or os.environ.get("TIDEGATE_CONFIG")
    assert file is None or isinstance(file, str)
    options = gather_options(flags=flags, environment=os.environ, file=Path(file) if file else None)
    is_default = options.model in ("", DEFAULT_MODEL.model_id)
    model_id = DEFAULT_MODEL.model_id if is_default else default_model_id(options.model)
    config = build_config(options, checkpoint="", default_model_id=model_id)
    if config.api_key_file:
        read_key_file(config.api_key_file)
    return config, options


def _with_model(config: ServerConfig) -> ServerConfig:
    """Find the model, fetching the default one if need be, and a place for its packed weights."""
    is_default = config.model in ("", DEFAULT_MODEL.model_id)
    engine = msgspec.structs.replace(
        config.engine,
        checkpoint=_pull_with_progress() if is_default else check_readable(resolve_model(config.model)),
        cache_dir=config.engine.cache_dir or str(cache_folder() / "packed"),
    )
    return msgspec.structs.replace(config, engine=engine)


def _pull_with_progress() -> str:
    if path := cached_model(DEFAULT_MODEL):
        return str(path)
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        tasks: dict[str, Any] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(f"{DEFAULT_MODEL.model_id}: {what}", total=total)
                if progress.disable:  # a log gets one line per stage instead of a bar
                    _say(f"{DEFAULT_MODEL.model_id}: {what} ({total / 1e6:.0f} MB)")
            progress.update(tasks[what], completed=done)

        return str(pull(DEFAULT_MODEL, report=report))


def _say(message: str) -> None:
    print(f"tidegate: {message}", file=sys.stderr, flush=True)  # noqa: T201  # the command's own voice


def _fail(message: str) -> NoReturn:
    _say(message)
    raise SystemExit(1)
