"""Finds out, once per checkpoint and machine, how each linear may be computed with 8-bit numbers.

The model writes a little text of its own with kernels that keep activations as they are; what each
linear is given meanwhile is the sample on which `core.quantization.smoothing` decides. The outcome is
kept beside the packed weights, since other kernels would give other tokens.
"""

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from core.execution.runner import Runner
from core.layers import Absorber
from core.quantization.codec import Codec
from core.quantization.kernels import PackedLinear
from core.quantization.smoothing import BEARABLE, BEARABLE_WHERE_DELICATE, fit_linear
from core.request import SamplingParams
from core.scheduler.plan import PlannedTokens, StepPlan
from core.weights.packed_file import load_packed, save_packed

NUM_SEQUENCES = 8
NUM_TOKENS = 48
"""Of a sequence; the first is drawn, the others are the model's own."""
KEPT_EVERY = 3
"""Of the steps, those whose inputs are kept: 128 rows of each linear."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Linears by dotted name; one that is not here is computed without calibration."""

    numbers: Mapping[str, Tensor] = field(default_factory=dict)
    """What a linear's inputs are divided by, one for each output of what absorbs it (`Absorber.spread`)."""
    whole: frozenset[str] = frozenset()

    def save(self, path: Path, key: str) -> None:
        """Keep it for the next start, where the disk allows it."""
        tensors = {f"{name}.numbers": numbers.contiguous() for name, numbers in self.numbers.items()}
        tensors |= {f"{name}.whole": torch.ones(1) for name in self.whole}
        save_packed(path, key, {**tensors, "calibrated": torch.ones(1)})

    @classmethod
    def load(cls, path: Path, key: str) -> "Calibration | None":
        tensors = load_packed(path, key)
        if tensors is None:
            return None
        numbers = {
            name.removesuffix(".numbers"): tensor.clone()
            for name, tensor in tensors.items()
            if name.endswith(".numbers")
        }
        whole = {name.removesuffix(".whole") for name in tensors if name.endswith(".whole")}
        return cls(numbers, frozenset(whole))


class InputRecorder:
    """Keeps what linears are given. Put in the place of their `product` before a model is composed."""

    def __init__(self) -> None:
        self.is_on = False
        self._rows: dict[str, list[Tensor]] = {}

    def watch(self, name: str, linear: PackedLinear) -> None:
        codec: Codec = linear.codec
        product: Callable[[Tensor], Tensor] = linear.product

        def recorded(codes: Tensor) -> Tensor:
            if self.is_on:
                assert codec.rows == 1
                self._rows.setdefault(name, []).append(codes[:, 0].bfloat16())
            return product(codes)

        linear.product = recorded  # type: ignore[method-assign]

    def inputs(self, name: str) -> Tensor:
        """Float32 `[R, in]`."""
        return torch.cat(self._rows[name]).float()


def write_text(
    runner: Runner, recorder: InputRecorder, *, num_tokens: int, vocab_size: int, block_size: int
) -> None:
    """Let the model write, a token a step, and record; the same text every time."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(vocab_size, (NUM_SEQUENCES,), generator=generator).tolist()
    blocks = -(-NUM_TOKENS // block_size)
    sampling = SamplingParams(max_tokens=1, seed=0)
    for position in range(num_tokens):
        recorder.is_on = position % KEPT_EVERY == 0
        items = tuple(
            PlannedTokens(
                request_id=str(number),
                token_ids=(token,),
                first_position=position,
                block_table=array("i", range(number * blocks, (number + 1) * blocks)).tobytes(),
                num_samples=1,
                sampling=sampling,
            )
            for number, token in enumerate(tokens)
        )
        logits_RV = runner.logits(StepPlan(step_id=position + 1, items=items))
        probabilities = torch.nan_to_num(logits_RV).softmax(-1)
        tokens = torch.multinomial(probabilities, 1, generator=generator).flatten().tolist()


def choose(
    recorder: InputRecorder,
    linears: Mapping[str, Absorber | None],
    parts_of: Callable[[str], list[Tensor]],
) -> Calibration:
    """Decide for each linear.

    Args:
        linears: name -> what before it can take a division.
        parts_of: the stored weights of a linear, float32 `[out, in]`.
    """
    numbers: dict[str, Tensor] = {}
    whole: set[str] = set()
    for name, absorber in linears.items():
        fit = fit_linear(
            recorder.inputs(name),
            parts_of(name),
            tie=None if absorber is None else partial(_tied, absorber),
            bearable=BEARABLE_WHERE_DELICATE if absorber and absorber.is_delicate else BEARABLE,
        )
        if fit.columns is not None:
            assert absorber is not None
            numbers[name] = absorber.shared(fit.columns)
        if fit.whole:
            whole.add(name)
    return Calibration(numbers, frozenset(whole))


def _tied(absorber: Absorber, per_input: Tensor) -> Tensor:
    return absorber.spread(absorber.shared(per_input))
