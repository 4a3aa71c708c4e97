"""Opens a checkpoint: reads its config, calibrates where that pays, and loads the model."""

import hashlib
from pathlib import Path
from typing import NamedTuple, cast

import torch

from core.attention.kv_storage import KVStorage
from core.attention.tiled import RowRule, TiledAttention
from core.config import EngineConfig
from core.errors import CheckpointError, ConfigError, UnsupportedModel
from core.execution.calibration import (
    NUM_SEQUENCES,
    NUM_TOKENS,
    Calibration,
    InputRecorder,
    choose,
    write_text,
)
from core.execution.loading import LoadedModel, ModelLoader
from core.execution.runner import Runner
from core.models import Model, ModelConfig, ModelSpec, find_model
from core.quantization import dequantise
from core.quantization.ggml import FLOAT_DTYPES
from core.quantization.kernels import PackedLinear, linear_kernels
from core.weights import Checkpoint, open_checkpoint
from core.weights.packed_file import readonly_tensor

MOST_CONFIG_NUMBERS = 4096
CALIBRATION_VERSION = 3
"""Raised whenever a calibration would come out differently."""
BLOCK_SIZE = 16


class OpenedModel(NamedTuple):
    config: ModelConfig
    architecture: str
    identity: str
    """Digest of what the checkpoint says about itself."""
    file_bytes: int
    loaded: LoadedModel


def open_model(config: EngineConfig, device: torch.device) -> OpenedModel:
    """Load a checkpoint's model onto a device.

    Raises:
        CheckpointError: the file cannot be used.
        ConfigError: the options do not go with it.
    """
    checkpoint = open_checkpoint(config.checkpoint)
    try:
        identity = _identity(checkpoint)
        architecture = checkpoint.architecture
        spec, model_config = _read_model(checkpoint, architecture, config)
        stamped = identity + "".join(_file_stamp(path) for path in checkpoint.files)
        calibration = None
        if _is_worth_calibrating(checkpoint, config, device):
            calibration = _calibration(checkpoint, spec, model_config, config, stamped)
        loader = ModelLoader(
            checkpoint,
            spec,
            model_config,
            numerics=config.numerics,
            device=device.type,
            calibration=calibration,
        )
        loaded = loader.load(identity=stamped, cache_dir=config.cache_dir)
        file_bytes = checkpoint.file_bytes
    finally:
        checkpoint.close()
    loaded.module.to(device)
    return OpenedModel(model_config, architecture, identity, file_bytes, loaded)


def _is_worth_calibrating(checkpoint: Checkpoint, config: EngineConfig, device: torch.device) -> bool:
    """Where a kernel gains by it, and the outcome can be kept."""
    if device.type != "cpu" or config.numerics == "reference" or not config.cache_dir:
        return False
    types = {info.ggml_type for info in checkpoint.tensors.values()}
    return "fbgemm" in torch.backends.quantized.supported_engines and any(
        kernel.is_calibrated and not types.isdisjoint(kernel.rank) for kernel in linear_kernels().values()
    )


def _calibration(
    checkpoint: Checkpoint, spec: ModelSpec, model_config: ModelConfig, config: EngineConfig, identity: str
) -> Calibration:
    """The one that was kept, else a new one."""
    machine = f"{torch.__version__}\n{torch.backends.cpu.get_cpu_capability()}"
    key = hashlib.sha256(f"{identity}\n{machine}\n{CALIBRATION_VERSION}".encode()).hexdigest()
    path = Path(config.cache_dir) / f"{key[:32]}.calibration"
    kept = Calibration.load(path, key)
    if kept is not None:
        return kept
    found = _calibrate(checkpoint, spec, model_config)
    found.save(path, key)
    return found


@torch.inference_mode()
def _calibrate(checkpoint: Checkpoint, spec: ModelSpec, model_config: ModelConfig) -> Calibration:
    loader = ModelLoader(checkpoint, spec, model_config, numerics="fast", device="cpu", calibrates=True)
    model = loader.load(identity="", cache_dir="").module
    recorder = InputRecorder()
    for name in loader.linears:
        recorder.watch(name, cast(PackedLinear, model.get_submodule(name)))
    cast(Model, model).compose(kv_dtype=torch.float16)
    storage = KVStorage(
        NUM_SEQUENCES * -(-NUM_TOKENS // BLOCK_SIZE),
        BLOCK_SIZE,
        num_layers=model_config.num_layers,
        num_kv_heads=model_config.num_kv_heads,
        head_dim=model_config.head_dim,
        dtype=torch.float16,
        device=torch.device("cpu"),
    )
    attention = TiledAttention(
        num_heads=model_config.num_heads,
        num_kv_heads=model_config.num_kv_heads,
        head_dim=model_config.head_dim,
        row_rule=RowRule(),
    )
    runner = Runner(cast(Model, model), storage, attention, device=torch.device("cpu"))
    num_tokens = min(NUM_TOKENS, model_config.max_position)
    write_text(
        runner, recorder, num_tokens=num_tokens, vocab_size=model_config.vocab_size, block_size=BLOCK_SIZE
    )
    absorbers = cast(Model, model).absorbers()
    return choose(
        recorder,
        {name: absorbers.get(name) for name in loader.linears},
        loader.stored_parts,
    )


def _read_model(
    checkpoint: Checkpoint, architecture: str, config: EngineConfig
) -> tuple[ModelSpec, ModelConfig]:
    spec = find_model(architecture, path=checkpoint.path)
    stored = spec.stored.get(checkpoint.format)
    if stored is None:
        raise UnsupportedModel(
            checkpoint.path, f"{architecture} models are read from {', '.join(sorted(spec.stored))}"
        )
    small = {name: _numbers(checkpoint, name) for name in stored.config_tensors if name in checkpoint.tensors}
    metadata = {**checkpoint.metadata, **small}
    try:
        if config.max_model_len and not config.allow_longer_context:
            _check_context(config.max_model_len, own=stored.read_config(metadata, 0).max_position)
        return spec, stored.read_config(metadata, config.max_model_len)
    except KeyError as error:
        raise CheckpointError(checkpoint.path, f"metadata key {error} is missing") from None
    except ValueError as error:
        raise CheckpointError(checkpoint.path, str(error)) from None


def _check_context(max_model_len: int, *, own: int) -> None:
    if max_model_len > own:
        raise ConfigError(
            f"max_model_len is {max_model_len}; the model's own context is {own} tokens, and beyond it "
            "answers become worse: give at most that, or set allow_longer_context too"
        )


def _numbers(checkpoint: Checkpoint, name: str) -> list[float]:
    """A small tensor's values, flat."""
    info = checkpoint.tensors[name]
    if info.ggml_type not in FLOAT_DTYPES or not 1 <= info.num_elements <= MOST_CONFIG_NUMBERS:
        raise CheckpointError(
            checkpoint.path,
            f"tensor {name} is {info.ggml_type} of shape {info.shape}; a few floats were expected",
        )
    raw = readonly_tensor(checkpoint.raw(name), torch.uint8).view(1, -1)
    return [float(number) for number in dequantise(raw, info.ggml_type).flatten().tolist()]


def _identity(checkpoint: Checkpoint) -> str:
    """A digest of all that the file says about itself: metadata and where each tensor lies."""
    digest = hashlib.sha256()
    digest.update(repr(sorted(checkpoint.metadata.items())).encode())
    digest.update(repr(sorted(checkpoint.tensors.items())).encode())
    return digest.hexdigest()


def _file_stamp(path: str) -> str:
    """Changes when the file's content does, short of deceit."""
    stat = Path(path).stat()
    return f"/{stat.st_size}/{stat.st_mtime_ns}/{stat.st_ino}"
