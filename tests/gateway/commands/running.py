"""The real command in a process of its own: run to its end, or talked to through a pseudo terminal."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

DEADLINE_S = 60.0
ESCAPES = re.compile(rb"\x1b(\[[0-?]*[ -/]*[@-~]|[=>])")


def clean_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's, without the options a developer may have set for their own servers."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TIDEGATE_")}
    fixed = {"TIDEGATE_COMPILE": "off", "OMP_NUM_THREADS": "1", "TERM": "xterm", "COLUMNS": "200"}
    return {**kept, **fixed, **extra}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "gateway", *arguments]


def tidegate(
    *arguments: str, stdin: bytes | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command(*arguments),
        env=clean_environment(environment),
        input=b"" if stdin is None else stdin,
        capture_output=True,
        timeout=DEADLINE_S,
        check=False,
    )
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


class Terminal:
    """A command whose three streams are one pseudo terminal."""

    def __init__(self, process: "subprocess.Popen[bytes]", descriptor: int) -> None:
        self.process = process
        self._descriptor = descriptor
        self._unread = b""

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    def wait_for(self, text: str) -> str:
        """Read on until `text` has come; return what came up to its end, without escape sequences."""
        deadline = time.monotonic() + DEADLINE_S
        while text.encode() not in (seen := ESCAPES.sub(b"", self._unread)):
            data = self._read(deadline)
            assert data, f"the command ended before {text!r}; it said {seen!r}"
            self._unread += data
        before, _, self._unread = seen.partition(text.encode())
        return before.decode() + text

    def interrupt_until_it_ends(self) -> int:
        """Ctrl-C at a prompt, as often as needed: readline is deaf for an instant after showing it."""
        deadline = time.monotonic() + DEADLINE_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline, "Ctrl-C does not end it"
            self.process.send_signal(signal.SIGINT)
            select.select([self._descriptor], [], [], 0.5)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(1.0)
        return self.wait()

    def wait(self) -> int:
        """Read to the end and return the exit code."""
        deadline = time.monotonic() + DEADLINE_S
        while self._read(deadline):
            pass
        return self.process.wait(DEADLINE_S)

    def _read(self, deadline: float) -> bytes:
        ready, _, _ = select.select([self._descriptor], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"nothing more has come after {self._unread!r}"
        try:
            return os.read(self._descriptor, 65536)
        except OSError:  # how Linux says that nobody has the other end open
            return b""


@contextmanager
def at_terminal(*arguments: str, **environment: str) -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    try:
        process = subprocess.Popen(
            command(*arguments),
            env=clean_environment(environment),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
        )
        os.close(theirs)
        with process:
            try:
                yield Terminal(process, ours)
            finally:
                process.kill()
    finally:
        os.close(ours)
