"""Builds the wheel, installs it into a fresh environment, streams one chat from it and runs the examples.

Run by `make wheel-test`. Needs the default model in the cache.
"""

import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"core", "gateway", "loadtest", "tokenization"}
READY_TIMEOUT_S = 120.0
PROMPT = "What is the capital of Germany?"


def build(folder: Path) -> Path:
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT))
    (wheel,) = folder.glob("*.whl")
    return wheel


def check_contents(wheel: Path) -> None:
    """The wheel holds the four packages with all their files, and nothing else."""
    names = set(zipfile.ZipFile(wheel).namelist())
    roots = {name.split("/")[0] for name in names}
    metadata = {root for root in roots if root.endswith(".dist-info")}
    assert len(metadata) == 1, f"one .dist-info folder was expected: {sorted(metadata)}"
    assert roots - metadata == PACKAGES, f"{sorted(roots - metadata)} instead of {sorted(PACKAGES)}"
    assert any(name.endswith("/licenses/LICENSE") for name in names), "the licence is missing"
    sources = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    missing = {path.relative_to(ROOT).as_posix() for path in sources} - names
    assert not missing, f"the wheel lacks {sorted(missing)}"


def install(wheel: Path, folder: Path) -> Path:
    venv.create(folder, with_pip=True)
    index = os.environ.get("TORCH_INDEX")
    extra = ["--extra-index-url", index] if index else []
    python = folder / "bin" / "python"
    constraints = str(ROOT / "constraints-dev.txt")
    run(
        str(python),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-compile",
        "--constraint",
        constraints,
        *extra,
        str(wheel),
    )
    return folder / "bin" / "tidegate"


@contextmanager
def serving(tidegate: Path, folder: Path) -> Iterator[int]:
    """Run the installed server away from the checkout; give its port; expect a clean end on SIGTERM."""
    log = folder / "server.log"
    with log.open("wb") as output:
        command = [str(tidegate), "serve", "--port", "0", "--log-format", "json"]
        process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output)
    try:
        yield wait_until_ready(process, log)
        process.send_signal(signal.SIGTERM)
        code = process.wait(60)
        assert code == 0, f"the server ended with {code} after SIGTERM"
    except BaseException:
        print(log.read_text(errors="replace"), file=sys.stderr)
        raise
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def wait_until_ready(process: "subprocess.Popen[bytes]", log: Path) -> int:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the server ended with {process.returncode}"
        for line in log.read_text(errors="replace").splitlines():
            entry = json.loads(line) if line.startswith("{") else {}
            if entry.get("event") == "server_ready":
                return int(entry["url"].rstrip("/").rpartition(":")[2])
        time.sleep(0.1)
    raise TimeoutError(f"the server was not ready within {READY_TIMEOUT_S:g} s")


def chat(port: int) -> str:
    """Stream one answer and return its text, checking the frame of the stream."""
    body = {
        "model": "smollm2-135m",
        "messages": [{"role": "user", "content": PROMPT}],
        "stream": True,
        "max_tokens": 24,
        "temperature": 0,
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    response = connection.getresponse()
    raw = response.read().decode()
    connection.close()
    assert response.status == 200, raw
    events = [line.removeprefix("data: ") for line in raw.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]", events[-1]
    choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    assert choices[-1]["finish_reason"] in ("stop", "length"), choices[-1]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def run_examples(port: int) -> None:
    """Each example works against the server, and says something."""
    environment = {**os.environ, "TIDEGATE_URL": f"http://127.0.0.1:{port}"}
    examples = sorted((ROOT / "examples").glob("*.py"))
    assert examples, "there are no examples"
    for example in examples:
        command = [sys.executable, str(example), PROMPT]
        said = subprocess.run(command, env=environment, check=True, capture_output=True, timeout=120).stdout
        assert said.strip(), f"{example.name} printed nothing"


def run(*command: str) -> None:
    subprocess.run(command, check=True)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="tidegate-wheel-") as name:
        folder = Path(name)
        wheel = build(folder / "dist")
        check_contents(wheel)
        tidegate = install(wheel, folder / "venv")
        with serving(tidegate, folder) as port:
            answer = chat(port)
            run_examples(port)
    assert "Berlin" in answer, f"{PROMPT!r} was answered {answer!r}"
    print(f"{wheel.name}: installed, served and answered {answer!r}")


if __name__ == "__main__":
    main()
