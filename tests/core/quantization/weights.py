"""What the tests of the kernels share: their stated error bounds, and stored weights to try them on."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from core.quantization import LinearKernel, decode_rows, dequantise, quantise
from core.quantization.codec import SPLIT_LEVELS, WHOLE_LEVELS
from core.quantization.ggml import GROUP
from core.quantization.kernels import linear_kernels

BFLOAT16 = 2.0**-8
"""Relative error of rounding to bfloat16 once."""
SHAPES = ((64, 32), (64, 64), (192, 96), (96, 160), (33, 64))
"""(out, in); a kernel is tried on those that fit."""


def _int4_error(raw: Tensor, ggml_type: str) -> Tensor:
    rows = decode_rows(raw, ggml_type)
    grouped = rows.q.view(rows.q.shape[0], -1, GROUP).double()
    scale, zero = rows.scale.unsqueeze(-1).double(), (rows.minimum + 8 * rows.scale).unsqueeze(-1).double()
    return (BFLOAT16 * (((grouped - 8) * scale).abs() + zero.abs())).flatten(1)


def _int8_error(raw: Tensor, ggml_type: str) -> Tensor:
    weight = dequantise(raw, ggml_type).double()
    scale = weight.abs().amax(1, keepdim=True) / 127 * (1 + BFLOAT16)
    return (scale / 2).expand_as(weight)


def _pairs_limited_error(raw: Tensor, ggml_type: str) -> Tensor:
    """No two neighbours of a row may add up to more than 128 steps, to either side."""
    weight = dequantise(raw, ggml_type).double()
    even = nn.functional.pad(weight, (0, weight.shape[1] % 2)).view(weight.shape[0], -1, 2)
    same_sign = torch.maximum(even.clamp(min=0).sum(-1), -even.clamp(max=0).sum(-1))
    scale = torch.maximum(weight.abs().amax(1), same_sign.amax(1)) / 127
    return (scale.unsqueeze(1) / 2 * (1 + 2.0**-20)).expand_as(weight)


WEIGHT_ERROR: dict[str, Callable[[Tensor, str], Tensor]] = {
    "float32": lambda raw, ggml_type: torch.zeros_like(dequantise(raw, ggml_type)).double(),
    "bfloat16": lambda raw, ggml_type: BFLOAT16 * dequantise(raw, ggml_type).double().abs(),
    "int8_packed": _int8_error,
    "int8_split": _int8_error,
    "int8_whole": _pairs_limited_error,
    "int4_packed": _int4_error,
}
"""Kernel -> how far each of its weights may be from the stored one. A new kernel states its bound here."""
EXACT_PRODUCTS = {"float32", "int8_split", "int8_whole"}
"""Kernels that round neither activations nor results to bfloat16."""
ACTIVATION_STEP = {"int8_split": 1 / SPLIT_LEVELS, "int8_whole": 1 / WHOLE_LEVELS}
"""Kernel -> the step activations are rounded to, of their row's largest value."""


def cases() -> list[tuple[str, str, tuple[int, int]]]:
    """Every kernel, with every stored type it is offered for, on every shape that fits it."""
    return [
        (name, ggml_type, shape)
        for name, kernel in linear_kernels().items()
        for ggml_type in kernel.rank
        for shape in SHAPES
        if kernel.fits(*shape)
    ]


def stored_weights(ggml_type: str, shape: tuple[int, int], *, seed: int = 0) -> Tensor:
    """Bytes as a file would hold them, with rows of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator) * 2.0 ** torch.randint(
        -6, 3, (shape[0], 1), generator=generator
    )
    return quantise(weight, ggml_type)


def packed(kernel: LinearKernel, raw: Tensor, ggml_type: str, *, rows_at_a_time: int = 0) -> nn.Module:
    """The kernel's module, filled at once or in runs."""
    num_rows = raw.shape[0]
    module = kernel.empty(num_rows, dequantise(raw[:1], ggml_type).shape[1])
    for buffer in module.buffers():  # what a run leaves out must not look right by luck
        buffer.view(torch.uint8).fill_(0x7F)
    for first in range(0, num_rows, rows_at_a_time or num_rows):
        kernel.pack(module, first, raw[first : first + (rows_at_a_time or num_rows)], ggml_type, None)
    return module
