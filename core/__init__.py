"""The engine: token ids in, token ids out. Knows no text and no HTTP. These names are its public face.

Importing this package never imports torch: only the worker does, where it runs.
"""

from core.config import EngineConfig
from core.errors import (
    CheckpointError,
    ConfigError,
    EngineDraining,
    EngineError,
    RequestTooLong,
    UnsupportedModel,
)
from core.request import FinishReason, SamplingParams, TokenOutput
from core.weights import read_checkpoint_metadata

__all__ = [
    "CheckpointError",
    "ConfigError",
    "EngineConfig",
    "EngineDraining",
    "EngineError",
    "FinishReason",
    "RequestTooLong",
    "SamplingParams",
    "TokenOutput",
    "UnsupportedModel",
    "read_checkpoint_metadata",
]
