"""Model files. `Checkpoint` is the contract; each format is one file here. Torch-free up to `loading`."""

from core.weights.checkpoint import Checkpoint, MetadataValue, TensorInfo
from core.weights.gguf import GGUFCheckpoint, open_gguf, read_checkpoint_metadata

__all__ = [
    "Checkpoint",
    "GGUFCheckpoint",
    "MetadataValue",
    "TensorInfo",
    "open_gguf",
    "read_checkpoint_metadata",
]
