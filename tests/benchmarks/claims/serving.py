"""A real server in a process of its own, with the default model or another, and what it says of itself."""

import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from loadtest.plan import Plan, dump_plan
from loadtest.report import Report, read_report

READY_WITHIN_S = 300.0
COMPILED_WITHIN_S = 600.0
TOLD_WITHIN_S = 12.0
"""A server looks at its worker so often."""


class Server:
    """Where it listens, and its process id."""

    def __init__(self, url: str, pid: int) -> None:
        self.url = url
        self.pid = pid

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics by its name and labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        samples = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in samples}


@contextmanager
def serving(*arguments: str, model: str | None = None) -> Iterator[Server]:
    """`tidegate serve` on a free port until the scope is left."""
    port = free_port()
    command = [sys.executable, "-m", "gateway", "serve", *([model] if model else [])]
    command += ["--port", str(port), *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TIDEGATE_")}
    with running(command, port, ready="/readyz", within_s=READY_WITHIN_S, environment=environment) as server:
        yield server


@contextmanager
def running(
    command: list[str],
    port: int,
    *,
    ready: str,
    within_s: float,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """A server's process, once `ready` is answered, until the scope is left."""
    with (
        tempfile.TemporaryFile("w+") as log,  # a pipe that nobody reads would fill, and stop the server
        subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=log) as process,
    ):
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_ready(url + ready, process, log=log, within_s=within_s)
            yield Server(url, process.pid)
        finally:
            process.terminate()
            process.wait(timeout=60)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def compile_ahead() -> None:
    """Run the default model until all that can be compiled is, so that no compiler runs beside a measurement.

    Takes some minutes once, and seconds from then on.
    """
    deadline = time.monotonic() + COMPILED_WITHIN_S
    with serving() as server:
        time.sleep(TOLD_WITHIN_S)
        while server.metrics().get('tidegate_regions{state="eager"}') and time.monotonic() < deadline:
            time.sleep(2)


def load(plan: Plan, server: Server, *arguments: str) -> Report:
    """Put a plan on the server with the load tester, once; its report."""
    with tempfile.TemporaryDirectory() as folder:
        file, out = Path(folder) / f"{plan.name}.plan.jsonl", Path(folder) / "report.json"
        dump_plan(plan, file)
        command = [
            sys.executable, "-m", "loadtest", "run", str(file), "--target", server.url, "--out", str(out),
            "--server-pid", str(server.pid), "--repeats", "1", "--no-calibrate", "--warm-ups", "1",
            *arguments,
        ]  # fmt: skip
        told = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
        if told.returncode:
            raise SystemExit(f"{plan.name}: {told.stdout[-2000:]} {told.stderr[-2000:]}")
        return read_report(out)


def figure(report: Report, name: str) -> float:
    """The median of a figure, which must be known."""
    value = report.summary[name].median
    assert value is not None, f"{name} is unknown"
    return value


def _wait_until_ready(url: str, process: "subprocess.Popen[bytes]", *, log: IO[str], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            log.seek(0)
            raise SystemExit(f"the server ended with {process.returncode}: {log.read()[-2000:]}")
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.05)
    raise SystemExit(f"the server was not ready within {within_s} s")
