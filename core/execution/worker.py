"""The real worker: a checkpoint, its KV pool and a runner on one device."""

import ctypes
import hashlib
import os
import time
from pathlib import Path
from typing import cast

import msgspec
import torch

from core.attention.kv_storage import KVStorage, kv_bytes_per_token
from core.attention.tiled import TILE_TOKENS, RowRule, TiledAttention
from core.compiled.adoption import CompiledRegions
from core.config import EngineConfig
from core.errors import ConfigError
from core.execution.memory import default_pool_bytes, free_pool_bytes, process_memory
from core.execution.open_model import open_model
from core.execution.probe import attention_row_rule, check_elementwise, check_row_reductions
from core.execution.runner import Runner
from core.execution.threads import ThreadGovernor, thread_counts
from core.execution.worker_info import WorkerInfo, WorkerMemory
from core.models import Model, ModelConfig
from core.scheduler.plan import PlannedTokens, StepPlan, StepResult

KV_DTYPES = {"stable": torch.float16, "fast": torch.float16, "reference": torch.float32}
MOST_DEFAULT_BLOCKS = 1 << 20


class ModelWorker:
    """Computes plans with real tensors. Called from one thread only."""

    def __init__(
        self, info: WorkerInfo, runner: Runner, governor: ThreadGovernor, compiled: CompiledRegions
    ) -> None:
        self.info, self.runner, self._governor, self._compiled = info, runner, governor, compiled

    def execute(self, plan: StepPlan) -> StepResult:
        self._compiled.look()
        num_threads = self._governor.choose(plan.num_tokens)
        if num_threads != torch.get_num_threads():
            torch.set_num_threads(num_threads)
        result = self.runner.execute(plan)
        self._governor.saw(plan.num_tokens, result.build_s + result.forward_s + result.sample_s)
        return result

    def memory(self) -> WorkerMemory:
        self._compiled.look()  # an idle server's regions arrive too
        return msgspec.structs.replace(process_memory(), regions=self._compiled.status())

    def close(self) -> None:
        self._compiled.close()
        del self.runner


def load_worker(config: EngineConfig) -> ModelWorker:
    """Load the checkpoint and allocate the KV pool.

    Raises:
        CheckpointError: the file cannot be used.
        ConfigError: the options cannot be kept on this machine.
    """
    started = time.monotonic()
    device = pick_device(config.device)
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    model = open_model(config, device)
    model_config, loaded = model.config, model.loaded
    regions = cast(Model, loaded.module).compose(kv_dtype=KV_DTYPES[config.numerics])
    storage = _allocate_storage(config, model_config, device)
    attention = TiledAttention(
        num_heads=model_config.num_heads,
        num_kv_heads=model_config.num_kv_heads,
        head_dim=model_config.head_dim,
        row_rule=_row_rule(config, model_config, device),
    )
    regions += attention.regions(storage.block_size, storage.dtype)
    compiled = CompiledRegions(regions, folder=_compiled_folder(config, device))
    compiled.adopt_kept()
    runner = Runner(cast(Model, loaded.module), storage, attention, device=device)
    counts = _thread_counts(config, runner, device, longest=model_config.max_position)
    info = WorkerInfo(
        num_blocks=storage.num_blocks,
        block_size=storage.block_size,
        max_model_len=model_config.max_position,
        vocab_size=model_config.vocab_size,
        device=str(device),
        numerics=config.numerics,
        architecture=model.architecture,
        kernels=loaded.kernels,
        num_threads=counts[-1],
        model_file_bytes=model.file_bytes,
        packed_weight_bytes=loaded.packed_bytes,
        kv_bytes=storage.num_bytes,
        kv_bytes_per_token=_bytes_per_token(config, model_config),
        load_s=time.monotonic() - started,
        namespace=hashlib.sha256(f"{model.identity}/{config.numerics}/{storage.dtype}".encode()).digest(),
    )
    return_free_memory()  # last: the probes and the checkpoint's metadata are gone by now
    compiled.compile_missing()
    return ModelWorker(info, runner, ThreadGovernor(counts), compiled)


def _compiled_folder(config: EngineConfig, device: torch.device) -> str:
    """Empty where nothing is to run compiled: `reference` is what compiled parts are compared with."""
    if config.compile == "off" or config.numerics == "reference" or device.type != "cpu":
        return ""
    return str(Path(config.cache_dir) / "compiled") if config.cache_dir else ""


def _thread_counts(
    config: EngineConfig, runner: Runner, device: torch.device, *, longest: int
) -> tuple[int, ...]:
    """Numbers of threads to choose from: one where the user named it, or where bits depend on it."""
    most = torch.get_num_threads()
    if config.num_threads or os.environ.get("OMP_NUM_THREADS") or device.type != "cpu":
        return (most,)
    counts = thread_counts(most)
    if config.numerics == "stable" and not _threads_agree(runner, counts, num_tokens=min(17, longest)):
        return (most,)
    return counts


def _threads_agree(runner: Runner, counts: tuple[int, ...], *, num_tokens: int) -> bool:
    """Whether a small prompt's logits are the same bits on each number of threads."""
    item = PlannedTokens(
        request_id="probe",
        token_ids=(0,) * num_tokens,
        first_position=0,
        block_table=bytes(4 * num_tokens),
        num_samples=1,
    )
    results = []
    for count in counts:
        torch.set_num_threads(count)
        results.append(runner.logits(StepPlan(step_id=1, items=(item,))))
    return all(torch.equal(results[0], other) for other in results[1:])


def pick_device(wanted: str) -> torch.device:
    """The device to compute on. Raises `ConfigError` where a GPU is asked for and there is none."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch finds no usable GPU here; use device=cpu or auto")
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")


def return_free_memory() -> None:
    """Give what loading has freed back to the system, where the C library can (glibc)."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError):
        return


def _row_rule(config: EngineConfig, model_config: ModelConfig, device: torch.device) -> RowRule:
    """Try out what `stable` relies on. Other numerics and devices make no promise and need no rule."""
    if config.numerics != "stable" or device.type != "cpu":
        return RowRule()
    check_elementwise()
    for width in {model_config.num_heads * model_config.head_dim, model_config.head_dim}:
        check_row_reductions(width)
    most_tokens = config.max_prefill_tokens if config.chunked_prefill else model_config.max_position
    longest = most_tokens * (model_config.num_heads // model_config.num_kv_heads)
    tile = max(1, TILE_TOKENS // config.block_size) * config.block_size
    return attention_row_rule(model_config.head_dim, tile, num_rows=max(64, min(longest, 1024)))


def _bytes_per_token(config: EngineConfig, model_config: ModelConfig) -> int:
    return kv_bytes_per_token(
        num_layers=model_config.num_layers,
        num_kv_heads=model_config.num_kv_heads,
        head_dim=model_config.head_dim,
        dtype=KV_DTYPES[config.numerics],
    )


def _allocate_storage(config: EngineConfig, model_config: ModelConfig, device: torch.device) -> KVStorage:
    bytes_per_block = _bytes_per_token(config, model_config) * config.block_size
    pool_bytes = config.kv_bytes or default_pool_bytes(device)
    num_blocks = config.num_blocks or min(pool_bytes // bytes_per_block, MOST_DEFAULT_BLOCKS)
    if num_blocks < 1:
        raise ConfigError(
            f"kv_bytes is {pool_bytes}; one block of {config.block_size} tokens takes {bytes_per_block} bytes"
        )
    if config.num_blocks or config.kv_bytes:
        _check_pool(config, num_blocks * bytes_per_block, free=free_pool_bytes(device))
    try:
        return KVStorage(
            num_blocks,
            config.block_size,
            num_layers=model_config.num_layers,
            num_kv_heads=model_config.num_kv_heads,
            head_dim=model_config.head_dim,
            dtype=KV_DTYPES[config.numerics],
            device=device,
        )
    except (RuntimeError, OSError) as error:  # what torch and the system say when memory cannot be had
        raise ConfigError(
            f"the KV pool of {num_blocks} blocks needs {num_blocks * bytes_per_block} bytes"
        ) from error


def _check_pool(config: EngineConfig, num_bytes: int, *, free: int | None) -> None:
    """The system would grant what is not there, and kill the process once it is written to."""
    if free is None or num_bytes <= free:
        return
    asked = f"num_blocks is {config.num_blocks}" if config.num_blocks else f"kv_bytes is {config.kv_bytes}"
    raise ConfigError(
        f"{asked}; the KV pool would take {num_bytes} bytes ({num_bytes / 2**30:.1f} GiB) and {free} "
        f"({free / 2**30:.1f} GiB) are free: give less, or leave it out"
    )
