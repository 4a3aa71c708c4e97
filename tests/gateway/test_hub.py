"""MODEL as a user writes it: paths, folders, and names of the hub, without a network."""

import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from gateway.hub import FOLDER_FILES, default_model_id, resolve_model
from gateway.model_store import ModelUnavailable
from tests.gateway.test_hub_folder import tiny_folder
from tests.gateway.test_serve import ROOT

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def cached_repo(hub: Path, folder: Path, *, repo: str = "models--tiny--llama-0.1") -> None:
    """What `huggingface_hub` leaves on disk: files by content, a snapshot that links to them, a branch."""
    base = hub / repo
    snapshot = base / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (base / "blobs").mkdir()
    (base / "refs").mkdir()
    (base / "refs" / "main").write_text(COMMIT)
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(base / "blobs" / f"{number:064x}")
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"{number:064x}")


def offline(tmp_path: Path) -> dict[str, str]:
    return os.environ | {
        "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
        "TIDEGATE_CACHE": str(tmp_path / "cache"),
    }  # fmt: skip


def run(tmp_path: Path, *arguments: str, code: str = "") -> "subprocess.CompletedProcess[str]":
    start = f"{code}\nfrom gateway.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", start, *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False, env=offline(tmp_path),
    )  # fmt: skip


def test_a_cached_name_of_the_hub_is_served_offline(tmp_path: Path) -> None:
    cached_repo(tmp_path / "hub", tiny_folder(tmp_path / "folder"))
    command = [
        sys.executable,
        "-m",
        "gateway",
        "serve",
        "tiny/llama-0.1",
        "--port",
        "0",
        "--num-blocks",
        "32",
    ]
    command += ["--log-format", "json"]
    with subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=offline(tmp_path)
    ) as running:
        try:
            assert running.stderr is not None
            ready = next(line for line in running.stderr if "server_ready" in line)
            url = ready.partition('"url":')[2].partition('"')[2].partition('"')[0]
            with urllib.request.urlopen(f"{url}/v1/models", timeout=20) as response:
                assert b'"id":"llama-0.1"' in response.read().replace(b" ", b"")
        finally:
            running.kill()


def test_a_name_that_is_not_cached_is_one_line_that_says_what_to_do(tmp_path: Path) -> None:
    done = run(tmp_path, "serve", "tiny/nothing", "--port", "0")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "tiny/nothing on the Hugging Face hub is not in the local cache" in done.stderr


def test_without_the_extra_the_message_names_it(tmp_path: Path) -> None:
    done = run(tmp_path, "serve", "tiny/llama", code="import sys; sys.modules['huggingface_hub'] = None")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "pip install 'tidegate[hub]'" in done.stderr


def test_a_repository_without_safetensors_says_how_to_name_a_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "small.gguf").write_bytes(b"GGUF")
    cached_repo(tmp_path / "hub", tmp_path / "folder")
    done = run(tmp_path, "serve", "tiny/llama-0.1")
    assert "name one: tiny/llama-0.1:FILE.gguf" in done.stderr
    named = run(tmp_path, "serve", "tiny/llama-0.1:small.gguf", "--port", "0")
    assert "small.gguf: " in named.stderr  # found and refused by the reader: it is cut short
    absent = run(tmp_path, "serve", "tiny/llama-0.1:large.gguf")
    assert "has no file large.gguf" in absent.stderr


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("GatedRepoError", "is gated: accept its terms"),
        ("RepositoryNotFoundError", "is not there, or is private"),
        ("LocalEntryNotFoundError", "is not in the local cache"),
        ("OfflineModeIsEnabled", "is not in the local cache"),
        ("HFValidationError", "is no possible name"),
        ("HfHubHTTPError", "cannot be fetched: 503 busy"),
    ],
)
def test_each_refusal_of_the_hub_is_one_line(error, said, monkeypatch):
    import huggingface_hub
    from huggingface_hub import errors

    asked = []

    def refuse(repo: str, *, allow_patterns: list[str]) -> str:
        asked.append((repo, allow_patterns))
        kind = getattr(errors, error)
        raise kind.__new__(kind, "503 busy\nmore") if error != "HfHubHTTPError" else OSError("503 busy\nmore")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ModelUnavailable, match=said) as refusal:
        resolve_model("tiny/llama")
    assert "\n" not in str(refusal.value)
    assert asked == [("tiny/llama", list(FOLDER_FILES))]


def test_only_weights_configs_and_tokenizer_files_are_fetched():
    assert all(name.endswith((".json", ".safetensors", ".jinja")) for name in FOLDER_FILES)


def test_paths_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for name in (
        "org/name",
        "missing.gguf",
        "org/missing.gguf",
        "/no/such/folder",
        "./org/x",
        "a\0b",
        "x" * 5000,
    ):
        assert resolve_model(name) == name


def test_a_folder_with_one_gguf_file_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "one.gguf").touch()
    assert resolve_model(str(tmp_path)) == str(tmp_path / "one.gguf")
    (tmp_path / "two.gguf").touch()
    with pytest.raises(ModelUnavailable, match=r"holds several models; .*: one\.gguf, two\.gguf"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "model_id"),
    [
        ("/models/SmolLM2.Q4_1.gguf", "smollm2.q4_1"),
        ("Qwen/Qwen2.5-0.5B", "qwen2.5-0.5b"),
        ("org/name:File-Q8.gguf", "file-q8"),
        ("./folder/", "folder"),
    ],
)
def test_the_name_for_clients_is_the_last_part(name, model_id):
    assert default_model_id(name) == model_id
