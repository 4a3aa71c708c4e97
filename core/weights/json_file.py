"""JSON objects out of files that nobody vouches for. Torch-free."""

import json
import os
from pathlib import Path
from typing import NoReturn

from core.errors import CheckpointError
from core.weights.checkpoint import MetadataValue

MOST_CONFIG_BYTES = 32 << 20
"""Of `config.json` and an index; real ones have some kilobytes, an index of the largest model 10 MB."""


def read_json_file(path: Path) -> dict[str, MetadataValue]:
    """Read a small JSON object.

    Raises:
        CheckpointError: there is no such file, it is too large or holds something else.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > MOST_CONFIG_BYTES:
                raise CheckpointError(str(path), f"has {size} bytes; at most {MOST_CONFIG_BYTES} are read")
            raw = file.read(size)
    except FileNotFoundError:
        raise CheckpointError(str(path), "there is no such file; the model folder is incomplete") from None
    except OSError as error:
        raise CheckpointError(str(path), f"cannot be read: {error.strerror}") from None
    return parse_json_object(raw, path=str(path), what="the file")


def parse_json_object(raw: bytes, *, path: str, what: str) -> dict[str, MetadataValue]:
    """Parse UTF-8 bytes. Keys that stand twice are refused: readers would disagree on which one counts.

    Raises:
        CheckpointError: naming `what` it was and what is wrong.
    """

    def refuse_constant(name: str) -> NoReturn:
        raise CheckpointError(path, f"{what} holds {name}, which is not JSON")

    def unique(pairs: list[tuple[str, MetadataValue]]) -> dict[str, MetadataValue]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise CheckpointError(path, f"{what} has the key {twice!r:.80} twice")
        return result

    try:
        value = json.loads(raw.decode(), object_pairs_hook=unique, parse_constant=refuse_constant)
    except UnicodeDecodeError as error:
        raise CheckpointError(path, f"{what} is not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise CheckpointError(path, f"{what} is nested too deeply") from None
    except ValueError as error:
        raise CheckpointError(path, f"{what} is not JSON: {error!s:.200}") from None
    if not isinstance(value, dict):
        raise CheckpointError(path, f"{what} holds {type(value).__name__}, not an object")
    return value
