"""Model architectures, one file each, named by what checkpoints call them (`general.architecture`
in GGUF, `model_type` in a `config.json`).

`ls core/models` is the list of supported models. This file is only the contract (`ModelSpec`)
and the finder.
"""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from core.errors import UnsupportedModel
from core.layers import Absorber, BatchView, Region


class ModelConfig(Protocol):
    """What the engine reads of a model's config; the rest is the model file's own business."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def max_position(self) -> int: ...


class Model(Protocol):
    """A built model. Weights are loaded into its parameters, or modules are swapped for packed ones."""

    def compose(self, *, kv_dtype: torch.dtype) -> list[Region]:
        """Get ready to compute with the weights in place; returns what is worth compiling.

        Called once, before the first `forward`.
        """
        ...

    def absorbers(self) -> Mapping[str, Absorber]:
        """Linears by dotted name, and what before them can take a division of their inputs."""
        ...

    def forward(self, token_ids_T: Tensor, batch: BatchView) -> Tensor:
        """Return the final hidden states, float32 `[T, E]`; the runner picks rows and calls `logits`."""
        ...

    def logits(self, hidden_RE: Tensor) -> Tensor:
        """Return float32 `[R, V]` for the picked rows."""
        ...


def _no_row_order(_config: ModelConfig, _linear: str) -> Tensor | None:
    return None


def _nothing_ignored(_tensor: str) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class StoredAs:
    """How one checkpoint format keeps the architecture.

    `read_config(metadata, max_model_len)` raises `KeyError` or `ValueError` for a missing or
    impossible value; no default is guessed. `tensor_name` maps a parameter's dotted name to the
    tensor's. `ties(metadata, has_own=...)` says whether the output linear is the embedding.
    `row_order` gives, for a linear's name, the row permutation that the format needs, or None.
    `ignored` names tensors that follow from the config.
    """

    read_config: Callable[[Mapping[str, object], int], ModelConfig]
    tensor_name: Callable[[str], str]
    ties: Callable[..., bool]
    row_order: Callable[[ModelConfig, str], Tensor | None] = _no_row_order
    ignored: Callable[[str], bool] = _nothing_ignored
    config_tensors: tuple[str, ...] = ()
    """Small tensors that belong to the config: `read_config` finds each, if it is there, as a list of
    numbers under its own name."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What a model file exports as `MODEL`."""

    build: Callable[[ModelConfig], nn.Module]
    stored: Mapping[str, StoredAs]
    """By `Checkpoint.format`."""
    tied: tuple[str, str] | None = None
    """(linear, embedding): where a checkpoint ties them, the linear's weight is the embedding's."""


def supported_models() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def find_model(architecture: str, *, path: str) -> ModelSpec:
    """Return `MODEL` of `core/models/<architecture>.py`.

    Raises:
        UnsupportedModel: there is no such file; the message lists those there are.
    """
    known = supported_models()
    if architecture not in known:
        raise UnsupportedModel(
            path, f"architecture {architecture!r:.80} is not supported; supported: {', '.join(known)}"
        )
    spec: ModelSpec = importlib.import_module(f"{__name__}.{architecture}").MODEL
    return spec
