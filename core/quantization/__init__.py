"""How weights are stored in files (`ggml.py`) and in memory (`kernels/`, one file per linear kernel).

A file format says what the numbers are; a kernel says how a linear computes with them. Loading
asks `choose_kernel` once per weight, so that a weight has one arithmetic for every row count.
"""

from core.quantization.ggml import QuantisedRows, decode_rows, dequantise, quantise
from core.quantization.kernels import LinearKernel, PackedLinear, RowPadded, choose_kernel

__all__ = [
    "LinearKernel",
    "PackedLinear",
    "QuantisedRows",
    "RowPadded",
    "choose_kernel",
    "decode_rows",
    "dequantise",
    "quantise",
]
