"""Which 8-bit arithmetic a linear can bear, found on a sample of what it is given.

Some inputs of a linear are always large and set the step for all others. Dividing each input by a
number of its own, and multiplying the weights' column by it, changes nothing but where the rounding
falls: the norm before the linear takes the division for free (SmoothQuant, arXiv:2211.10438).

Errors are squared, relative to the exact output, averaged over rows and over the stored parts of a
fused weight: the values of an attention are small beside its queries, and matter as much.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from core.quantization.codec import INT8_SPLIT, INT8_WHOLE, Codec
from core.quantization.int8 import rounded_rows

EXPONENTS = tuple((a, b) for a in (0.15, 0.3, 0.45, 0.6, 0.75) for b in (0.0, 0.25, 0.5))
"""How much of an input's usual size moves into its column, and how much columns are evened out."""
BEARABLE, BEARABLE_WHERE_DELICATE = 3e-4, 1e-4
"""Error up to which activations of 8 bits are taken: SmolLM2 then stays below a mean KL of 0.01."""
MOST_OUTPUTS = 512
"""Of a part, looked at: every n-th."""


class Fit(NamedTuple):
    columns: Tensor | None
    """What the weights' columns are multiplied by and the inputs divided by; float32 `[in]`."""
    whole: bool
    """Whether activations of 8 bits will do."""
    error: float


def fit_linear(
    x: Tensor, parts: Sequence[Tensor], *, tie: Callable[[Tensor], Tensor] | None, bearable: float
) -> Fit:
    """The cheapest arithmetic whose error is bearable, else the one with the least error.

    Args:
        tie: makes the numbers of inputs that must share one alike; None: nothing can take a division.

    Shapes: x float32 `[R, in]`; parts float32 `[out, in]`.
    """
    heaviest = torch.stack([part.abs().amax(0) for part in parts]).amax(0)
    usual = x.square().mean(0).sqrt()
    looked_at = [part[:: max(1, part.shape[0] // MOST_OUTPUTS)] for part in parts]
    candidates: list[Tensor | None] = [None]
    if tie is not None:
        candidates += [_columns(tie(usual), tie(heaviest), a, b) for a, b in EXPONENTS]
    best: list[Fit] = []
    for codec in (INT8_WHOLE, INT8_SPLIT):
        fits = [
            Fit(columns, codec is INT8_WHOLE, output_error(x, looked_at, columns, codec))
            for columns in candidates
        ]
        best.append(min(fits, key=lambda fit: fit.error))
        if best[-1].error <= bearable:
            return best[-1]
    return best[-1]


def output_error(x: Tensor, parts: Sequence[Tensor], columns: Tensor | None, codec: Codec) -> float:
    """What rounding both sides changes in the outputs."""
    codes, scale = codec.encode(x if columns is None else x / columns)
    inputs = codec.decode(codes, scale)
    errors = []
    for part in parts:
        exact = x @ part.T
        rows, scales = rounded_rows(
            part if columns is None else part * columns, pairs_limited=codec is INT8_WHOLE
        )
        changed = inputs @ (rows.float() * scales.unsqueeze(-1)).T - exact
        energy = exact.square().sum(1).clamp(min=1e-20)
        errors.append((changed.square().sum(1) / energy).mean())
    return float(torch.stack(errors).mean())


def _columns(usual: Tensor, heaviest: Tensor, a: float, b: float) -> Tensor:
    columns = usual.clamp(min=1e-5) ** a / heaviest.clamp(min=1e-5) ** b
    return columns / columns.log().mean().exp()
