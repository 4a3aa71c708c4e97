"""What a model file looks like to the rest of the engine, whatever its format."""

from dataclasses import dataclass
from typing import Protocol, TypeAlias

MetadataValue: TypeAlias = "int | float | bool | str | list[MetadataValue] | dict[str, MetadataValue] | None"


@dataclass(slots=True, frozen=True)
class TensorInfo:
    """One tensor inside a model file. Nothing of its data has been read.

    Shapes: `shape` is in torch order, slowest dimension first: a linear weight is (out, in).
    Units: `offset` counts bytes from the start of its file, which is the checkpoint's only one or
        `files[file]`.
    """

    name: str
    ggml_type: str
    """How the numbers are stored, by GGML's names: F32, F16 and BF16 mean the same everywhere."""
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    file: int = 0

    @property
    def num_elements(self) -> int:
        result = 1
        for size in self.shape:
            result *= size
        return result


class Checkpoint(Protocol):
    """A memory-mapped model, in one file or several, checked in full before anybody sees it."""

    @property
    def format(self) -> str:
        """Names the entry of `ModelSpec.stored` that reads this checkpoint."""
        ...

    @property
    def path(self) -> str: ...
    @property
    def files(self) -> tuple[str, ...]:
        """Every file that a change of the model would change."""
        ...

    @property
    def file_bytes(self) -> int: ...
    @property
    def metadata(self) -> dict[str, MetadataValue]: ...
    @property
    def tensors(self) -> dict[str, TensorInfo]: ...
    @property
    def architecture(self) -> str:
        """Raises `CheckpointError` where the checkpoint names none."""
        ...

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
