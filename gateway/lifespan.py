"""The server's life: listen, load, serve, drain, stop."""

import asyncio
import errno
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import structlog
import uvloop
from aiohttp import web

from core import EngineError
from gateway.app import build_app
from gateway.backends import Backend
from gateway.backends.local import open_local_backend
from gateway.config import ServerConfig
from gateway.connections import limit_connections
from gateway.keys import ADMISSION, BACKENDS, CONFIG, KEEP_ALIVE, LIFECYCLE, METRICS
from gateway.lifecycle import Lifecycle, Phase
from gateway.telemetry.logging import configure_logging
from gateway.telemetry.loop_lag import sample_loop_lag
from tokenization import TokenizationError

FLUSH_TIMEOUT_S = 5.0
"""After the last generation has ended: how long its client may take to read the rest."""
BACKLOG = 1024
SWITCH_INTERVAL_S = 0.0005
"""A thread that encodes a long prompt hands the interpreter back to the loop so often; Python's own 5 ms
would be a stall that every stream sees."""

OpenBackend = Callable[[ServerConfig], AbstractAsyncContextManager[Backend]]

_log = structlog.get_logger("gateway.lifespan")


def serve(
    config: ServerConfig,
    *,
    open_backend: OpenBackend = open_local_backend,
    explain: Callable[[str], str] = str,
) -> int:
    """Serve until a signal says stop. Returns the exit code; failures are one line on stderr.

    Args:
        explain: words a failure as the user knows things, options by the names they were set by.
    """
    configure_logging(level=config.log_level, log_format=config.log_format)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        sock = bind(config.host, config.port)
    except OSError as error:
        _say(f"cannot listen on {config.host}:{config.port}: {_why_not(error)}")
        return 1
    exit_code = 0
    with sock:
        try:
            uvloop.run(run(build_app(config), sock=sock, open_backend=open_backend))
        except* (EngineError, TokenizationError) as group:
            _say(explain(_first(group)))
            exit_code = 1
    return exit_code


def bind(host: str, port: int) -> socket.socket:
    """Take the address at once, before minutes of loading: a busy port must fail first.

    Raises:
        OSError: the address is taken, forbidden or no address.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)  # only listening makes the address ours alone
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


def _why_not(error: OSError) -> str:
    """What the system says about an address, and what to do about it."""
    said = error.strerror or str(error)
    if isinstance(error, socket.gaierror):
        return (
            f"the host cannot be resolved ({said}); give an address of this machine to --host, as 127.0.0.1"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{said}: it is no address of this machine; choose another --host, as 127.0.0.1 or 0.0.0.0"
    if error.errno == errno.EACCES:
        return f"{said}: ports below 1024 need the system's leave; choose another --port"
    return f"{said}; choose another --port"


async def run(
    app: web.Application, *, sock: socket.socket, open_backend: OpenBackend, handle_signals: bool = True
) -> None:
    """Serve `app` on `sock` until its lifecycle is asked to stop. Probes are answered while loading."""
    lifecycle = app[LIFECYCLE]
    if handle_signals:
        _stop_on_signals(lifecycle)
    async with _listening(app, sock), asyncio.TaskGroup() as tasks:
        background = (
            tasks.create_task(app[KEEP_ALIVE].run()),
            tasks.create_task(sample_loop_lag(app[METRICS].saw_lag)),
        )
        backend_life = tasks.create_task(_serve_backend(app, open_backend, url=_url(sock)))
        await lifecycle.stop_requested()
        if lifecycle.phase is Phase.STARTING:
            backend_life.cancel()
        await asyncio.wait((backend_life,))
        for task in background:
            task.cancel()


async def _serve_backend(app: web.Application, open_backend: OpenBackend, *, url: str) -> None:
    """A backend's whole life in one task: its scopes are left by the task that entered them."""
    config, lifecycle = app[CONFIG], app[LIFECYCLE]
    _log.info("model_loading", url=url, model=config.model_id)
    async with open_backend(config) as backend:
        app[BACKENDS].add(backend)
        lifecycle.became_ready()
        models = ", ".join(app[BACKENDS].models())
        _log.info("server_ready", url=url, model=models)
        _tell(config, f"ready at {url}/v1 with the model {models}; Ctrl-C stops, twice stops at once")
        await lifecycle.stop_requested()
        await _drain(app, backend)
    _log.info("server_stopped")


async def _drain(app: web.Application, backend: Backend) -> None:
    """Refuse new requests, let running ones finish until the deadline, then end them by an error event."""
    admission, lifecycle = app[ADMISSION], app[LIFECYCLE]
    lifecycle.began_draining()
    admission.close()
    num_running, timeout_s = admission.num_admitted, app[CONFIG].drain_timeout_s
    _log.info("drain_started", num_running=num_running, timeout_s=timeout_s)
    if num_running:
        requests = "1 request" if num_running == 1 else f"{num_running} requests"
        _tell(app[CONFIG], f"finishing {requests}, {timeout_s:g} s at most; Ctrl-C again stops at once")
    async with asyncio.TaskGroup() as tasks:
        patient = tasks.create_task(backend.drain(deadline_s=app[CONFIG].drain_timeout_s))
        hurry = tasks.create_task(lifecycle.hurry_requested())
        await asyncio.wait((patient, hurry), return_when=asyncio.FIRST_COMPLETED)
        if not patient.done():
            patient.cancel()
            await backend.drain(deadline_s=0.0)
        hurry.cancel()
    try:
        async with asyncio.timeout(FLUSH_TIMEOUT_S):
            await admission.idle()
    except TimeoutError:
        _log.warning("clients_cut", num_running=admission.num_admitted)


@asynccontextmanager
async def _listening(app: web.Application, sock: socket.socket) -> AsyncIterator[None]:
    runner = web.AppRunner(
        app,
        handler_cancellation=True,  # a client that leaves ends its generation
        shutdown_timeout=1.0,  # draining has been patient already
    )
    await runner.setup()
    assert runner.server is not None, "setup makes the server"
    factory = limit_connections(runner.server, max_connections=app[CONFIG].max_connections)
    server = await asyncio.get_running_loop().create_server(factory, sock=sock, backlog=BACKLOG)
    try:
        yield
    finally:
        server.close()
        await runner.cleanup()


def _stop_on_signals(lifecycle: Lifecycle) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lifecycle.request_stop)


def _url(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _first(group: BaseExceptionGroup[Exception]) -> str:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error)


def _tell(config: ServerConfig, line: str) -> None:
    """For a person at the terminal, whatever the log's level; a log for machines is left alone."""
    if config.log_format != "json" and sys.stderr.isatty():
        _say(line)


def _say(line: str) -> None:
    sys.stderr.write(f"tidegate: {line}\n")
