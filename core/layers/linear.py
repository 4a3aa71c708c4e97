"""The dense linear that models are written with. Loading replaces it by a packed kernel's module."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from core.quantization.codec import FLOAT32, Encoded


class Linear(Encoded, nn.Module):
    """`y = x @ weight.T`, float32 in and out; with `bias`, that is added after decoding.

    The weight has no memory (device "meta") until loading gives it some.

    Args:
        parts: stored linears whose outputs lie one after the other here, name -> number of outputs:
            one product instead of several. Their names stand where this one's own would.

    Shapes: weight `[out, in]`; x `[T, in]` -> `[T, out]`.
    """

    codec = FLOAT32

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        parts: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__()
        assert parts is None or sum(parts.values()) == out_features
        self.in_features, self.out_features, self.parts = in_features, out_features, parts
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device="meta"), requires_grad=False)
        self.bias = (
            nn.Parameter(torch.empty(out_features, device="meta"), requires_grad=False) if bias else None
        )

    def product(self, codes: Tensor) -> Tensor:
        return nn.functional.linear(codes, self.weight)
