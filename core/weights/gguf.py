"""GGUF model files, memory-mapped and checked in full when opened. Torch-free."""

import mmap
import os
import stat
from contextlib import suppress
from typing import Final

from core.errors import CheckpointError
from core.weights.checkpoint import MetadataValue, TensorInfo
from core.weights.gguf_header import HeaderReader


class GGUFCheckpoint:
    """An open GGUF file. Made by `open_gguf`, ended by `close()`.

    The file must not shrink while it is open: touching a page that is gone ends the process.
    """

    def __init__(
        self,
        mapping: mmap.mmap,
        path: str,
        *,
        metadata: dict[str, MetadataValue],
        tensors: dict[str, TensorInfo],
        data_offset: int,
    ) -> None:
        self.path: Final = path
        self.metadata: Final = metadata
        self.tensors: Final = tensors
        self.file_bytes: Final = len(mapping)
        self._mapping = mapping
        self._view = memoryview(mapping)
        self._drop(0, data_offset)  # the header has been read

    def raw(self, name: str) -> memoryview:
        """Return the tensor's bytes, read-only and without a copy.

        Raises:
            CheckpointError: there is no tensor of that name.
        """
        tensor = self._find(name)
        return self._view[tensor.offset : tensor.offset + tensor.nbytes]

    def drop_pages(self, name: str) -> None:
        """Give the tensor's pages back to the system; they are read again when touched."""
        tensor = self._find(name)
        self._drop(tensor.offset, tensor.nbytes)

    def close(self) -> None:
        """Let go of the file. Views that were handed out stay valid until they are dropped."""
        self._view.release()
        with suppress(BufferError):  # somebody still looks: the last view ends the mapping instead
            self._mapping.close()
        del self._mapping

    def _find(self, name: str) -> TensorInfo:
        tensor = self.tensors.get(name)
        if tensor is None:
            raise CheckpointError(self.path, f"there is no tensor {name!r} among its {len(self.tensors)}")
        return tensor

    def _drop(self, offset: int, nbytes: int) -> None:
        # Pages shared with a neighbour go too: they are clean and come back from the page cache.
        start = offset // mmap.PAGESIZE * mmap.PAGESIZE
        nbytes = min(offset + nbytes, len(self._mapping)) - start
        if nbytes > 0 and hasattr(mmap, "MADV_DONTNEED"):
            self._mapping.madvise(mmap.MADV_DONTNEED, start, nbytes)


def open_gguf(path: str) -> GGUFCheckpoint:
    """Map a GGUF file and check all of its structure against its real size. Reads no tensor data.

    Raises:
        CheckpointError: the file is missing, unreadable, truncated or lying; names field, offset and sizes.
        UnsupportedModel: a version or tensor type that is not built; lists those that are.
    """
    mapping = _map(path)
    try:
        reader = HeaderReader(mapping, path)
        metadata = reader.metadata()
        tensors, data_offset = reader.tensors()
    except CheckpointError:
        mapping.close()
        raise
    return GGUFCheckpoint(mapping, path, metadata=metadata, tensors=tensors, data_offset=data_offset)


def read_checkpoint_metadata(path: str) -> dict[str, MetadataValue]:
    """Return a model file's metadata alone (tokenizer, template, sizes), leaving the file closed.

    Raises:
        CheckpointError, UnsupportedModel: as `open_gguf`; tensors are not looked at.
    """
    with _map(path) as mapping:
        return HeaderReader(mapping, path).metadata()


def _map(path: str) -> mmap.mmap:
    """Map a regular, non-empty file read-only, or say in one line why not."""
    try:
        # Non-blocking, so that a pipe is refused instead of waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise CheckpointError(path, "there is no such file; give the path of a .gguf file") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise CheckpointError(path, f"cannot be opened: {reason}") from None
    try:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise CheckpointError(path, "is a directory; give the path of a .gguf file inside it")
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(path, "is not a regular file; give the path of a .gguf file")
        if status.st_size == 0:
            raise CheckpointError(path, "is empty (0 bytes); download or copy it again")
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise CheckpointError(path, f"cannot be mapped into memory: {error}") from None
    finally:
        os.close(descriptor)
