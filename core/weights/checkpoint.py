"""What a model file looks like to the rest of the engine, whatever its format."""

from dataclasses import dataclass
from typing import Protocol, TypeAlias

MetadataValue: TypeAlias = "int | float | bool | str | list[MetadataValue]"


@dataclass(slots=True, frozen=True)
class TensorInfo:
    """One tensor inside a model file. Nothing of its data has been read.

    Shapes: `shape` is in torch order, slowest dimension first: a linear weight is (out, in).
    Units: `offset` counts bytes from the start of the file.
    """

    name: str
    ggml_type: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def num_elements(self) -> int:
        result = 1
        for size in self.shape:
            result *= size
        return result


class Checkpoint(Protocol):
    """A memory-mapped model file, checked in full before anybody sees it."""

    @property
    def path(self) -> str: ...
    @property
    def metadata(self) -> dict[str, MetadataValue]: ...
    @property
    def tensors(self) -> dict[str, TensorInfo]: ...

    def raw(self, name: str) -> memoryview:
        """Return the tensor's bytes, read-only and without a copy.

        Raises:
            CheckpointError: there is no tensor of that name.
        """
        ...

    def drop_pages(self, name: str) -> None:
        """Give the tensor's pages back to the system; they are read again when touched."""
        ...

    def close(self) -> None:
        """Let go of the file. Views that were handed out stay valid until they are dropped."""
        ...
