"""The key-value part of a GGUF file, read the simplest way. The engine has its own, hardened reader."""

import struct
from pathlib import Path
from typing import Any

_NUMBERS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9


class _Cursor:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def number(self, code: str) -> int | float | bool:
        value: int | float | bool = struct.unpack_from(code, self._data, self._at)[0]
        self._at += struct.calcsize(code)
        return value

    def text(self) -> str:
        size = int(self.number("<Q"))
        self._at += size
        return self._data[self._at - size : self._at].decode()

    def value(self, kind: int) -> object:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            item_kind, count = int(self.number("<I")), int(self.number("<Q"))
            return [self.value(item_kind) for _ in range(count)]
        return self.number(_NUMBERS[kind])


def read_metadata(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        cursor = _Cursor(file.read(32 << 20))
    assert cursor.number("<I") == int.from_bytes(b"GGUF", "little")
    cursor.number("<I")
    cursor.number("<Q")
    count = int(cursor.number("<Q"))
    return {cursor.text(): cursor.value(int(cursor.number("<I"))) for _ in range(count)}
