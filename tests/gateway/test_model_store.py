"""Fetching, checking and keeping models: with the real pip, from a folder instead of the network."""

import hashlib
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections import namedtuple
from pathlib import Path

import msgspec
import pytest

from gateway.model_store import (
    DEFAULT_MODEL,
    ModelUnavailable,
    PackagedModel,
    cache_folder,
    cached_model,
    pull,
)

CONTENT = bytes(range(256)) * 8192


def nobody_listens(what: str, done: int, total: int) -> None:
    assert 0 <= done <= total, what


@pytest.fixture
def model(tmp_path, monkeypatch) -> PackagedModel:
    """A two-megabyte model in a wheel that pip finds in a folder, and only there."""
    index = tmp_path / "index"
    index.mkdir()
    wheel = index / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", CONTENT)
        archive.writestr(
            "tiny_model-1.0.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: never-fetched\n",
        )
        archive.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return PackagedModel(
        model_id="tiny",
        package="tiny-model",
        version="1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        member="tiny_model/tiny.gguf",
        file_sha256=hashlib.sha256(CONTENT).hexdigest(),
        file_bytes=len(CONTENT),
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "models"


def refusal(model: PackagedModel, folder: Path) -> str:
    with pytest.raises(ModelUnavailable) as caught:
        pull(model, report=nobody_listens, folder=folder)
    message = str(caught.value)
    assert "\n" not in message
    return message


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {".lock"}


def test_a_pulled_model_is_whole_and_nothing_else_is_left(model, folder):
    stages = []
    path = pull(model, report=lambda what, _done, _total: stages.append(what), folder=folder)
    assert path == folder / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert names_in(folder) == {"tiny.gguf", "tiny.gguf.verified"}
    assert stages[-1] == "unpacking"
    assert cached_model(model, folder=folder) == path


def test_a_model_that_is_there_is_not_fetched_again(model, folder, monkeypatch):
    path = pull(model, report=nobody_listens, folder=folder)
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder / "nowhere"))
    assert pull(model, report=nobody_listens, folder=folder) == path


def test_a_model_is_hashed_once_and_again_only_when_it_was_touched(model, folder):
    path = pull(model, report=nobody_listens, folder=folder)
    # Same size and time with other bytes: only a second hashing could tell, and there is none.
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    path.write_bytes(CONTENT[::-1])
    os.utime(path, ns=times)
    assert cached_model(model, folder=folder) == path
    os.utime(path, ns=(times[0], times[1] + 1_000_000))
    assert cached_model(model, folder=folder) is None


def test_a_touched_but_sound_model_is_used_and_remembered(model, folder):
    path = pull(model, report=nobody_listens, folder=folder)
    stamp = folder / "tiny.gguf.verified"
    stamp.write_text("not json")
    assert cached_model(model, folder=folder) == path
    assert b"mtime_ns" in stamp.read_bytes()


@pytest.mark.parametrize("damage", [b"", CONTENT[:-1], CONTENT[:-1] + b"\0"])
def test_a_damaged_model_is_fetched_again(model, folder, damage):
    path = pull(model, report=nobody_listens, folder=folder)
    path.write_bytes(damage)
    (folder / "tiny.gguf.verified").unlink()
    assert cached_model(model, folder=folder) is None
    assert pull(model, report=nobody_listens, folder=folder).read_bytes() == CONTENT


def test_a_wheel_with_other_bytes_is_refused_and_nothing_is_kept(model, folder):
    lying = msgspec.structs.replace(model, wheel_sha256="0" * 64)
    message = refusal(lying, folder)
    assert f"has sha256 {model.wheel_sha256}, expected {'0' * 64}" in message
    assert "give the path of a .gguf file" in message
    assert names_in(folder) == set()


def test_a_package_that_is_not_there_is_said_in_one_line(model, folder):
    message = refusal(msgspec.structs.replace(model, version="2.0"), folder)
    assert message.startswith(
        "tiny-model 2.0 could not be downloaded (pip said: No matching distribution found"
    )
    assert "check the network" in message
    assert names_in(folder) == set()


def test_a_python_without_pip_is_told_how_to_get_it(model, folder, monkeypatch, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert "-m ensurepip`, or give the path of a .gguf file" in refusal(model, folder)


def test_too_little_room_is_said_before_anything_is_fetched(model, folder, monkeypatch):
    usage = namedtuple("usage", "total used free")  # noqa: PYI024  # the shape of shutil's own answer
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(100 << 20, 90 << 20, 10 << 20))
    message = refusal(model, folder)
    assert "has 10 MiB free and tiny needs 20 MiB" in message
    assert "TIDEGATE_CACHE" in message


def test_a_cache_that_cannot_be_made_is_said_in_one_line(model, tmp_path):
    (tmp_path / "file").write_text("in the way")
    message = refusal(model, tmp_path / "file" / "models")
    assert "tiny cannot be kept in" in message
    assert "TIDEGATE_CACHE" in message


def test_two_pulls_at_once_fetch_once(model, folder):
    stages: list[list[str]] = [[], []]
    threads = [
        threading.Thread(
            target=pull,
            args=(model,),
            kwargs={"report": lambda what, *_, log=log: log.append(what), "folder": folder},
        )
        for log in stages
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cached_model(model, folder=folder)
    assert sum("unpacking" in log for log in stages) == 1


def test_what_a_killed_pull_left_behind_is_removed_by_the_next(model, folder):
    (folder / ".pull-dead").mkdir(parents=True)
    (folder / ".pull-dead" / "half.whl").write_bytes(b"half")
    pull(model, report=nobody_listens, folder=folder)
    assert names_in(folder) == {"tiny.gguf", "tiny.gguf.verified"}


def test_an_interrupted_pull_ends_pip_and_leaves_nothing(model, folder):
    def interrupt(what: str, _done: int, _total: int) -> None:
        raise KeyboardInterrupt(what)

    with pytest.raises(KeyboardInterrupt):
        pull(model, report=interrupt, folder=folder)
    assert names_in(folder) == set()


def test_the_cache_is_where_the_user_or_the_desktop_says(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert cache_folder({"TIDEGATE_CACHE": "/c", "XDG_CACHE_HOME": "/x"}) == Path("/c")
    assert cache_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/tidegate")
    assert cache_folder({"XDG_CACHE_HOME": "relative"}) == Path("/home/me/.cache/tidegate")
    assert cache_folder({}) == Path("/home/me/.cache/tidegate")


def test_the_default_model_is_the_one_that_is_described(default_model_path):
    assert default_model_path.stat().st_size == DEFAULT_MODEL.file_bytes
    with default_model_path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == DEFAULT_MODEL.file_sha256
