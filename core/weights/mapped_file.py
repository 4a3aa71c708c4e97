"""A model file mapped into memory, read-only. Torch-free."""

import mmap
import os
import stat
from contextlib import suppress
from typing import Final

from core.errors import CheckpointError


class MappedFile:
    """One file's bytes. Made by `map_file`, ended by `close()`.

    The file must not shrink while it is open: touching a page that is gone ends the process.
    """

    def __init__(self, mapping: mmap.mmap, path: str) -> None:
        self.path: Final = path
        self.num_bytes: Final = len(mapping)
        self.mapping = mapping
        self._view = memoryview(mapping)

    def bytes_at(self, offset: int, nbytes: int) -> memoryview:
        """A view of the bytes, without a copy."""
        assert 0 <= offset <= offset + nbytes <= self.num_bytes, (offset, nbytes, self.num_bytes)
        return self._view[offset : offset + nbytes]

    def drop(self, offset: int, nbytes: int) -> None:
        """Give the pages back to the system; they are read again when touched."""
        # Pages shared with a neighbour go too: they are clean and come back from the page cache.
        start = offset // mmap.PAGESIZE * mmap.PAGESIZE
        nbytes = min(offset + nbytes, self.num_bytes) - start
        if nbytes > 0 and hasattr(mmap, "MADV_DONTNEED"):
            self.mapping.madvise(mmap.MADV_DONTNEED, start, nbytes)

    def close(self) -> None:
        """Let go of the file. Views that were handed out stay valid until they are dropped."""
        self._view.release()
        with suppress(BufferError):  # somebody still looks: the last view ends the mapping instead
            self.mapping.close()
        del self.mapping


def shown_start(raw: bytes) -> str:
    """A file's first bytes for people: as text where they are text, else in hexadecimal."""
    text = raw.decode("ascii", errors="replace")
    return f'"{text}"' if text.isascii() and text.isprintable() else f"the bytes {raw.hex(' ')}"


def map_file(path: str, *, kind: str) -> MappedFile:
    """Map a regular, non-empty file read-only.

    Args:
        kind: what the user should give instead, e.g. ".gguf".

    Raises:
        CheckpointError: in one line, why not.
    """
    try:
        # Non-blocking, so that a pipe is refused instead of waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise CheckpointError(path, f"there is no such file; give the path of a {kind} file") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise CheckpointError(path, f"cannot be opened: {reason}") from None
    try:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise CheckpointError(path, f"is a directory; give the path of a {kind} file inside it")
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(path, f"is not a regular file; give the path of a {kind} file")
        if status.st_size == 0:
            raise CheckpointError(path, "is empty (0 bytes); download or copy it again")
        return MappedFile(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ), path)
    except (OSError, ValueError) as error:
        raise CheckpointError(path, f"cannot be mapped into memory: {error}") from None
    finally:
        os.close(descriptor)
