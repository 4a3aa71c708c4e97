"""Safetensors files as plain bytes, sound and lying. Torch-free."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_safetensors(path: Path) -> tuple[dict[str, Any], bytes]:
    """Header and data, the simplest way."""
    raw = path.read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def safetensors_bytes(header: Mapping[str, Any] | bytes, data: bytes, *, length: int | None = None) -> bytes:
    """A file from a header, as JSON or as raw bytes; `length` is what it claims to have."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data
