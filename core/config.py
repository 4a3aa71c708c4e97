"""The engine's options: one small frozen value, checked once."""

import math
from typing import Literal

import msgspec

from core.errors import ConfigError

Device = Literal["auto", "cpu", "cuda"]
Numerics = Literal["stable", "fast", "reference"]
ExecutorKind = Literal["thread", "process"]
KVReservation = Literal["paged", "max", "power_of_two", "oracle"]
BatchingKind = Literal["continuous", "static"]
CompileKind = Literal["auto", "off"]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is told. 0 means "decide from the checkpoint and the machine" where it says so.

    Raises:
        ConfigError: from `validated()`, naming option, value and bound.
    """

    checkpoint: str
    """Path of a model file."""
    device: Device = "auto"
    numerics: Numerics = "stable"
    executor: ExecutorKind = "process"
    block_size: int = 16
    """Tokens per KV block, 1 to 256."""
    num_blocks: int = 0
    """KV blocks; 0: as many as `kv_bytes` holds."""
    kv_bytes: int = 0
    """Bytes for the KV pool; 0: the lesser of 25 % of available memory and the cgroup's headroom."""
    max_model_len: int = 0
    """Longest context in tokens; 0: the checkpoint's own."""
    allow_longer_context: bool = False
    """Let `max_model_len` pass the checkpoint's own context, where answers become worse."""
    max_step_tokens: int = 512
    """Token budget of one step, over all requests."""
    max_prefill_tokens: int = 256
    """Most tokens of one step that a single request may take."""
    max_running: int = 64
    """Most requests computed in one step."""
    num_threads: int = 0
    """Compute threads; 0: OMP_NUM_THREADS where it is set, else chosen per step by what steps take."""
    step_deadline_s: float = 120.0
    """A step that takes longer counts as hung."""
    load_deadline_s: float = 600.0
    """Loading that takes longer counts as hung."""
    cache_dir: str = ""
    """Where packed weights, probe results and compiled parts may be kept; empty: keep nothing."""
    compile: CompileKind = "auto"
    """Run compiled parts of the model that are kept, and compile the others in the background; `off`: all
    runs eagerly."""
    prefix_cache: bool = True
    """Reuse KV of equal prefixes."""
    kv_reservation: KVReservation = "paged"
    """`paged`, or for comparison one contiguous run per request: as long as the context, the next power of
    two, or prompt and `max_tokens`."""
    batching: BatchingKind = "continuous"
    """`static`, for comparison: no request joins before the whole batch has ended."""
    chunked_prefill: bool = True
    """False, for comparison: each prompt in one step, however long that takes for the others."""
    policy: str = "first_come"
    """The order in which waiting requests are admitted: a file in `core/scheduler/policies`."""
    session_gate: bool = True
    """Let some sessions wait where the cache cannot hold what all of them come back to."""
    trace: str = ""
    """File for a Chrome trace of steps and requests, overwritten; empty: none."""

    def validated(self) -> "EngineConfig":
        """Return self, or raise `ConfigError` for the first option out of its bounds."""
        bounds: tuple[tuple[str, float, float, float], ...] = (
            ("block_size", self.block_size, 1, 256),
            ("num_blocks", self.num_blocks, 0, 2**31 - 1),
            ("kv_bytes", self.kv_bytes, 0, 2**63 - 1),
            ("max_model_len", self.max_model_len, 0, 1 << 24),
            ("max_step_tokens", self.max_step_tokens, 1, 1 << 20),
            ("max_prefill_tokens", self.max_prefill_tokens, 1, 1 << 20),
            ("max_running", self.max_running, 1, 4096),
            ("num_threads", self.num_threads, 0, 1024),
            ("step_deadline_s", self.step_deadline_s, 0.05, 86400.0),
            ("load_deadline_s", self.load_deadline_s, 0.05, 86400.0),
        )
        for name, value, low, high in bounds:
            if not (math.isfinite(value) and low <= value <= high):
                raise ConfigError(f"{name} is {value}; it must be between {low:g} and {high:g}")
        if self.max_running > self.max_step_tokens:
            raise ConfigError(
                f"max_running is {self.max_running}; it must be at most max_step_tokens, "
                f"which is {self.max_step_tokens}"
            )
        if self.kv_reservation != "paged" and self.prefix_cache:
            raise ConfigError(
                f"kv_reservation is {self.kv_reservation}; where KV is reserved in runs no prefix can be "
                "reused: set prefix_cache to false as well"
            )
        return self
