"""The worker's own process: `python -m core.engine.worker_process FD`, started by `process.py` only.

Reads calls from the inherited socket FD and answers them in order. The main thread computes; a
second thread reads, so that the parent's end is noticed in the middle of a step.
"""

import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
from queue import SimpleQueue
from types import FrameType

from core.engine.frames import (
    Answer,
    Call,
    Close,
    Died,
    Execute,
    Executed,
    FrameSplitter,
    Load,
    Loaded,
    MemoryRead,
    NumberedCall,
    StepRaised,
    pack,
    refused,
    unpack_call,
)
from core.engine.worker_host import WorkerHost
from core.errors import CheckpointError, ConfigError, StepFailed

ORPHANED_EXIT_CODE = 3
_READ_BYTES = 1 << 20
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve the parent until it says Close or is gone."""
    signal.signal(signal.SIGINT, _leave_it_to_the_parent)
    signal.signal(signal.SIGTERM, _leave_it_to_the_parent)
    _die_with_the_parent()
    os.dup2(2, 1)  # what libraries print must not mix with the parent's own output
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)  # a compiler we start must not keep the socket open
    try:
        serve(connection)
    except BaseException as error:
        with contextlib.suppress(OSError):
            connection.sendall(pack(Died(message=f"{type(error).__name__}: {error}")))
        raise


def serve(connection: socket.socket) -> None:
    """Answer calls in order until Close."""
    calls: SimpleQueue[Call] = SimpleQueue()
    threading.Thread(target=read_calls, args=(connection, calls), daemon=True).start()
    host = WorkerHost()
    while not isinstance(call := calls.get(), Close):
        connection.sendall(pack(answer(host, call)))
    host.close()


def read_calls(connection: socket.socket, calls: "SimpleQueue[Call]") -> None:
    """Queue what the parent sends; end the process at once when the parent is gone."""
    splitter = FrameSplitter()
    closing = False
    while data := _receive(connection):
        for payload in splitter.feed(data):
            call = unpack_call(payload)
            closing = closing or isinstance(call, Close)
            calls.put(call)
    if not closing:
        os._exit(ORPHANED_EXIT_CODE)  # without clean-up: the main thread may be deep in a step


def answer(host: WorkerHost, call: NumberedCall) -> Answer:
    """Carry out one call. What it raises beyond the named outcomes ends the process."""
    match call:
        case Load():
            try:
                return Loaded(call_id=call.call_id, info=host.load(call.config, call.worker))
            except (CheckpointError, ConfigError) as error:
                return refused(call.call_id, error)
        case Execute():
            try:
                return Executed(call_id=call.call_id, result=host.execute(call.plan))
            except StepFailed as error:
                return StepRaised(call_id=call.call_id, message=str(error))
        case _:
            return MemoryRead(call_id=call.call_id, memory=host.memory())


def _receive(connection: socket.socket) -> bytes:
    try:
        return connection.recv(_READ_BYTES)
    except ConnectionError:
        return b""


def _leave_it_to_the_parent(_signal_number: int, _frame: FrameType | None) -> None:
    """A function, not SIG_IGN: programs we start inherit SIG_IGN and could not be stopped."""


def _die_with_the_parent() -> None:
    """Ask the kernel to kill us with the parent's thread, for when a hung step holds the GIL."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    main()
