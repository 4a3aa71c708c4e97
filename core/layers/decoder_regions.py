"""What a decoder computes between two products, as regions: each joins the end of one linear with the
beginning of the next.

    product(q, k, v) -> rotated -> attention -> encoded -> product(o) -> added_and_normed
        -> product(gate, up) -> gated -> product(down) -> added_and_normed -> the next layer

Every function treats each row alike and by itself. Shapes: see `core.layers`; codes, sides and raw as in
`core.quantization.codec`.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from core.layers.norm import rms_norm
from core.layers.region import Region
from core.layers.rotary import rotate
from core.quantization.codec import Codec

FINITE_MAX = {torch.float16: 65504.0, torch.bfloat16: 3.3e38, torch.float32: 3.3e38}


class Heads(NamedTuple):
    """How the outputs of the inner projections are cut."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    """Of the norms of queries and keys, where there are."""
    has_bias: bool
    has_norms: bool
    kv_dtype: torch.dtype


def silu(x: Tensor) -> Tensor:
    """`x * sigmoid(x)`, written with operations that treat every element alike.

    torch's own `silu` computes the last elements of a buffer with another exponential than the
    rest: an element's value would depend on its place in the batch.
    """
    return x / (torch.exp(-x) + 1)


def finite(x: Tensor, dtype: torch.dtype) -> Tensor:
    """In the KV's type, and always finite, so that a masked slot counts as nothing."""
    limit = FINITE_MAX[dtype]
    return torch.nan_to_num(x, nan=0.0).clamp(-limit, limit).to(dtype)


def encoded(codec: Codec, width: int) -> Region:
    """x `[T, ...]` -> codes, sides."""
    return Region(
        f"encoded.{codec.name}.{width}", partial(_encode, codec), (torch.zeros(Region.ROWS, width),)
    )


def normed(codec: Codec, width: int, eps: float) -> Region:
    """x, norm weight -> codes, sides."""
    return Region(
        f"normed.{codec.name}.{width}.{eps!r}",
        partial(_norm, codec, eps),
        (torch.zeros(Region.ROWS, width), torch.ones(width)),
    )


def added_and_normed(before: Codec, after: Codec | None, width: int, eps: float) -> Region:
    """x, norm weight, raw, sides -> x + decoded, then its norm's codes and sides.

    Args:
        after: None for the norm itself, float32.
    """
    return Region(
        f"added_and_normed.{before.name}.{after.name if after else 'plain'}.{width}.{eps!r}",
        partial(_add_and_norm, before, after, eps),
        (torch.zeros(Region.ROWS, width), torch.ones(width), *_raw_example(before, width)),
    )


def gated(before: Codec, after: Codec, hidden_width: int) -> Region:
    """raw of gate and up, sides -> codes and sides of `silu(gate) * up`."""
    return Region(
        f"gated.{before.name}.{after.name}.{hidden_width}",
        partial(_gate, before, after),
        _raw_example(before, 2 * hidden_width),
    )


def rotated(before: Codec, heads: Heads) -> Region:
    """cos, sin, [bias], [q norm, k norm], raw of q, k and v, sides -> q, k, v as attention takes them."""
    width = heads.head_dim
    outputs = (heads.num_heads + 2 * heads.num_kv_heads) * width
    table = torch.ones(Region.ROWS, 1, width)
    examples = [table, table]
    examples += [torch.zeros(outputs)] if heads.has_bias else []
    examples += [torch.ones(width), torch.ones(width)] if heads.has_norms else []
    name = ".".join(str(value) for value in heads[:-1])
    return Region(
        f"rotated.{before.name}.{name}.{str(heads.kv_dtype).removeprefix('torch.')}",
        partial(_rotate, before, heads),
        (*examples, *_raw_example(before, outputs)),
    )


def _encode(codec: Codec, x: Tensor) -> tuple[Tensor, ...]:
    return codec.encode(x)


def _norm(codec: Codec, eps: float, x_TE: Tensor, weight_E: Tensor) -> tuple[Tensor, ...]:
    return codec.encode(rms_norm(x_TE, weight_E, eps))


def _add_and_norm(
    before: Codec,
    after: Codec | None,
    eps: float,
    x_TE: Tensor,
    weight_E: Tensor,
    raw: Tensor,
    *sides: Tensor,
) -> tuple[Tensor, ...]:
    x_TE = x_TE + before.decode(raw, *sides)
    normed_TE = rms_norm(x_TE, weight_E, eps)
    return (x_TE, normed_TE) if after is None else (x_TE, *after.encode(normed_TE))


def _gate(before: Codec, after: Codec, raw: Tensor, *sides: Tensor) -> tuple[Tensor, ...]:
    gate_TF, up_TF = before.decode(raw, *sides).chunk(2, -1)
    return after.encode(silu(gate_TF) * up_TF)


def _rotate(before: Codec, heads: Heads, cos: Tensor, sin: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
    bias, norms = rest[: heads.has_bias], rest[heads.has_bias :][: 2 * heads.has_norms]
    y = before.decode(*rest[len(bias) + len(norms) :])
    if bias:
        y = y + bias[0]
    sizes = [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads]
    q_THD, k_TKD, v_TKD = torch.split(y.view(y.shape[0], -1, heads.head_dim), sizes, 1)
    if norms:
        q_THD, k_TKD = (
            rms_norm(x, weight, heads.eps) for x, weight in zip((q_THD, k_TKD), norms, strict=True)
        )
    return (
        rotate(q_THD, cos, sin),
        finite(rotate(k_TKD, cos, sin), heads.kv_dtype),
        finite(v_TKD, heads.kv_dtype),
    )


def _raw_example(codec: Codec, out_features: int) -> tuple[Tensor, ...]:
    _, *sides = codec.encode(torch.zeros(Region.ROWS, 8))
    return (torch.zeros(Region.ROWS, codec.rows, out_features, dtype=codec.raw_dtype), *sides)
