"""8-bit weights with one scale per output row, times activations of 14 bits in two halves.

Stores   weight int8 `[out, in]`, scale float32 `[out]`; computes from torch's own packed copy.
Computes whole numbers: an activation row is rounded to 14 bits against its largest value and split in
         two 7-bit halves, which go through one product as two rows. No sum is rounded before its end,
         so a row's bits cannot depend on the rows beside it, nor on the number of threads.
Error    at most scale / 2 per weight, where the file may have a finer scale per 32 weights; 2^-14 of
         a row's largest activation.
Source   `core.quantization.int8`.

With halves of 7 bits and a sign, 16-bit partial sums hold any weights. The weights are read once for
both halves, and reading them is what a step of few rows waits for.
"""

from core.quantization.codec import INT8_SPLIT
from core.quantization.int8 import MOST_FEATURES, Int8Linear, pack_int8
from core.quantization.kernels import LinearKernel


class Int8SplitLinear(Int8Linear):
    codec = INT8_SPLIT
    zero_point = 64
    pairs_limited = False


KERNEL = LinearKernel(
    name="int8_split",
    rank={"Q8_0": 0, "Q4_0": 0, "Q4_1": 0},
    fits=lambda out_features, in_features: in_features <= MOST_FEATURES,
    empty=Int8SplitLinear,
    pack=pack_int8,
    devices=frozenset({"cpu"}),
    is_calibrated=True,
)
