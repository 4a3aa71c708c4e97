"""Files that people give us: read whole, plain or gzipped, and never trusted."""

import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from loadtest.errors import PlanInvalid

MAX_FILE_BYTES = 1 << 30
"""Unpacked: all of it is held in memory, and a gzip file of a megabyte can hold more than that."""

_T = TypeVar("_T")


def read_text(path: Path) -> str:
    """A text file, plain or gzipped.

    Raises:
        PlanInvalid: it cannot be read, is no UTF-8, or is too large.
    """
    try:
        raw = path.read_bytes()
        if raw[:2] == b"\x1f\x8b":
            with gzip.GzipFile(fileobj=io.BytesIO(raw)) as file:
                raw = file.read(MAX_FILE_BYTES + 1)
        if len(raw) > MAX_FILE_BYTES:
            raise PlanInvalid(f"{path} holds more than {MAX_FILE_BYTES} bytes")
        return raw.decode("utf-8-sig")
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise PlanInvalid(f"{path} is not a whole gzip file: {error}") from error
    except OSError as error:
        raise PlanInvalid(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise PlanInvalid(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error


def json_lines(text: str, kind: type[_T], source: str, *, first: int = 1) -> Iterator[tuple[int, _T]]:
    """Each line that is not empty, with its number; the text begins with line `first`.

    Raises:
        PlanInvalid: naming source, line and field.
    """
    decoder = msgspec.json.Decoder(kind)
    # Not splitlines(): a JSON string may hold the other signs that it takes for line ends.
    for number, line in enumerate(text.split("\n"), first):
        if not line.strip():
            continue
        try:
            value = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise PlanInvalid(f"{source}, line {number}: {error}") from error
        except RecursionError:
            raise PlanInvalid(f"{source}, line {number}: nested too deep") from None
        yield number, value
