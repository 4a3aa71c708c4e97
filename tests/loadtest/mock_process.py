"""The mock in a child process, so that its timing and its CPU are not the client's."""

import contextlib
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import msgspec

from loadtest.mock.script import MockOptions

ROOT = Path(__file__).resolve().parents[2]


@contextlib.contextmanager
def mock_process(options: MockOptions | None = None) -> Iterator[str]:
    """A mock on a port of its own; gives its URL, and ends it."""
    text = msgspec.json.encode(options or MockOptions()).decode()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    child = subprocess.Popen(
        [sys.executable, "-m", "loadtest.mock", text], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert child.stdout is not None
        url = child.stdout.readline().strip()
        assert url.startswith("http://"), f"the mock did not start: {url!r}"
        yield url
    finally:
        child.terminate()
        child.communicate(timeout=30)


def mock_stats(url: str) -> dict[str, float]:
    """What the mock says of itself; numbers that it does not know yet are left out."""
    with urllib.request.urlopen(url + "/mock/stats", timeout=30) as answer:
        stats = msgspec.json.decode(answer.read(), type=dict[str, float | None])
    return {name: value for name, value in stats.items() if value is not None}
