"""Products of whole numbers of 8 bits, which no order of summation can change.

Source: torch `quantized::linear_prepack` and `linear_with_input_q_dq_qweight_dq_output_fp32` (FBGEMM).

Without VNNI instructions a processor adds two products of 8 bits in 16, which saturates beyond 2^15 - 1;
each kernel says how it stays below that for neighbouring inputs whatever they are.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from core.quantization.codec import SMALLEST, Encoded
from core.quantization.ggml import dequantise

MOST_FEATURES = (2**31 - 1) // (127 * 255)
"""Beyond it a sum could leave 32 bits."""
LARGEST = 127
# The operator itself: the wrapper around it looks at every argument for a fake one, 15 us a call.
_product: Callable[..., Tensor] = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32._op  # noqa: SLF001
_PAIR_LIMIT = 128
"""Of two neighbouring weights' sum: 255 * 128 stays below 2^15."""


def rounded_rows(weight: Tensor, *, pairs_limited: bool) -> tuple[Tensor, Tensor]:
    """Whole numbers from -127 to 127 and a scale per row.

    Args:
        pairs_limited: no two neighbours `2i, 2i + 1` of a row may add up to more than 128, to either side.

    Shapes: weight float32 `[out, in]` -> int8 `[out, in]`, float32 `[out]`.
    """
    scale = weight.abs().amax(1) / LARGEST
    if pairs_limited:
        even = weight if weight.shape[1] % 2 == 0 else nn.functional.pad(weight, (0, 1))
        pairs = even.view(weight.shape[0], -1, 2)
        highest = torch.maximum(pairs.clamp(min=0).sum(-1).amax(1), -pairs.clamp(max=0).sum(-1).amin(1))
        scale = torch.maximum(scale, highest / (_PAIR_LIMIT - 1))  # rounding may add a half to each
    scale = scale.clamp(min=SMALLEST)
    return (weight / scale.unsqueeze(-1)).round().clamp(-LARGEST, LARGEST).to(torch.int8), scale


class Int8Linear(Encoded, nn.Module):
    """What the exact 8-bit kernels share. A fresh module computes from its buffers, a sealed one without.

    Stores   weight int8 `[out, in]`, scale float32 `[out]`.
    """

    zero_point: int
    """Added to the codes, so that they are unsigned."""
    pairs_limited: bool
    """As `rounded_rows` says; needed where codes have all 8 bits."""
    weight: Tensor
    scale: Tensor

    def __init__(self, out_features: int, in_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.register_buffer("weight", torch.empty(out_features, in_features, dtype=torch.int8))
        self.register_buffer("scale", torch.empty(out_features))
        self._packed: Any = None

    def seal(self) -> None:
        """Make torch's packed copy and let go of the buffers: from here on only the copy is read."""
        self._packed = self._pack()
        self.weight = self.weight.new_empty(0, self.in_features)
        self.scale = self.scale.new_empty(0)

    def product(self, codes: Tensor) -> Tensor:
        if self._packed is None:
            self._packed = self._pack()
        rows = codes.view(-1, self.in_features)
        raw = _product(rows, 1.0, self.zero_point, self._packed)
        return raw.view(codes.shape[0], codes.shape[1], self.out_features)

    def _pack(self) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*quantized tensor creation functions")
            quantised = torch._make_per_channel_quantized_tensor(  # noqa: SLF001 -- torch's own way to hand over whole numbers
                self.weight, self.scale.double(), torch.zeros(self.out_features, dtype=torch.int64), 0
            )
        torch.backends.quantized.engine = "fbgemm"
        return torch.ops.quantized.linear_prepack(quantised, None)


def pack_int8(module: nn.Module, first_row: int, raw: Tensor, ggml_type: str, factors: Tensor | None) -> None:
    """Round a run of stored rows, as `LinearKernel.pack` says."""
    assert isinstance(module, Int8Linear)
    weight = dequantise(raw, ggml_type)
    rows = slice(first_row, first_row + weight.shape[0])
    module.weight[rows], module.scale[rows] = rounded_rows(
        weight if factors is None else weight * factors, pairs_limited=module.pairs_limited
    )
