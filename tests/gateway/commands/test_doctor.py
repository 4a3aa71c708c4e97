"""`tidegate doctor`: what is found, what follows, and the exit code."""

import json
import socket

import pytest

from core.quantization.kernels import linear_kernels
from tests.gateway.commands.running import tidegate


def checks_of(*arguments: str, **environment: str) -> tuple[int, dict[str, dict[str, str]]]:
    result = tidegate("doctor", "--json", *arguments, stdin=b"", **environment)
    assert result.stderr == ""
    document = json.loads(result.stdout)
    assert document["healthy"] == (result.returncode == 0)
    return result.returncode, {check["name"]: check for check in document["checks"]}


def test_a_machine_that_can_serve_is_told_so_and_why(default_model_path, tmp_path):
    code, checks = checks_of(
        *("--port", "0", "--model", str(default_model_path), "--threads", "1"), TIDEGATE_CACHE=str(tmp_path)
    )
    assert code == 0, checks
    assert {f"kernel {name}" for name in linear_kernels()} < checks.keys()
    assert checks["kernel int8_packed"]["why"].startswith("works, row-invariant with")
    assert checks["numerics"]["found"] == "stable"
    assert checks["cores"]["why"] == "1 compute threads: num_threads says so"
    assert checks["model"]["found"] == str(default_model_path)
    assert "KV pool" in checks["memory"]["why"]
    assert checks["packed cache"]["found"] == f"{tmp_path / 'packed'}: 0 files, 0 B"
    assert checks["port"]["why"] == "free"


def test_everything_that_would_fail_is_a_problem(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libtorch.so is not there')\n")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, checks = checks_of(
            *("--port", str(port), "--model", str(tmp_path / "no.gguf")), PYTHONPATH=str(tmp_path)
        )
    assert code == 1
    problems = {name for name, check in checks.items() if check["status"] == "problem"}
    assert problems == {"torch", "model", "port"}
    assert "libtorch.so is not there" in checks["torch"]["found"]
    assert "there is no such file" in checks["model"]["found"]
    assert "in use" in checks["port"]["why"]


def test_a_model_not_yet_fetched_is_a_note_not_a_problem(tmp_path):
    result = tidegate("doctor", "--port", "0", TIDEGATE_CACHE=str(tmp_path))
    assert result.returncode == 0, result.stdout
    assert "note     model" in result.stdout
    assert "the first start fetches" in result.stdout
    assert result.stdout.endswith("this machine can serve\n")


def test_a_model_of_the_hub_is_a_note_and_nothing_is_fetched(tmp_path):
    code, checks = checks_of(
        *("--port", "0", "--model", "some-org/some-model"), HF_HUB_OFFLINE="1", TIDEGATE_CACHE=str(tmp_path)
    )
    assert code == 0
    assert (checks["model"]["status"], checks["model"]["found"]) == ("note", "some-org/some-model")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--port", "x"], "--port is 'x'; it must be a whole number"),
        (["--config", "/nope.toml"], "/nope.toml: cannot be read: No such file or directory"),
    ],
)
def test_a_wrong_option_ends_in_one_line(arguments, line):
    result = tidegate("doctor", *arguments)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith(f"tidegate: {line}")
    assert result.stderr.count("\n") == 1
