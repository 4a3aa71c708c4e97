"""A cache file of packed weights, so that a second start maps them instead of packing again.

    8 bytes magic | 4 bytes header length | 4 bytes its CRC-32 | msgpack header |
    zeros to a multiple of 4096 | tensors, each at a multiple of 4096

Such a file is written under a temporary name and renamed when complete; it is never changed in
place, so a mapping stays valid even when a newer one replaces it. Its key names everything that
the bytes depend on; a file with another key, size or checksum is as good as none.
"""

import ctypes
import mmap
import os
import struct
import tempfile
import warnings
import zlib
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
from torch import Tensor

MAGIC = b"TIDEPACK"
START = struct.Struct("<II")
"""Follows the magic: the header's length and its checksum."""
ALIGNMENT = 4096
MOST_HEADER_BYTES = 16 << 20


class PackedTensor(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    crc32: int


class PackedHeader(msgspec.Struct, frozen=True):
    key: str
    num_bytes: int
    tensors: dict[str, PackedTensor]


def save_packed(path: Path, key: str, tensors: Mapping[str, Tensor]) -> bool:
    """Write the file; False where the disk or its rights do not allow it (nothing is left behind)."""
    views = {name: _bytes_of(tensor) for name, tensor in tensors.items()}
    entries: dict[str, PackedTensor] = {}
    offset = 0  # counted from the first tensor; the header's own length is not known yet
    for name, tensor in tensors.items():
        view = views[name]
        entries[name] = PackedTensor(
            str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), offset, len(view), zlib.crc32(view)
        )
        offset += _aligned(len(view))
    header = msgspec.msgpack.encode(PackedHeader(key, offset, entries))
    first = _aligned(16 + len(header))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(MAGIC + START.pack(len(header), zlib.crc32(header)) + header)
                for name, entry in entries.items():
                    file.seek(first + entry.offset)
                    file.write(views[name])
                file.truncate(first + offset)
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError:
        return False
    return True


def load_packed(path: Path, key: str) -> dict[str, Tensor] | None:
    """Map the file's tensors, or None where it is absent, of another key, cut short or damaged."""
    try:
        with path.open("rb") as file:
            start = file.read(16)
            if len(start) < 16 or start[:8] != MAGIC:
                return None
            header_bytes, header_crc32 = START.unpack(start[8:])
            raw_header = file.read(header_bytes) if header_bytes <= MOST_HEADER_BYTES else b""
            if zlib.crc32(raw_header) != header_crc32:
                return None
            header = msgspec.msgpack.decode(raw_header, type=PackedHeader)
            first = _aligned(16 + header_bytes)
            if header.key != key or os.fstat(file.fileno()).st_size != first + header.num_bytes:
                return None
            mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError, msgspec.MsgspecError):
        return None
    tensors = {}
    for name, entry in header.tensors.items():
        view = mapped[first + entry.offset : first + entry.offset + entry.num_bytes]
        if zlib.crc32(view) != entry.crc32:
            return None
        tensors[name] = readonly_tensor(view, getattr(torch, entry.dtype)).view(entry.shape)
    return tensors


def readonly_tensor(view: memoryview, dtype: torch.dtype) -> Tensor:
    """A tensor over bytes nobody writes; torch has no read-only tensors and would warn."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(view, dtype=dtype)


def _bytes_of(tensor: Tensor) -> memoryview:
    """The tensor's memory; the tensor must outlive the view."""
    assert tensor.is_contiguous()
    num_bytes = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_ubyte * num_bytes).from_address(tensor.data_ptr())).cast("B")


def _aligned(size: int) -> int:
    return size + -size % ALIGNMENT
