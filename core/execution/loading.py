"""Checkpoint -> model: names, ties, kernels, and each tensor packed exactly once.

A model is built with weights that have no memory; a walk over it then swaps every linear for its
kernel's packed module and fills it run by run from the mapped file, whose pages are dropped at
once. So memory peaks at the packed size plus one tensor, and a file that shrinks later is no
longer looked at.
"""

import hashlib
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from core.errors import CheckpointError, UnsupportedModel
from core.execution.calibration import Calibration
from core.execution.probe import kernel_row_multiple
from core.layers import Embedding, Linear
from core.models import Model, ModelConfig, ModelSpec
from core.quantization import LinearKernel, PackedLinear, RowPadded, choose_kernel
from core.quantization.bias import Biased
from core.quantization.embedding import HasRows, SharedEmbedding, StoredEmbedding
from core.quantization.ggml import FLOAT_DTYPES, dequantise
from core.weights import Checkpoint, TensorInfo
from core.weights.packed_file import load_packed, readonly_tensor, save_packed

PACK_VERSION = 2
"""Raised whenever a kernel packs differently."""
WHOLE = "int8_whole"
"""The kernel that a calibration alone chooses."""
RUN_BYTES = 2 << 20
"""Float32 bytes of the rows that are unpacked at a time; packing needs about five times as much."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    module: nn.Module
    kernels: dict[str, int]
    packed_bytes: int
    from_cache: bool


@dataclass(frozen=True, slots=True)
class _Part:
    """Stored rows of a module: the linear they are stored as, its tensors, and where its rows begin."""

    linear: str
    tensor: TensorInfo
    bias: TensorInfo | None
    first_row: int


class Wanted(NamedTuple):
    """What a kernel is chosen for."""

    types: tuple[str, ...]
    boundaries: tuple[int, ...]
    shape: tuple[int, int]
    whole: bool


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a module's weight comes from, and what it becomes."""

    parts: tuple[_Part, ...]
    kernel: LinearKernel | None


class ModelLoader:
    """Loads one checkpoint into one model. Used once.

    Args:
        calibration: how linears are computed with 8-bit numbers; without one, as carefully as can be.
        calibrates: load with kernels that keep activations as they are, for finding a calibration.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        spec: ModelSpec,
        config: ModelConfig,
        *,
        numerics: str,
        device: str,
        calibration: Calibration | None = None,
        calibrates: bool = False,
    ) -> None:
        self._checkpoint, self._spec, self._config = checkpoint, spec, config
        self._stored = spec.stored[checkpoint.format]
        self._numerics, self._device = numerics, device
        self._calibration = calibration or Calibration()
        self._calibrates = calibrates
        self._used = {name for name in checkpoint.tensors if self._stored.ignored(name)}
        self._used.update(name for name in self._stored.config_tensors if name in checkpoint.tensors)
        self._missing: set[str] = set()
        self.linears: dict[str, tuple[_Part, ...]] = {}
        """Every linear by dotted name, with what it is stored as."""
        self._columns: dict[str, Tensor] = {}
        self._rows: dict[str, Tensor] = {}
        self._chosen: dict[Wanted, tuple[LinearKernel, int]] = {}

    def load(self, *, identity: str, cache_dir: str) -> LoadedModel:
        """Build, pack and check.

        Args:
            identity: digest of the checkpoint, part of the cache file's key.

        Raises:
            CheckpointError: a tensor is missing or of the wrong shape.
            UnsupportedModel: the file has tensors this model does not know.
        """
        model = self._spec.build(self._config)
        tied = self._tied_linear()
        sources = self._place_modules(model, tied)
        self._refuse_leftovers()
        self._divide(model)
        kernels = Counter(source.kernel.name for source in sources.values() if source.kernel)
        key = self._cache_key(identity, sources)
        path = Path(cache_dir) / f"{key[:32]}.packed" if cache_dir else None
        cached = load_packed(path, key) if path else None
        if cached is not None and _assign_buffers(model, sources, cached):
            return self._finished(model, kernels, sources, from_cache=True)
        for name, source in sources.items():
            self._fill(name, model.get_submodule(name), source)
        if path and save_packed(path, key, dict(_buffers(model, sources))):
            mapped = load_packed(path, key)  # the anonymous copy is given up for the file's own pages
            if mapped is not None:
                _assign_buffers(model, sources, mapped)
        return self._finished(model, kernels, sources, from_cache=False)

    def _divide(self, model: nn.Module) -> None:
        """Let norms, and rows that are yet to be filled, take what linears' inputs are divided by."""
        for linear, absorber in cast(Model, model).absorbers().items():
            numbers = self._calibration.numbers.get(linear)
            if numbers is None:
                continue
            self._columns[linear] = absorber.spread(numbers)
            if absorber.first_row is None:
                cast(Tensor, model.get_submodule(absorber.module).weight).div_(numbers)
            else:
                num_outputs = cast(PackedLinear, model.get_submodule(absorber.module)).out_features
                rows = self._rows.setdefault(absorber.module, torch.ones(num_outputs))
                rows[absorber.first_row : absorber.first_row + len(numbers)] = 1 / numbers

    def _factors(self, name: str, first_row: int, last_row: int) -> Tensor | None:
        """What a run of a linear's weights is multiplied by."""
        columns, rows = self._columns.get(name), self._rows.get(name)
        if rows is None:
            return columns
        column = rows[first_row:last_row].unsqueeze(1)
        return column if columns is None else column * columns

    def _finished(
        self, model: nn.Module, kernels: Counter[str], sources: dict[str, _Source], *, from_cache: bool
    ) -> LoadedModel:
        packed = sum(t.numel() * t.element_size() for _, t in _buffers(model, sources))
        for name in sources:
            seal = getattr(_innermost(model.get_submodule(name)), "seal", None)
            if seal is not None:
                seal()
        return LoadedModel(model.eval(), dict(kernels), packed, from_cache)

    def _tied_linear(self) -> str | None:
        """The linear that shares the embedding's tensor. One of its own is then not looked at."""
        if self._spec.tied is None:
            return None
        linear, embedding = self._spec.tied
        own, shared = (self._stored.tensor_name(f"{name}.weight") for name in (linear, embedding))
        has_own = own in self._checkpoint.tensors
        try:
            ties = self._stored.ties(self._checkpoint.metadata, has_own=has_own)
        except ValueError as error:
            raise CheckpointError(self._checkpoint.path, str(error)) from None
        if not ties:
            if not has_own:
                raise CheckpointError(
                    self._checkpoint.path,
                    f"tensors are missing: {own}, and the config does not tie it to {shared}",
                )
            return None
        if has_own:
            self._used.add(own)
            if shared in self._checkpoint.tensors and not self._same_bytes(own, shared):
                warnings.warn(
                    f"{self._checkpoint.path}: {own} is not used: the config ties it to {shared}, "
                    "although their values differ",
                    stacklevel=2,
                )
        return linear

    def _same_bytes(self, one: str, other: str) -> bool:
        same = self._checkpoint.raw(one) == self._checkpoint.raw(other)
        self._checkpoint.drop_pages(one)
        self._checkpoint.drop_pages(other)
        return same

    def _place_modules(self, model: nn.Module, tied: str | None) -> dict[str, _Source]:
        """Swap linears and embeddings for empty packed modules; load the small rest at once."""
        sources: dict[str, _Source] = {}
        embeddings: list[tuple[str, Embedding]] = []
        for name, module in list(model.named_modules()):
            if isinstance(module, Linear):
                parts = self.linears[name] = self._parts(module, name, tied=name == tied)
                if parts:
                    sources[name] = self._place_linear(model, name, module, parts)
            elif isinstance(module, Embedding):
                embeddings.append((name, module))
            else:
                for parameter_name, parameter in module.named_parameters(recurse=False):
                    self._load_dense(f"{name}.{parameter_name}", parameter)
        for name, module in embeddings:
            info = self._tensor(f"{name}.weight", (module.num_embeddings, module.width))
            if info is None:
                continue
            linear = model.get_submodule(tied) if tied and self._spec.tied == (tied, name) else None
            rows_of = None if linear is None else _innermost(linear)
            if rows_of is not None and hasattr(rows_of, "rows"):
                _replace(model, name, SharedEmbedding(cast(HasRows, rows_of)))
            else:
                row_bytes = info.nbytes // info.shape[0]
                _replace(model, name, StoredEmbedding(info.shape[0], row_bytes, info.ggml_type))
                sources[name] = _Source((_Part(name, info, None, 0),), None)
        return sources

    def _parts(self, module: Linear, name: str, *, tied: bool) -> tuple[_Part, ...]:
        """The stored linears that a module's rows come from; nothing where one is missing."""
        parent = name.rpartition(".")[0]
        rows = {name: module.out_features}
        if module.parts:
            rows = {f"{parent}.{part}": count for part, count in module.parts.items()}
        parts: list[_Part] = []
        first = 0
        for linear, count in rows.items():
            stored_as = self._spec.tied[1] if tied and self._spec.tied else linear
            info = self._tensor(f"{stored_as}.weight", (count, module.in_features))
            bias = None if module.bias is None else self._float_tensor(f"{linear}.bias", (count,))
            if info is not None:
                parts.append(_Part(linear, info, bias, first))
            first += count
        return tuple(parts) if len(parts) == len(rows) else ()

    def _place_linear(self, model: nn.Module, name: str, linear: Linear, parts: tuple[_Part, ...]) -> _Source:
        types = tuple(sorted({part.tensor.ggml_type for part in parts}))
        boundaries = tuple(part.first_row for part in parts)
        whole = name in self._calibration.whole
        wanted = Wanted(types, boundaries, (linear.out_features, linear.in_features), whole)
        kernel, multiple = self._choose(wanted)
        module = cast(PackedLinear, kernel.empty(linear.out_features, linear.in_features))
        module = module if multiple == 1 else RowPadded(module, multiple)
        has_bias = linear.bias is not None
        _replace(model, name, cast(nn.Module, Biased(module, linear.out_features) if has_bias else module))
        return _Source(parts, kernel)

    def _choose(self, wanted: Wanted) -> tuple[LinearKernel, int]:
        """Each kind of weight is tried out once."""
        if wanted not in self._chosen:
            self._chosen[wanted] = choose_kernel(
                wanted.types,
                wanted.shape,
                boundaries=wanted.boundaries,
                numerics=self._numerics,
                device=self._device,
                among=lambda kernel: (
                    (kernel.name == WHOLE) is wanted.whole and not (kernel.is_calibrated and self._calibrates)
                ),
                row_multiple=lambda kernel: kernel_row_multiple(
                    kernel, wanted.types[0], wanted.shape, numerics=self._numerics
                ),
            )
        return self._chosen[wanted]

    def stored_parts(self, name: str) -> list[Tensor]:
        """The weights behind a linear, float32 `[out, in]` each, in the order of the file."""
        infos = [part.tensor for part in self.linears[name]]
        weights = [dequantise(self._raw(info), info.ggml_type) for info in infos]
        for info in infos:
            self._checkpoint.drop_pages(info.name)
        return weights

    def _tensor(self, parameter: str, shape: tuple[int, ...]) -> TensorInfo | None:
        name = self._stored.tensor_name(parameter)
        info = self._checkpoint.tensors.get(name)
        if info is None:
            self._missing.add(name)
            return None
        self._used.add(name)
        if info.shape != shape:
            raise CheckpointError(
                self._checkpoint.path,
                f"tensor {name} has shape {info.shape}; the model's metadata calls for {shape}",
            )
        return info

    def _float_tensor(self, parameter: str, shape: tuple[int, ...]) -> TensorInfo | None:
        """As `_tensor`, for the small ones that no kernel computes with."""
        info = self._tensor(parameter, shape)
        if info is not None and info.ggml_type not in FLOAT_DTYPES:
            raise UnsupportedModel(
                self._checkpoint.path,
                f"tensor {info.name} is {info.ggml_type}; supported: {', '.join(FLOAT_DTYPES)}",
            )
        return info

    def _load_dense(self, parameter_name: str, parameter: nn.Parameter) -> None:
        info = self._float_tensor(parameter_name, tuple(parameter.shape))
        if info is None:
            return
        parameter.data = dequantise(self._raw(info), info.ggml_type).view(parameter.shape).clone()
        self._checkpoint.drop_pages(info.name)

    def _raw(self, info: TensorInfo) -> Tensor:
        """The tensor's bytes, uint8 `[rows, row bytes]`."""
        raw = readonly_tensor(self._checkpoint.raw(info.name), torch.uint8)
        return raw.view(info.shape[0] if len(info.shape) > 1 else 1, -1)

    def _fill(self, name: str, module: nn.Module, source: _Source) -> None:
        for part in source.parts:
            if source.kernel is None:
                module.get_buffer("raw").copy_(self._raw(part.tensor))
            else:
                self._fill_rows(name, module, source.kernel, part)
            self._checkpoint.drop_pages(part.tensor.name)

    def _fill_rows(self, name: str, module: nn.Module, kernel: LinearKernel, part: _Part) -> None:
        info, target = part.tensor, _innermost(module)
        raw = self._raw(info)
        order = self._stored.row_order(self._config, part.linear)
        granularity = kernel.row_granularity
        run = max(granularity, RUN_BYTES // (4 * info.shape[1]) // granularity * granularity)
        for first in range(0, info.shape[0], run):
            rows = raw[first : first + run] if order is None else raw[order[first : first + run]]
            row = part.first_row + first
            factors = self._factors(name, row, row + rows.shape[0])
            kernel.pack(target, row, rows, info.ggml_type, factors)
        if part.bias is not None:
            bias = dequantise(self._raw(part.bias), part.bias.ggml_type).flatten()
            ordered = bias if order is None else bias[order]
            rows_of_bias = slice(part.first_row, part.first_row + len(bias))
            factor = self._rows.get(name)
            module.get_buffer("bias")[rows_of_bias] = (
                ordered if factor is None else ordered * factor[rows_of_bias]
            )
            self._checkpoint.drop_pages(part.bias.name)

    def _refuse_leftovers(self) -> None:
        unused = sorted(set(self._checkpoint.tensors) - self._used)
        if self._missing:
            raise CheckpointError(
                self._checkpoint.path, f"tensors are missing: {_listed(sorted(self._missing))}"
            )
        if unused:
            raise UnsupportedModel(
                self._checkpoint.path, f"this architecture does not know the tensors {_listed(unused)}"
            )

    def _cache_key(self, identity: str, sources: dict[str, _Source]) -> str:
        parts = [
            identity,
            self._numerics,
            self._device,
            torch.__version__,
            torch.backends.cpu.get_cpu_capability(),
            str(PACK_VERSION),
        ]
        parts += [
            f"{name}={source.kernel.name if source.kernel else 'stored'}" for name, source in sources.items()
        ]
        parts += [
            f"{name}*{hashlib.sha256(columns.numpy().tobytes()).hexdigest()}"
            for name, columns in self._calibration.numbers.items()
        ]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"


def _innermost(module: nn.Module) -> nn.Module:
    """The kernel's own module, without what was put around it."""
    while isinstance(module, (Biased, RowPadded)):
        module = cast(nn.Module, module.linear)
    return module


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, module)


def _buffers(model: nn.Module, sources: dict[str, _Source]) -> Iterator[tuple[str, Tensor]]:
    """What the packed modules hold, by dotted name."""
    for name in sources:
        for buffer_name, buffer in model.get_submodule(name).named_buffers():
            yield f"{name}.{buffer_name}", buffer


def _assign_buffers(model: nn.Module, sources: dict[str, _Source], tensors: dict[str, Tensor]) -> bool:
    """Point every packed module at the mapped tensors; False (and nothing done) where one does not fit."""
    wanted = dict(_buffers(model, sources))
    for name, buffer in wanted.items():
        mapped = tensors.get(name)
        if mapped is None or mapped.shape != buffer.shape or mapped.dtype != buffer.dtype:
            return False
    for name in wanted:
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, tensors[name])
    return True
