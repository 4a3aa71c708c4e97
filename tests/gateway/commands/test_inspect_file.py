"""`tidegate inspect`: what a checkpoint holds and what of it fits, without torch."""

import json
import re
import subprocess

import pytest

from core import CheckpointSummary
from gateway.commands.inspect_file import session_fits, size
from tests.fakes.gguf_writer import write_gguf
from tests.fakes.tiny_llama import write_tiny_llama
from tests.gateway.commands.running import clean_environment, command, tidegate


def test_the_default_model_is_described(default_model_path):
    result = tidegate("inspect", str(default_model_path))
    assert (result.returncode, result.stderr) == (0, "")
    lines = {line[:13].strip(): line[14:] for line in result.stdout.splitlines() if line[:13].strip()}
    assert lines["architecture"] == "llama (served here)"
    assert lines["layers"] == "30, width 576"
    assert lines["heads"] == "9 query, 3 key/value, width 64"
    assert lines["context"] == "8192 tokens"
    assert lines["template"] == "has a chat template"
    assert lines["KV"].startswith("22.5 KiB per token")
    assert re.search(r"8192 tokens: \d+ sessions by default, \d+ at most\n", result.stdout)
    assert "longer than the context of 8192" in result.stdout


def test_json_says_the_same_in_numbers(default_model_path):
    result = tidegate("inspect", "--json", str(default_model_path))
    assert (result.returncode, result.stderr) == (0, "")
    document = json.loads(result.stdout)
    assert document["kv_bytes_per_token"] == 2 * 30 * 3 * 64 * 2
    assert document["file_bytes"] == default_model_path.stat().st_size
    assert document["types"]["Q4_1"]["num_tensors"] == 210
    assert [fit["tokens"] for fit in document["sessions"]] == [4096, 8192, 32768]
    assert [fit["within_context"] for fit in document["sessions"]] == [True, True, False]
    assert sum(stored["num_bytes"] for stored in document["types"].values()) == document["num_weight_bytes"]


def test_sessions_are_counted_in_whole_blocks(tmp_path):
    summary = CheckpointSummary.read(str(write_tiny_llama(tmp_path / "tiny.gguf")))
    per_token = summary.kv_bytes_per_token
    assert per_token is not None
    for fit in session_fits(summary):
        assert fit.by_default * fit.tokens * per_token <= summary.host.default_kv_bytes
        assert (fit.by_default + 1) * fit.tokens * per_token > summary.host.default_kv_bytes
        assert fit.within_context == (fit.tokens <= 1024)


def test_what_a_file_does_not_say_is_called_unknown(tmp_path):
    path = write_gguf(tmp_path / "odd.gguf", {"general.architecture": "odd\x1b[31m"})
    result = tidegate("inspect", str(path))
    assert result.returncode == 0
    assert "odd?[31m (not served here: " in result.stdout
    assert "unknown, width unknown" in result.stdout
    assert "the file does not say enough" in result.stdout
    assert "\x1b" not in result.stdout


@pytest.mark.parametrize("content", [None, b"", b"GGUF\3\0\0\0", b"PK\3\4 and so on"])
def test_a_file_that_is_no_use_ends_in_one_line(tmp_path, content):
    path = tmp_path / "model.gguf"
    if content is not None:
        path.write_bytes(content)
    result = tidegate("inspect", str(path))
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith(f"tidegate: {path}: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--version"], ["inspect", "MODEL"]])
def test_torch_is_never_imported(tmp_path, arguments):
    path = write_tiny_llama(tmp_path / "tiny.gguf")
    words = [str(path) if word == "MODEL" else word for word in arguments]
    python, *rest = command(*words)
    done = subprocess.run(
        [python, "-X", "importtime", *rest],
        env=clean_environment({}), capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if "|" in line}
    assert "gateway.cli" in imported
    assert not {name for name in imported if name.split(".")[0] in {"torch", "numpy", "tokenizers"}}


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536 << 20, "1.5 GiB"), (3 << 40, "3.0 TiB")],
)
def test_sizes_read_well(num_bytes, text):
    assert size(num_bytes) == text
