"""One spawned worker process, seen from the event loop: its socket, its calls and its end."""

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

from core.engine.frames import Answer, Close, Died, FrameSplitter, NumberedCall, pack, unpack_answer
from core.errors import WorkerFailed

SETTLE_S = 1.0
"""Between the child's exit and the end of its socket, or the other way round, before we stop waiting."""


class Child:
    """A worker process and the numbered calls made of it. Touched by the event loop alone.

    It ends once: when the process is reaped and its socket is read to the end, so that last words
    are heard. Then every open call raises `failure`, and `on_end` is called.
    """

    def __init__(self, *, on_end: Callable[[], None]) -> None:
        self.failure: WorkerFailed | None = None
        """Set when the child was given up or has ended; never unset."""
        self.ended = asyncio.Event()
        self._on_end = on_end
        self._call_ids = itertools.count(1)
        self._calls: dict[int, asyncio.Future[Answer]] = {}
        self._socket_closed = False
        self._settling: asyncio.TimerHandle | None = None
        self._socket: asyncio.WriteTransport | None = None
        self._process: asyncio.SubprocessTransport | None = None

    async def spawn(self) -> None:
        """Start the process.

        Raises:
            WorkerFailed: the machine refused another process.
        """
        ours, theirs = socket.socketpair()
        loop = asyncio.get_running_loop()
        try:
            await loop.create_unix_connection(lambda: _Link(self), sock=ours)
            await loop.subprocess_exec(
                lambda: _Process(self),
                # -P: an installed server must not import a `core` that happens to lie in its folder
                *(sys.executable, "-P", "-m", "core.engine.worker_process", str(theirs.fileno())),
                stdin=subprocess.DEVNULL,
                stdout=None,
                stderr=None,
                pass_fds=(theirs.fileno(),),
                env=_environment(),
                start_new_session=True,  # Ctrl-C reaches us alone; one kill reaches its children too
            )
        except OSError as error:
            self._abandon_socket(ours)
            raise WorkerFailed(f"the worker process did not start: {error}") from error
        except BaseException:
            self._abandon_socket(ours)
            await self._abandon_process()
            raise
        finally:
            theirs.close()

    @property
    def pid(self) -> int:
        assert self._process is not None, "spawn() comes first"
        return self._process.get_pid()

    def call(self, make: Callable[[int], NumberedCall]) -> asyncio.Future[Answer]:
        """Send the call that `make` builds around its number; the future is its answer."""
        assert self._socket is not None, "spawn() comes first"
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        if self.failure is not None:
            future.set_exception(self.failure)
            return future
        call_id = next(self._call_ids)
        frame = pack(make(call_id))
        self._calls[call_id] = future
        self._socket.write(frame)
        return future

    def ask_to_exit(self) -> None:
        """The orderly end: open calls are answered first."""
        if self._socket is not None and self.failure is None and not self._socket_closed:
            self._socket.write(pack(Close()))

    def kill(self, reason: str) -> None:
        """The end at once, its children included. `reason` becomes the failure unless there is one."""
        self._fail(reason)
        if self._process is not None and self._process.get_returncode() is None:
            with contextlib.suppress(ProcessLookupError):  # it ended, and its exit is about to be told
                os.killpg(self._process.get_pid(), signal.SIGKILL)

    def receive(self, payload: bytes) -> None:
        """One message of the child."""
        answer = unpack_answer(payload)
        if isinstance(answer, Died):
            self._fail(f"the worker process ended: {answer.message}")
            return
        future = self._calls.pop(answer.call_id, None)
        if future is not None and not future.done():  # a caller that left wants no answer
            future.set_result(answer)

    def socket_opened(self, transport: asyncio.WriteTransport) -> None:
        self._socket = transport

    def socket_closed(self) -> None:
        self._socket_closed = True
        self._settle()

    def process_started(self, transport: asyncio.SubprocessTransport) -> None:
        self._process = transport

    def process_exited(self) -> None:
        self._settle()

    def _settle(self) -> None:
        """End when both process and socket have; do not wait long for the second."""
        if self._process is None:
            return  # spawn() failed and says so itself
        if self._socket_closed and self._process.get_returncode() is not None:
            self._end()
        elif self._settling is None:
            self._settling = asyncio.get_running_loop().call_later(SETTLE_S, self._settle_for_one)

    def _settle_for_one(self) -> None:
        assert self._process is not None
        if self._process.get_returncode() is None:
            self.kill("the worker process closed its socket")
        else:
            self._end()  # a grandchild holds the socket open

    def _end(self) -> None:
        if self.ended.is_set():
            return
        assert self._process is not None
        assert self._socket is not None
        if self._settling is not None:
            self._settling.cancel()
        self._fail(f"the worker process {_describe(self._process.get_returncode())}")
        assert self.failure is not None
        for future in self._calls.values():
            if not future.done():
                future.set_exception(self.failure)
        self._calls.clear()
        self._socket.abort()
        self._process.close()
        self.ended.set()
        self._on_end()

    def _fail(self, reason: str) -> None:
        if self.failure is None:
            self.failure = WorkerFailed(reason)

    async def _abandon_process(self) -> None:
        """Reap what a cancelled spawn has begun. The loop tells of a process one turn after it exists."""
        await asyncio.sleep(0)
        if self._process is not None:
            self.kill("the start was given up")
            await self.ended.wait()

    def _abandon_socket(self, ours: socket.socket) -> None:
        if self._socket is None:
            ours.close()
        else:
            self._socket.abort()


class _Link(asyncio.Protocol):
    """The loop's callbacks for the socket."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._splitter = FrameSplitter()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._child.socket_opened(cast("asyncio.WriteTransport", transport))

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._splitter.feed(data):
                self._child.receive(payload)
        except WorkerFailed as error:
            self._child.kill(str(error))

    def connection_lost(self, exc: Exception | None) -> None:
        self._child.socket_closed()


class _Process(asyncio.SubprocessProtocol):
    """The loop's callbacks for the process."""

    def __init__(self, child: Child) -> None:
        self._child = child

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._child.process_started(cast("asyncio.SubprocessTransport", transport))

    def process_exited(self) -> None:
        self._child.process_exited()


def _environment() -> dict[str, str]:
    """Ours, with our import path, so that the child finds the very same modules."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)}


def _describe(return_code: int | None) -> str:
    """An exit as people name it: by code, or by the signal that a negative code stands for."""
    if return_code is None or return_code >= 0:
        return f"exited with code {return_code}"
    try:
        return f"was ended by {signal.Signals(-return_code).name}"
    except ValueError:
        return f"was ended by signal {-return_code}"
