"""8-bit weights with one scale per output row, times activations of 14 bits in two halves.

Stores   weight int8 `[out, in]`, scale float32 `[out]`; computes from torch's own packed copy.
Computes whole numbers: an activation row is rounded to 14 bits against its largest value and split in
         two 7-bit halves, which go through one product as two rows. No sum is rounded before its end,
         so a row's bits cannot depend on the rows beside it, nor on the number of threads.
Error    at most scale / 2 per weight, where the file may have a finer scale per 32 weights; 2^-14 of
         a row's largest activation.
Source   torch `quantized::linear_prepack` and `linear_with_input_q_dq_qweight_dq_output_fp32` (FBGEMM).

Why halves: without VNNI instructions a processor adds two products of 8 bits in 16, which saturates
beyond 2 * 127 * 127; with 7 bits and a sign on the activations' side it never does. The weights are
read once for both halves, and reading them is what a step of few rows waits for.
"""

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from core.quantization.codec import INT8_SPLIT, Encoded
from core.quantization.ggml import dequantise
from core.quantization.kernels import LinearKernel

ZERO_POINT = 64
"""Added to the halves, so that they are unsigned."""
MOST_FEATURES = (2**31 - 1) // (127 * 128)
"""Beyond it a sum could leave 32 bits."""


class Int8SplitLinear(Encoded, nn.Module):
    codec = INT8_SPLIT
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
        raw: Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
            rows, 1.0, ZERO_POINT, self._packed
        )
        return raw.view(codes.shape[0], codes.shape[1], self.out_features)

    def _pack(self) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*quantized tensor creation functions")
            quantised = torch._make_per_channel_quantized_tensor(
                self.weight, self.scale.double(), torch.zeros(self.out_features, dtype=torch.int64), 0
            )
        torch.backends.quantized.engine = "fbgemm"
        return torch.ops.quantized.linear_prepack(quantised, None)


def pack(module: nn.Module, first_row: int, raw: Tensor, ggml_type: str) -> None:
    assert isinstance(module, Int8SplitLinear)
    weight = dequantise(raw, ggml_type)
    scale = weight.abs().amax(1).clamp(min=1e-30) / 127
    last_row = first_row + weight.shape[0]
    module.weight[first_row:last_row] = (weight / scale.unsqueeze(-1)).round().clamp(-127, 127)
    module.scale[first_row:last_row] = scale


KERNEL = LinearKernel(
    name="int8_split",
    rank={"Q8_0": 0, "Q4_0": 0, "Q4_1": 0},
    fits=lambda out_features, in_features: in_features <= MOST_FEATURES,
    empty=Int8SplitLinear,
    pack=pack,
    devices=frozenset({"cpu"}),
)
