"""The contestants, started and left: Tidegate, llama.cpp's server, and OpenVINO in a process of its own."""

import json
import os
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from tests.benchmarks.claims.random_model import default_model
from tests.benchmarks.claims.serving import Server, free_port, running, serving
from tests.benchmarks.cpu.peers import BUILT, OPENVINO_MODEL, PYTHON, llama_model

NUM_THREADS = os.cpu_count() or 1
KV_BYTES_PER_TOKEN = 30 * 2 * 3 * 64 * 2
"""Of SmolLM2-135M in float16: layers, K and V, KV heads, head width, bytes."""
READY_WITHIN_S = 120.0
QUIET_CPU = 0.05
QUIET_FOR_S = 2.0
QUIET_WITHIN_S = 90.0


@contextmanager
def tidegate(
    numerics: str = "stable", *, tokens: int, model: Path | None = None, more: tuple[str, ...] = ()
) -> Iterator[Server]:
    """Ours with a KV pool for so many tokens, warm and quiet."""
    kv = str(tokens * KV_BYTES_PER_TOKEN) if model is None else ""
    size = ("--kv-bytes", kv) if kv else ("--num-blocks", str(-(-tokens // 16)))
    with serving("--numerics", numerics, *size, *more, model=str(model) if model else None) as server:
        yield server


@contextmanager
def llama_server(
    form: str, *, slots: int, context: int, model: Path | None = None, more: tuple[str, ...] = ()
) -> Iterator[Server]:
    """llama.cpp's with so many slots of so much context each, its prompt cache on."""
    port = free_port()
    command = [
        str(BUILT / "llama-server"), "--model", str(model or llama_model(form)), "--host", "127.0.0.1",
        "--port", str(port), "--parallel", str(slots), "--ctx-size", str(slots * context),
        "--threads", str(NUM_THREADS), "--cache-prompt", *more,
    ]  # fmt: skip
    with running(command, port, ready="/health", within_s=READY_WITHIN_S) as server:
        yield server


class OpenVINO:
    """Generates in process: what it takes has no HTTP in it."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.pid = process.pid

    def generate(self, *, prompt_tokens: int, answer_tokens: int, streams: int) -> float:
        """Seconds for so many answers, asked for at once."""
        answer = self.tell(
            {"prompt_tokens": prompt_tokens, "answer_tokens": answer_tokens, "streams": streams}
        )
        assert answer["tokens"] == answer_tokens * streams, answer
        return float(answer["seconds"])

    def tell(self, ask: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(ask) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


@contextmanager
def openvino() -> Iterator[OpenVINO]:
    child = Path(__file__).with_name("openvino_child.py")
    command = [str(PYTHON), str(child), str(OPENVINO_MODEL), str(NUM_THREADS)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            yield OpenVINO(process)
        finally:
            process.terminate()


def family(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def wait_until_quiet(pid: int) -> bool:
    """Until the idle server computes nothing: it may be compiling. False where it never became so."""
    deadline = time.monotonic() + QUIET_WITHIN_S
    while time.monotonic() < deadline:
        before = cpu_s(pid)
        time.sleep(QUIET_FOR_S)
        if cpu_s(pid) - before < QUIET_CPU * QUIET_FOR_S:
            return True
    return False


def cpu_s(pid: int) -> float:
    return float(sum(sum(process.cpu_times()[:2]) for process in family(pid)))


def pss_bytes(processes: Iterable[psutil.Process]) -> int:
    """Of processes together; what they share counts once."""
    total = 0
    for process in processes:
        text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
        total += sum(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:"))
    return total


def model_bytes() -> int:
    return default_model().stat().st_size
