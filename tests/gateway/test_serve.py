"""The server as a process: its exit code, its one line when something is wrong, and signals."""

import json
import os
import pty
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.gateway.commands.running import Terminal

ROOT = Path(__file__).parents[2]
SERVE = """
import sys
from contextlib import asynccontextmanager
from core import EngineConfig
from gateway.backends.scripted import Script, ScriptedBackend
from gateway.config import ServerConfig
from gateway.lifespan import serve

script = Script(deltas=("x",) * int(sys.argv[2]), every_s=0.01)

@asynccontextmanager
async def open_backend(config):
    yield ScriptedBackend(script)

config = ServerConfig(engine=EngineConfig(checkpoint="none"), port=int(sys.argv[1]), log_format="json",
                      drain_timeout_s=float(sys.argv[3]))
sys.exit(serve(config, open_backend=open_backend))
"""
SERVE_MODEL = """
import sys
from core import EngineConfig
from gateway.config import ServerConfig
from gateway.lifespan import serve

sys.exit(serve(ServerConfig(engine=EngineConfig(checkpoint=sys.argv[1]), port=0)))
"""


@contextmanager
def process(
    *, port: int = 0, num_deltas: int = 3, drain_timeout_s: float = 30.0
) -> Iterator["subprocess.Popen[str]"]:
    arguments = [sys.executable, "-c", SERVE, str(port), str(num_deltas), str(drain_timeout_s)]
    with subprocess.Popen(arguments, cwd=ROOT, stderr=subprocess.PIPE, text=True) as running:
        try:
            yield running
        finally:
            running.kill()


@contextmanager
def at_terminal(*, level: str, log_format: str = "auto", num_deltas: int = 3) -> Iterator[Terminal]:
    """The same server with its three streams at a pseudo terminal."""
    options = f'drain_timeout_s=30.0, log_level="{level}"'
    code = SERVE.replace('"json"', repr(log_format)).replace("drain_timeout_s=float(sys.argv[3])", options)
    ours, theirs = pty.openpty()
    arguments = [sys.executable, "-c", code, "0", str(num_deltas)]
    with subprocess.Popen(arguments, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs) as running:
        os.close(theirs)
        try:
            yield Terminal(running, ours)
        finally:
            running.kill()
            os.close(ours)


@pytest.mark.parametrize("level", ["info", "warning", "error"])
def test_a_person_at_a_terminal_is_told_where_the_server_is_and_how_to_stop_it(level: str) -> None:
    with at_terminal(level=level, num_deltas=1_000_000) as terminal:
        terminal.wait_for("tidegate: ready at ")
        url = terminal.wait_for("/v1 ").removesuffix("/v1 ")
        terminal.wait_for("with the model scripted; Ctrl-C stops, twice stops at once\r\n")
        with open_stream(url) as response:
            assert response.readline().startswith(b"data: ")
            terminal.process.send_signal(signal.SIGINT)  # the pseudo terminal is nobody's controlling one
            terminal.wait_for("tidegate: finishing 1 request, 30 s at most; Ctrl-C again stops at once\r\n")
            terminal.process.send_signal(signal.SIGINT)
            response.read()
        assert terminal.wait() == 0


def test_a_log_for_machines_stays_one_at_a_terminal() -> None:
    with at_terminal(level="info", log_format="json") as terminal:
        said = terminal.wait_for('"server_ready"')
        terminal.process.send_signal(signal.SIGINT)
        said += terminal.wait_for('"server_stopped"')
        assert "Ctrl-C" not in said
        assert terminal.wait() == 0


def url_of(running: "subprocess.Popen[str]") -> str:
    """Read the log up to the line that says where the server is."""
    assert running.stderr is not None
    for line in running.stderr:
        fields = json.loads(line)
        if fields["event"] == "server_ready":
            return str(fields["url"])
    raise AssertionError("the server ended before it was ready")


def open_stream(url: str) -> "urllib.request._UrlopenRet":
    body = {"model": "scripted", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=20)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_running_streams_finish_and_exits_with_0(number: signal.Signals) -> None:
    with process(num_deltas=40) as running:
        with open_stream(url_of(running)) as response:
            assert response.readline().startswith(b"data: ")
            running.send_signal(number)
            rest = response.read()
        assert rest.count(b'"content":"x"') == 40
        assert rest.endswith(b"data: [DONE]\n\n")
        assert running.wait(20) == 0


def test_a_stream_that_outlives_the_drain_gets_an_error_event_and_the_exit_code_is_0() -> None:
    with process(num_deltas=1_000_000, drain_timeout_s=0.2) as running:
        with open_stream(url_of(running)) as response:
            assert response.readline().startswith(b"data: ")
            running.send_signal(signal.SIGTERM)
            last = response.read().rstrip().rpartition(b"data: ")[2]
        assert json.loads(last)["error"]["code"] == "draining"
        assert running.wait(20) == 0


def test_a_busy_port_is_one_line_and_exit_code_1() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with process(port=port) as running:
            _, said = running.communicate(timeout=20)
            assert running.returncode == 1
    assert said.count("\n") == 1
    assert f"127.0.0.1:{port}" in said
    assert "in use" in said
    assert "--port" in said


@pytest.mark.parametrize("content", [None, b"", b"GGUF", b"not a model" * 100])
def test_a_missing_or_broken_model_is_one_line_and_exit_code_1(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "model.gguf"
    if content is not None:
        path.write_bytes(content)
    done = subprocess.run(
        [sys.executable, "-c", SERVE_MODEL, str(path)],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 1
    said = [line for line in done.stderr.splitlines() if not line.startswith("{")]
    assert len(said) == 1, done.stderr
    assert str(path) in said[0]
    assert "Traceback" not in done.stderr
