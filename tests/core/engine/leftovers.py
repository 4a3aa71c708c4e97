"""What a closed engine must not leave behind: children, threads, open files."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import uvloop


def children() -> set[int]:
    """Process ids of our direct children, zombies included.

    By every process's parent: a thread that ends while `/proc/PID/task` is read takes its entry along.
    """
    return {child.pid for child in psutil.Process().children()}


def is_alive(pid: int) -> bool:
    """Whether a process still runs; a zombie does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def wait_until_dead(pid: int, *, deadline_s: float = 10.0) -> None:
    """Wait for a process that is not our child; fail if it outlives the deadline."""
    deadline = time.monotonic() + deadline_s
    while is_alive(pid):
        assert time.monotonic() < deadline, f"process {pid} is still alive"
        time.sleep(0.01)


def open_files() -> dict[str, str]:
    """File descriptor -> what it is."""
    files: dict[str, str] = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            files[entry.name] = str(entry.readlink())
        except FileNotFoundError:
            continue  # the listing's own
    return files


@contextmanager
def nothing_left_behind() -> Iterator[None]:
    """Fail if the body leaves a child, a thread or an open file that was not there before.

    Threads of asyncio that wait for a reaped child need a moment to end.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.sleep(0))  # the first loop of a process opens files that stay
    before = children(), set(threading.enumerate()), open_files()
    yield
    deadline = time.monotonic() + 5.0
    while set(threading.enumerate()) - before[1] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert children() == before[0], "a child process is left"
    assert set(threading.enumerate()) <= before[1], "a thread is left"
    new_files = {number: name for number, name in open_files().items() if number not in before[2]}
    assert not new_files, f"files are left open: {new_files}"
