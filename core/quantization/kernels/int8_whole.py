"""8-bit weights with one scale per output row, times activations of 8 bits with one scale per row.

Stores   weight int8 `[out, in]`, scale float32 `[out]`; computes from torch's own packed copy.
Computes whole numbers, as `int8_split` does, at half its work and with far coarser activations: only
         calibration chooses it, for linears where that was measured to do little harm.
Error    at most scale / 2 per weight, where a row's scale is up to twice that of `int8_split`: no two
         neighbouring weights may add up to more than 128; 2^-8 of a row's largest activation.
Source   `core.quantization.int8`.
"""

from core.quantization.codec import INT8_WHOLE
from core.quantization.int8 import MOST_FEATURES, Int8Linear, pack_int8
from core.quantization.kernels import LinearKernel


class Int8WholeLinear(Int8Linear):
    codec = INT8_WHOLE
    zero_point = 128
    pairs_limited = True


KERNEL = LinearKernel(
    name="int8_whole",
    rank={"Q8_0": 8, "Q4_0": 8, "Q4_1": 8},
    fits=lambda out_features, in_features: in_features <= MOST_FEATURES,
    empty=Int8WholeLinear,
    pack=pack_int8,
    devices=frozenset({"cpu"}),
    is_calibrated=True,
)
