"""The front part of a GGUF file: metadata and tensor descriptions, read from untrusted bytes.

    magic "GGUF" | version u32 | tensor count u64 | metadata count u64
    metadata:  key string | type u32 | value
    tensors:   name string | number of dimensions u32 | dimensions u64... | type u32 | offset u64
    padding to general.alignment, then the tensors' data

Nothing is believed: every length, count, type and offset is compared with the bytes there are
before anything of that size is made.

Source: the GGUF specification, version 3 (ggml, docs/gguf.md).
"""

import struct
from mmap import mmap
from typing import NoReturn

from core.errors import CheckpointError, UnsupportedModel
from core.weights.checkpoint import MetadataValue, TensorInfo
from core.weights.mapped_file import shown_start

DEFAULT_ALIGNMENT = 32
MAX_ARRAY_DEPTH = 4
MAX_KEY_BYTES = 65535
MAX_NAME_BYTES = 1024
MIN_METADATA_BYTES = 8 + 1 + 4 + 1  # key length, one letter, type, the smallest value
MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8  # name, one dimension, type, offset

TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    8: ("Q8_0", 32, 34),
    30: ("BF16", 1, 2),
}
"""Type number -> name, elements per block, bytes per block."""

REFUSED_TENSOR_TYPES = {
    6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K",
    16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S",
    23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0",
    35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
"""Types of the format that have no kernel here, known by name so that the refusal can say it."""

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
"""Metadata value type -> struct letter."""
BOOL, STRING, ARRAY, UINT32 = 7, 8, 9, 4
MIN_ELEMENT_BYTES = {kind: struct.calcsize("<" + letter) for kind, letter in SCALARS.items()} | {
    BOOL: 1,
    STRING: 8,
    ARRAY: 12,
}

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


class HeaderReader:
    """A cursor over a mapped file. Used once, front to back: `metadata()`, then `tensors()`."""

    def __init__(self, data: mmap, path: str) -> None:
        self._data = data
        self._path = path
        self._size = len(data)
        self._at = 0
        self._num_tensors = 0
        self._alignment = DEFAULT_ALIGNMENT

    def metadata(self) -> dict[str, MetadataValue]:
        """Read magic, version, counts and all metadata.

        Raises:
            CheckpointError, UnsupportedModel: naming the field, its offset, what it needs and what there is.
        """
        self._read_version()
        self._num_tensors = self._count("tensor count")
        num_entries = self._count("metadata count")
        self._need(num_entries * MIN_METADATA_BYTES, f"metadata count {num_entries}")
        self._need(self._num_tensors * MIN_TENSOR_BYTES, f"tensor count {self._num_tensors}")
        result: dict[str, MetadataValue] = {}
        for index in range(num_entries):
            start = self._at
            key = self._string(f"key of metadata entry {index}", max_bytes=MAX_KEY_BYTES)
            if not key:
                self._fail(f"key of metadata entry {index} at offset {start} is empty")
            if key in result:
                self._fail(f"metadata key {key!r} at offset {start} stands there twice")
            kind = self._u32(f"type of {key!r}")
            value_at = self._at
            result[key] = self._value(kind, key, depth=0)
            if key == "general.alignment":
                self._alignment = self._checked_alignment(kind, result[key], at=value_at)
        return result

    def tensors(self) -> tuple[dict[str, TensorInfo], int]:
        """Read all tensor descriptions after `metadata()`; return them and where the data starts.

        Raises:
            CheckpointError, UnsupportedModel: as `metadata()`.
        """
        found: dict[str, TensorInfo] = {}
        starts: dict[str, int] = {}
        for index in range(self._num_tensors):
            start = self._at
            tensor = self._tensor(index)
            if tensor.name in found:
                self._fail(f"tensor name {tensor.name!r} at offset {start} stands there twice")
            found[tensor.name] = tensor
            starts[tensor.name] = start
        data_offset = -(-self._at // self._alignment) * self._alignment
        placed = {
            tensor.name: TensorInfo(
                tensor.name, tensor.ggml_type, tensor.shape, data_offset + tensor.offset, tensor.nbytes
            )
            for tensor in found.values()
        }
        self._check_places(placed, starts)
        return placed, data_offset

    def _read_version(self) -> None:
        magic = self._data[:4]
        if magic != b"GGUF":
            self._fail(
                f'is not a GGUF file: it starts with {shown_start(magic)} and should start with "GGUF"; '
                "give the path of a .gguf file, or of a folder with config.json and model.safetensors"
            )
        self._at = 4
        version = self._u32("version")
        if version in (2, 3):
            return
        if version == 1:
            self._refuse("is GGUF version 1; supported: 2, 3. Convert it again with a current converter")
        swapped = int.from_bytes(version.to_bytes(4, "big"), "little")
        if swapped in (1, 2, 3):
            self._refuse(
                f"is a big-endian GGUF file (version {swapped}); supported: little-endian, version 2 or 3"
            )
        self._refuse(f"is GGUF version {version} (offset 4); supported: 2, 3")

    def _value(self, kind: int, field: str, *, depth: int) -> MetadataValue:
        if kind in SCALARS:
            return self._scalars(SCALARS[kind], 1, field=field)[0]
        if kind == BOOL:
            return self._bools(1, field)[0]
        if kind == STRING:
            return self._string(field)
        if kind == ARRAY:
            return self._array(field, depth=depth + 1)
        self._fail(f"{field!r} at offset {self._at} has value type {kind}; known types are 0 to 12")

    def _array(self, field: str, *, depth: int) -> list[MetadataValue]:
        start = self._at
        if depth > MAX_ARRAY_DEPTH:
            self._fail(f"{field!r} at offset {start} nests arrays more than {MAX_ARRAY_DEPTH} deep")
        kind = self._u32(f"element type of {field!r}")
        count = self._count(f"length of {field!r}")
        if kind not in MIN_ELEMENT_BYTES:
            self._fail(f"{field!r} at offset {start} has element type {kind}; known types are 0 to 12")
        self._need(count * MIN_ELEMENT_BYTES[kind], f"{field!r}, an array of {count} elements,")
        if kind in SCALARS:
            return self._scalars(SCALARS[kind], count, field=field)
        if kind == BOOL:
            return self._bools(count, field)
        if kind == STRING:
            return self._strings(count, field)
        return [self._array(field, depth=depth + 1) for _ in range(count)]

    def _scalars(self, letter: str, count: int, *, field: str) -> list[MetadataValue]:
        num_bytes = struct.calcsize("<" + letter) * count
        self._need(num_bytes, f"{field!r}")
        values = struct.unpack_from(f"<{count}{letter}", self._data, self._at)
        self._at += num_bytes
        return list(values)

    def _bools(self, count: int, field: str) -> list[MetadataValue]:
        self._need(count, f"{field!r}")
        raw = self._data[self._at : self._at + count]
        if raw.translate(None, b"\0\1"):
            self._fail(f"{field!r} at offset {self._at} holds a truth value that is neither 0 nor 1")
        self._at += count
        return [byte == 1 for byte in raw]

    def _strings(self, count: int, field: str) -> list[MetadataValue]:
        """As `_string`, `count` times, written flat: vocabularies have hundreds of thousands."""
        data, size, at, unpack = self._data, self._size, self._at, _U64.unpack_from
        result: list[MetadataValue] = []
        for index in range(count):
            start = at + 8
            end = start + unpack(data, at)[0] if start <= size else size + 1
            if end > size:
                self._at = at
                self._string(f"element {index} of {field!r}")
            try:
                result.append(data[start:end].decode())
            except UnicodeDecodeError:
                self._fail(f"element {index} of {field!r} at offset {start} is not UTF-8")
            at = end
        self._at = at
        return result

    def _string(self, field: str, *, max_bytes: int | None = None) -> str:
        length = self._count(f"length of {field}")
        if max_bytes is not None and length > max_bytes:
            self._fail(
                f"{field} at offset {self._at - 8} has {length} bytes; at most {max_bytes} are allowed"
            )
        self._need(length, field)
        start, self._at = self._at, self._at + length
        try:
            return self._data[start : self._at].decode()
        except UnicodeDecodeError:
            self._fail(f"{field} at offset {start} is not UTF-8")

    def _tensor(self, index: int) -> TensorInfo:
        """Read one description. Its offset still counts from the start of the data."""
        start = self._at
        name = self._string(f"name of tensor {index}", max_bytes=MAX_NAME_BYTES)
        if not name:
            self._fail(f"name of tensor {index} at offset {start} is empty")
        num_dims = self._u32(f"number of dimensions of tensor {name!r}")
        if not 1 <= num_dims <= 4:
            self._fail(f"tensor {name!r} at offset {start} has {num_dims} dimensions; 1 to 4 are allowed")
        dims = [self._count(f"dimension {i} of tensor {name!r}") for i in range(num_dims)]
        if min(dims) < 1:
            self._fail(f"tensor {name!r} at offset {start} has dimensions {dims}; each must be at least 1")
        type_at = self._at
        kind = self._u32(f"type of tensor {name!r}")
        offset = self._count(f"offset of tensor {name!r}")
        if kind not in TENSOR_TYPES:
            self._refuse_type(kind, name, at=type_at)
        type_name, block, block_bytes = TENSOR_TYPES[kind]
        if dims[0] % block:
            self._fail(
                f"tensor {name!r} at offset {start} has rows of {dims[0]} elements; "
                f"type {type_name} needs a multiple of {block}"
            )
        num_blocks = dims[0] // block
        for size in dims[1:]:
            num_blocks *= size
        return TensorInfo(name, type_name, tuple(reversed(dims)), offset, num_blocks * block_bytes)

    def _check_places(self, tensors: dict[str, TensorInfo], starts: dict[str, int]) -> None:
        """Every tensor is aligned, inside the file and apart from every other."""
        end, before = 0, ""
        for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
            described = f"tensor {tensor.name!r} (described at offset {starts[tensor.name]})"
            if tensor.offset % self._alignment:
                self._fail(
                    f"{described} starts at {tensor.offset}, which is no multiple of {self._alignment}, "
                    "the file's alignment"
                )
            if tensor.offset + tensor.nbytes > self._size:
                self._fail(
                    f"{described} needs bytes {tensor.offset} to {tensor.offset + tensor.nbytes}, "
                    f"but the file has {self._size}: it is truncated or damaged; download or copy it again"
                )
            if tensor.offset < end:
                self._fail(
                    f"{described} starts at {tensor.offset}, inside tensor {before!r}, which ends at {end}"
                )
            end, before = tensor.offset + tensor.nbytes, tensor.name

    def _checked_alignment(self, kind: int, value: MetadataValue, *, at: int) -> int:
        if kind != UINT32 or not isinstance(value, int):
            self._fail(
                f"general.alignment at offset {at} has value type {kind}; it must be {UINT32} (uint32)"
            )
        if not 8 <= value <= 65536 or value & (value - 1):
            self._fail(
                f"general.alignment at offset {at} is {value}; it must be a power of two from 8 to 65536"
            )
        return value

    def _refuse_type(self, kind: int, name: str, *, at: int) -> NoReturn:
        known = ", ".join(type_name for type_name, _, _ in TENSOR_TYPES.values())
        type_name = REFUSED_TENSOR_TYPES.get(kind, f"number {kind}")
        self._refuse(
            f"type {type_name} of tensor {name!r} at offset {at} is not supported; supported: {known}"
        )

    def _u32(self, field: str) -> int:
        self._need(4, field)
        value: int = _U32.unpack_from(self._data, self._at)[0]
        self._at += 4
        return value

    def _count(self, field: str) -> int:
        self._need(8, field)
        value: int = _U64.unpack_from(self._data, self._at)[0]
        self._at += 8
        return value

    def _need(self, num_bytes: int, field: str) -> None:
        if num_bytes > self._size - self._at:
            self._fail(
                f"{field} at offset {self._at} needs {num_bytes} bytes, but {self._size - self._at} are left "
                f"of the file's {self._size}: it is truncated or damaged; download or copy it again"
            )

    def _fail(self, problem: str) -> NoReturn:
        raise CheckpointError(self._path, problem)

    def _refuse(self, problem: str) -> NoReturn:
        raise UnsupportedModel(self._path, problem)
