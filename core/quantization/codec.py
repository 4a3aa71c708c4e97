"""How activations enter a linear kernel and how its raw result becomes float32 again.

Both sides are pure element- and row-wise functions, apart from the product between them, so that a
model can join them with its own arithmetic into one compiled region: the end of one linear, the norm
after it and the beginning of the next.

    x float32 [T, in] -> encode -> codes [T, N, in], sides [T, 1] -> product -> raw [T, N, out] -> decode -> y

Shapes: T tokens; N rows of codes for a token, 1 but for the split ones.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

SPLIT_LEVELS = 8127
"""Of a 14-bit activation, to either side of zero: both halves below then fit 7 bits and a sign."""
HALF = 128
WHOLE_LEVELS = 127
SMALLEST = 1e-30


class Codec(NamedTuple):
    """Codecs with equal names are the same functions."""

    name: str
    encode: Callable[[Tensor], tuple[Tensor, ...]]
    """x -> codes, and what `decode` needs of x besides."""
    decode: Callable[..., Tensor]
    """raw, then the same sides -> float32 `[T, out]`."""
    rows: int = 1
    raw_dtype: torch.dtype = torch.float32


def _widen(raw: Tensor) -> Tensor:
    return raw.squeeze(1).float()


def _whole(x: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers from -127 to 127, kept as float32, and a scale per row."""
    highest = x.abs().amax(-1, keepdim=True).clamp(min=SMALLEST)
    return (x * (WHOLE_LEVELS / highest)).round().unsqueeze(1), highest * (1 / WHOLE_LEVELS)


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers of 14 bits as two of 7: `x = (128 * high + low) * scale`, per row.

    The halves are whole numbers from -64 to 64, kept as float32.
    """
    highest = x.abs().amax(-1, keepdim=True).clamp(min=SMALLEST)
    whole = (x * (SPLIT_LEVELS / highest)).round()
    high = (whole * (1 / HALF)).round()
    return torch.stack((high, whole - high * HALF), 1), highest * (1 / SPLIT_LEVELS)


def _join(raw: Tensor, scale: Tensor) -> Tensor:
    return (raw[:, 0] * HALF + raw[:, 1]) * scale


FLOAT32 = Codec("float32", lambda x: (x.unsqueeze(1),), lambda raw: raw.squeeze(1))
BFLOAT16 = Codec("bfloat16", lambda x: (x.bfloat16().unsqueeze(1),), _widen, raw_dtype=torch.bfloat16)
INT8_WHOLE = Codec("int8_whole", _whole, lambda raw, scale: raw.squeeze(1) * scale)
INT8_SPLIT = Codec("int8_split", _split, _join, rows=2)


class Encoded:
    """Mixed into linear kernels' modules: `forward` from the codec's functions and their own `product`."""

    codec: Codec

    def product(self, codes: Tensor) -> Tensor:
        """Shapes: codes `[T, N, in]` -> raw `[T, N, out]`."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        codes, *sides = self.codec.encode(x)
        return self.codec.decode(self.product(codes), *sides)
