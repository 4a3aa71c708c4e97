"""The engine: token ids in, token ids out. Knows no text and no HTTP. These names are its public face.

Importing this package never imports torch: only the worker does, where it runs.
"""

from core.config import EngineConfig
from core.engine.engine import Engine
from core.errors import (
    CheckpointError,
    ConfigError,
    EngineDraining,
    EngineError,
    EngineFailed,
    RequestTooLong,
)
from core.execution.checkpoint_summary import CheckpointSummary
from core.execution.machine_report import MachineReport
from core.execution.worker_info import WorkerInfo
from core.request import FinishReason, SamplingParams, TokenOutput
from core.weights import read_checkpoint_metadata

__all__ = [
    "CheckpointError",
    "CheckpointSummary",
    "ConfigError",
    "Engine",
    "EngineConfig",
    "EngineDraining",
    "EngineError",
    "EngineFailed",
    "FinishReason",
    "MachineReport",
    "RequestTooLong",
    "SamplingParams",
    "TokenOutput",
    "WorkerInfo",
    "read_checkpoint_metadata",
]
