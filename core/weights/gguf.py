"""GGUF model files, memory-mapped and checked in full when opened. Torch-free."""

from typing import Final

from core.errors import CheckpointError
from core.weights.checkpoint import MetadataValue, TensorInfo
from core.weights.gguf_header import HeaderReader
from core.weights.mapped_file import MappedFile, map_file


class GGUFCheckpoint:
    """An open GGUF file. Made by `open_gguf`, ended by `close()`."""

    format: Final = "gguf"

    def __init__(
        self,
        file: MappedFile,
        *,
        metadata: dict[str, MetadataValue],
        tensors: dict[str, TensorInfo],
        data_offset: int,
    ) -> None:
        self.path: Final = file.path
        self.files: Final = (file.path,)
        self.metadata: Final = metadata
        self.tensors: Final = tensors
        self.file_bytes: Final = file.num_bytes
        self._file = file
        file.drop(0, data_offset)  # the header has been read

    @property
    def architecture(self) -> str:
        name = self.metadata.get("general.architecture")
        if not isinstance(name, str):
            raise CheckpointError(self.path, "metadata key 'general.architecture' is missing or no text")
        return name

    def raw(self, name: str) -> memoryview:
        """Return the tensor's bytes, read-only and without a copy.

        Raises:
            CheckpointError: there is no tensor of that name.
        """
        tensor = self._find(name)
        return self._file.bytes_at(tensor.offset, tensor.nbytes)

    def drop_pages(self, name: str) -> None:
        """Give the tensor's pages back to the system; they are read again when touched."""
        tensor = self._find(name)
        self._file.drop(tensor.offset, tensor.nbytes)

    def close(self) -> None:
        """Let go of the file. Views that were handed out stay valid until they are dropped."""
        self._file.close()

    def _find(self, name: str) -> TensorInfo:
        tensor = self.tensors.get(name)
        if tensor is None:
            raise CheckpointError(self.path, f"there is no tensor {name!r} among its {len(self.tensors)}")
        return tensor


def open_gguf(path: str) -> GGUFCheckpoint:
    """Map a GGUF file and check all of its structure against its real size. Reads no tensor data.

    Raises:
        CheckpointError: the file is missing, unreadable, truncated or lying; names field, offset and sizes.
        UnsupportedModel: a version or tensor type that is not built; lists those that are.
    """
    file = map_file(path, kind=".gguf")
    try:
        reader = HeaderReader(file.mapping, path)
        metadata = reader.metadata()
        tensors, data_offset = reader.tensors()
    except CheckpointError:
        file.close()
        raise
    return GGUFCheckpoint(file, metadata=metadata, tensors=tensors, data_offset=data_offset)


def read_gguf_metadata(path: str) -> dict[str, MetadataValue]:
    """Return a GGUF file's metadata alone (tokenizer, template, sizes), leaving the file closed.

    Raises:
        CheckpointError, UnsupportedModel: as `open_gguf`; tensors are not looked at.
    """
    file = map_file(path, kind=".gguf")
    try:
        return HeaderReader(file.mapping, path).metadata()
    finally:
        file.close()
