"""What `numerics=stable` needs of this machine, tried out before it is relied on.

torch's products and private operators differ between processors and versions. Each one used in
`stable` is compared, on random data, with itself at other row counts. A kernel that fails is not
chosen; an element-wise function that fails has no stand-in, and loading refuses by name.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from core.attention.tiled import TILE_TOKENS, RowRule
from core.attention.tiled.parts import WHOLE_VECTORS, weights_of
from core.errors import ConfigError
from core.layers.decoder_regions import silu
from core.quantization import LinearKernel, PackedLinear, RowPadded, dequantise, quantise

ROW_MULTIPLES = (1, 2, 4, 8, 16, 32)
ROW_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 17, 31, 33, 64)
ROW_SHIFTS = (0, 1, 7, 32)
"""How far rows are moved against their first place: neighbours come and go between steps."""
MOST_PROBED_FEATURES = 1024
TOLERANCE = 0.02
"""Relative error against float64 above which a kernel counts as wrong (bfloat16 gives about 0.003, 8 bits
on both sides 0.015)."""


def is_row_invariant(compute: Callable[[Tensor], Tensor], inputs: Tensor, row_counts: Sequence[int]) -> bool:
    """Whether rows come out the same, bit for bit, for every number of rows and wherever they stand."""
    whole = compute(inputs)
    return all(
        torch.equal(compute(inputs[first : first + n]), whole[first : first + n])
        for n in row_counts
        for first in ROW_SHIFTS
        if first + n <= len(inputs)
    )


def kernel_row_multiple(
    kernel: LinearKernel, ggml_type: str, shape: tuple[int, int], *, numerics: str
) -> int | None:
    """The multiple of rows at which a kernel is row-invariant (1 outside `stable`); None: unusable.

    Unusable: the operator is missing, refuses the shape, or disagrees with float64.
    """
    out_features, in_features = min(shape[0], MOST_PROBED_FEATURES), shape[1]
    generator = torch.Generator().manual_seed(1)
    raw = quantise(torch.randn(out_features, in_features, generator=generator), ggml_type)
    x = torch.randn(65, in_features, generator=generator)
    try:
        module = kernel.empty(out_features, in_features)
        kernel.pack(module, 0, raw, ggml_type, None)
        result = module(x)
    except (RuntimeError, AttributeError, NotImplementedError):
        return None
    exact = x.double() @ dequantise(raw, ggml_type).double().T
    if not (result.double() - exact).norm() <= TOLERANCE * exact.norm():
        return None
    if numerics != "stable":
        return 1
    for multiple in ROW_MULTIPLES:
        padded = module if multiple == 1 else RowPadded(cast(PackedLinear, module), multiple)
        if is_row_invariant(padded, x, ROW_COUNTS):
            return multiple
    return None


def attention_row_rule(head_dim: int, tile: int, *, num_rows: int) -> RowRule:
    """The weakest rule under which the attention's two products are row-invariant here.

    Args:
        tile: KV tokens of a tile.
        num_rows: most rows of a group, so that long prompts are tried too.

    Raises:
        ConfigError: not even products of one fixed shape agree; `stable` cannot be kept.
    """
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(5, num_rows, head_dim, generator=generator)
    keys = torch.randn(5, head_dim, MOST_TILES * tile, generator=generator)
    weights = torch.rand(5, num_rows, tile, generator=generator)
    values = torch.randn(5, tile, head_dim, generator=generator)
    one_tile = keys[..., :tile].contiguous()
    products = ((q, one_tile), (weights, values))
    for exact in (False, True):
        for multiple in ROW_MULTIPLES:
            rule = RowRule(multiple, exact)
            if all(_bmm_is_invariant(rule, a, b) for a, b in products) and _columns_are_alike(rule, q, keys):
                return replace(rule, accumulates=not exact and _accumulates(rule, weights, values))
    raise ConfigError(
        "numerics=stable: this processor's batched product is not row-invariant; use numerics=fast"
    )


MOST_TILES = 8
"""Of keys in one product."""


def _columns_are_alike(rule: RowRule, q_JMC: Tensor, keys_JCN: Tensor) -> bool:
    """Whether scores of a tile are the same when those of others are computed with them."""
    q_JMC = q_JMC[:, : q_JMC.shape[1] - q_JMC.shape[1] % 32].contiguous()
    tile = keys_JCN.shape[-1] // MOST_TILES
    whole = rule.bmm(q_JMC, keys_JCN)
    for rows in (q_JMC.shape[1], rule.multiple):
        for num_tiles in range(1, MOST_TILES):
            columns = slice(0, num_tiles * tile)
            some = rule.bmm(q_JMC[:, :rows].contiguous(), keys_JCN[..., columns])
            if not torch.equal(some, whole[:, :rows, columns]):
                return False
        last = keys_JCN[..., -tile:].contiguous()
        if not torch.equal(rule.bmm(q_JMC[:, :rows].contiguous(), last), whole[:, :rows, -tile:]):
            return False
    return True


def _accumulates(rule: RowRule, weights_JMC: Tensor, values_JCN: Tensor) -> bool:
    """Whether the operator that adds a product gives what adding it afterwards does."""
    for rows in (rule.multiple, 3 * rule.multiple, weights_JMC.shape[1] // 32 * 32):
        weights = weights_JMC[:, :rows].contiguous()
        for items in (slice(0, 1), slice(0, 5)):
            before = rule.bmm(weights[items].flip(-1).contiguous(), values_JCN[items])
            added = before.clone().baddbmm_(weights[items], values_JCN[items])
            if not torch.equal(added, before + rule.bmm(weights[items], values_JCN[items])):
                return False
    return True


def _bmm_is_invariant(rule: RowRule, a_JMC: Tensor, b_JCN: Tensor) -> bool:
    whole_rows = a_JMC.shape[1] - a_JMC.shape[1] % 32
    whole = rule.bmm(a_JMC[:, :whole_rows].contiguous(), b_JCN)
    windows = [
        slice(first, first + n * rule.multiple)
        for n in (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 64)
        for first in ROW_SHIFTS
        if first + n * rule.multiple <= whole_rows
    ]
    items = (slice(0, 1), slice(0, 2), slice(0, 5), slice(3, 4))
    return all(
        torch.equal(rule.bmm(a_JMC[j, rows].contiguous(), b_JCN[j]), whole[j, rows])
        for rows in windows
        for j in items
    )


NamedFunctions = Sequence[tuple[str, Callable[[Tensor], Tensor]]]
WINDOWS = (
    *((first, count) for first in range(24) for count in range(1, 40)),
    *((1, 1 << 15), (3, 777), (1 << 15, 1 << 15)),
)
"""(first, count): where a buffer's last elements go another way, few of them come out different."""
ELEMENTWISE: NamedFunctions = (("exp", torch.exp), ("silu", silu))


def check_elementwise(functions: NamedFunctions = ELEMENTWISE) -> None:
    """Check that element-wise functions do not depend on an element's place in its buffer.

    Raises:
        ConfigError: they do; `stable` cannot be kept.
    """
    x = torch.randn(1 << 16, generator=torch.Generator().manual_seed(3)) * 6
    for name, function in functions:
        whole = function(x)
        for first, count in WINDOWS:
            if not torch.equal(function(x[first : first + count]), whole[first : first + count]):
                raise ConfigError(
                    f"numerics=stable: {name} depends on an element's place here; use numerics=fast"
                )


def check_weights() -> None:
    """Check that attention's weights are the same whatever is computed with them, on any number of threads.

    Raises:
        ConfigError: they are not; `stable` cannot be kept.
    """
    x = torch.randn(1 << 18, generator=torch.Generator().manual_seed(5)) * 6 - 8
    whole = torch.cat([weights_of(piece.clone()) for piece in x.view(-1, WHOLE_VECTORS).unbind()])
    for count in (96, 120, 3 * 12 * 128, 9 * 100 * 128, 3 * 84 * 8 * 128, len(x)):
        for first in (0, 128, 7):
            some = x[first : first + count].clone()
            if not torch.equal(weights_of(some), whole[first : first + count]):
                raise ConfigError(
                    "numerics=stable: exp2 depends on an element's place here; use numerics=fast"
                )


def check_row_reductions(width: int) -> None:
    """Check that the norm's and the softmax's row reductions do not depend on the number of rows.

    Raises:
        ConfigError: they do; `stable` cannot be kept.
    """
    check_weights()
    check_rows((("rms_norm", nn.RMSNorm(width, eps=1e-5)),), width)
    check_rows((("sum", lambda x: x.sum(-1)),), TILE_TOKENS)


def check_rows(functions: NamedFunctions, width: int) -> None:
    """Check functions of rows of that width. Raises as `check_row_reductions`."""
    rows = torch.randn(200, width, generator=torch.Generator().manual_seed(4))
    with torch.inference_mode():
        for name, compute in functions:
            if not is_row_invariant(compute, rows, ROW_COUNTS):
                raise ConfigError(
                    f"numerics=stable: {name} depends on the number of rows here; use numerics=fast"
                )
