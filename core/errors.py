"""Every exception the engine raises for other people's mistakes or bad luck.

    EngineError
    ├── CheckpointError          a model file that is missing, truncated or lying
    │   └── UnsupportedModel     a sound file of an architecture or type we do not have
    ├── ConfigError              an engine option out of its range
    ├── RequestTooLong           a request that could never fit
    ├── OutOfBlocks              the pool has too few free blocks (inside the engine only)
    ├── EngineDraining           the engine takes no new requests
    │   └── EngineFailed         and never will: its worker is gone for good
    ├── StepFailed               one step raised; the worker lives on
    └── WorkerFailed             the worker died or hung

Each carries a stable `code` and the numbers involved. Broken promises of our own are `assert`.
"""

from typing import ClassVar


class EngineError(Exception):
    """The root. `code` is stable and meant for machines; `str()` is meant for people."""

    code: ClassVar[str] = "engine_error"


class CheckpointError(EngineError):
    """A checkpoint cannot be used. The message names the file, what is wrong and where."""

    code = "bad_checkpoint"

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path
        self.problem = problem


class UnsupportedModel(CheckpointError):
    """The file is sound but needs something this version does not have; the message lists what there is."""

    code = "unsupported_model"


class ConfigError(EngineError):
    """An engine option is out of range. The message names the option, its value and the bound."""

    code = "bad_config"


class RequestTooLong(EngineError):
    """Prompt and output together exceed what the context or the block pool can ever hold."""

    code = "context_length_exceeded"

    def __init__(self, *, num_prompt_tokens: int, max_tokens: int, limit: int, limit_name: str) -> None:
        super().__init__(
            f"the prompt has {num_prompt_tokens} tokens and up to {max_tokens} more were asked for, "
            f"but {limit_name} is {limit}"
        )
        self.num_prompt_tokens = num_prompt_tokens
        self.max_tokens = max_tokens
        self.limit = limit
        self.limit_name = limit_name


class OutOfBlocks(EngineError):
    """Fewer blocks are free than were asked for; nothing was taken."""

    code = "out_of_blocks"

    def __init__(self, *, needed: int, free: int) -> None:
        super().__init__(f"{needed} blocks are needed and {free} are free")
        self.needed = needed
        self.free = free


class EngineDraining(EngineError):
    """The engine is shutting down: new requests are refused."""

    code = "draining"


class EngineFailed(EngineDraining):
    """The engine's worker is gone for good: new requests are refused until somebody opens it anew."""

    code = "engine_failed"


class StepFailed(EngineError):
    """A step raised. Its requests end with `error`; the worker and everyone else go on."""

    code = "step_failed"


class WorkerFailed(EngineError):
    """The worker died or passed its deadline, during a step or while loading."""

    code = "worker_failed"
