"""The engine: token ids in, token ids out. Knows no text and no HTTP. These names are its public face.

Importing this package never imports torch: only the worker does, where it runs.
"""

from core.config import EngineConfig
from core.engine.client import TokenStream
from core.engine.engine import Engine
from core.engine.stats import EngineHealth
from core.errors import (
    CheckpointError,
    ConfigError,
    EngineDraining,
    EngineError,
    RequestTooLong,
    UnsupportedModel,
)
from core.execution.worker_info import WorkerInfo
from core.request import FinishReason, SamplingParams, TokenOutput
from core.weights.gguf import read_checkpoint_metadata

__all__ = [
    "CheckpointError",
    "ConfigError",
    "Engine",
    "EngineConfig",
    "EngineDraining",
    "EngineError",
    "EngineHealth",
    "FinishReason",
    "RequestTooLong",
    "SamplingParams",
    "TokenOutput",
    "TokenStream",
    "UnsupportedModel",
    "WorkerInfo",
    "read_checkpoint_metadata",
]
