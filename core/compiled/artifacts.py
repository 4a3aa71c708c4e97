"""A compiled region's file: the library torch's runner loads, and behind it what it is.

    library | msgpack header | 4 bytes header length | 4 bytes its CRC-32 | 8 bytes magic

Written under a temporary name and renamed when complete, never changed in place. A loader maps only
files whose every byte is checked: half a library would end the process. One without a library says
why there is none, so that no start tries again in vain.
"""

import os
import stat
import struct
import tempfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import msgspec
from torch import Tensor
from torch._C import _aoti

MAGIC = b"TIDEAOTI"
END = struct.Struct("<II8s")
MOST_HEADER_BYTES = 1 << 20
VARIANTS = ("few", "many")
"""For at most `MOST_FEW_ROWS` rows on one thread, and for more on as many threads as torch is set to."""
MOST_FEW_ROWS = 16
CHECK_INPUTS = "AOTI_RUNTIME_CHECK_INPUTS"
"""torch's variable: compiled code then compares each call's shapes, types and strides with its own
(0.1 us a call). Without it a wrong call reads memory that is not its own."""

RunList = Callable[[Sequence[Tensor]], Sequence[Tensor]]


class ArtifactHeader(msgspec.Struct, frozen=True, kw_only=True):
    key: str
    variant: str
    num_bytes: int
    crc32: int
    problem: str = ""
    """Why there is no library."""
    bit_equal: bool = False
    """Both functions gave the same bits on all that was tried."""
    compiler: str = ""
    compile_s: float = 0.0


def artifact_path(folder: Path, stem: str, variant: str) -> Path:
    return folder / f"{stem}.{variant}.so"


def write_artifact(path: Path, library: bytes, header: ArtifactHeader) -> None:
    """Raises `OSError` where the disk or its rights do not allow it; nothing is left behind then."""
    raw = msgspec.msgpack.encode(header)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(library + raw + END.pack(len(raw), zlib.crc32(raw), MAGIC))
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_header(path: Path, key: str) -> ArtifactHeader | None:
    """What a whole and undamaged file of that key says of itself, else None."""
    try:
        content = path.read_bytes()
        length, crc32, magic = END.unpack(content[-END.size :])
        if magic != MAGIC or length > MOST_HEADER_BYTES:
            return None
        raw = content[-END.size - length : -END.size]
        header = msgspec.msgpack.decode(raw, type=ArtifactHeader) if zlib.crc32(raw) == crc32 else None
    except (OSError, struct.error, msgspec.MsgspecError):
        return None
    if header is None or header.key != key or len(content) != header.num_bytes + length + END.size:
        return None
    return header if zlib.crc32(content[: header.num_bytes]) == header.crc32 else None


def load_library(path: Path) -> RunList:
    """Raises `RuntimeError` where the system cannot load it, as from a folder mounted `noexec`."""
    os.environ.setdefault(CHECK_INPUTS, "1")
    return cast(RunList, _aoti.AOTIModelContainerRunnerCpu(str(path), 1).run)  # any sequence will do


def folder_problem(folder: Path) -> str:
    """Why libraries must not be loaded from a folder; empty: they may.

    Whoever can write there could run what they like as us.
    """
    try:
        status = folder.stat()
    except OSError as error:
        return f"{folder} cannot be used: {error.strerror}"
    if status.st_uid not in (0, os.geteuid()):
        return f"{folder} belongs to another user"
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        return f"{folder} can be written to by every user"
    return ""
