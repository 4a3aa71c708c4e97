"""Model files. `Checkpoint` is the contract; each format is one file here. Torch-free up to `loading`."""

from pathlib import Path

from core.weights.checkpoint import Checkpoint, MetadataValue, TensorInfo
from core.weights.gguf import GGUFCheckpoint, open_gguf, read_gguf_metadata
from core.weights.safetensors import SafetensorsFolder, open_safetensors, read_folder_config

__all__ = [
    "Checkpoint",
    "GGUFCheckpoint",
    "MetadataValue",
    "SafetensorsFolder",
    "TensorInfo",
    "open_checkpoint",
    "open_gguf",
    "open_safetensors",
    "read_checkpoint_metadata",
]


def open_checkpoint(path: str) -> Checkpoint:
    """Open a GGUF file or a folder of safetensors.

    Raises:
        CheckpointError, UnsupportedModel: as `open_gguf` and `open_safetensors`.
    """
    return open_safetensors(path) if _is_folder(path) else open_gguf(path)


def read_checkpoint_metadata(path: str) -> dict[str, MetadataValue]:
    """Return a checkpoint's metadata alone: a GGUF file's keys, or a folder's `config.json`.

    Raises:
        CheckpointError, UnsupportedModel: as `open_checkpoint`; tensors are not looked at.
    """
    return read_folder_config(path) if _is_folder(path) else read_gguf_metadata(path)


def _is_folder(path: str) -> bool:
    try:
        return Path(path).is_dir()
    except ValueError:  # a zero byte in the name: the reader says so
        return False
