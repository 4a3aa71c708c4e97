"""Linear kernels, one file each: how a weight lies in memory and what computes with it.

`ls` of this folder is the list. A kernel file exports `KERNEL`. This file is the contract, the
finder and the choice.

Invariant of every kernel used in `stable`: a row of the result depends on that row of the input
alone, bit for bit, whatever the number of rows. `core.execution.probe` checks it on the machine at
load, as torch's operators differ between processors; some need their rows padded to a multiple.
"""

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from core.errors import ConfigError
from core.quantization.codec import Codec, Encoded


class PackedLinear(Protocol):
    """A module that stands in for `core.layers.Linear`: float32 `[T, in]` -> float32 `[T, out]`.

    `forward(x)` is `codec.decode(product(codes), *sides)` of `codec.encode(x)`. Every tensor a fresh
    module reads is a registered buffer, so that memory is counted and the packed form can be kept in a
    file. A kernel with a form of its own in memory has `seal()`, called once all buffers are filled.
    """

    in_features: int
    out_features: int
    codec: Codec

    def product(self, codes: Tensor) -> Tensor: ...

    def forward(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class LinearKernel:
    """What a kernel file exports as `KERNEL`.

    `rank[ggml_type]` is its place in the order of preference for a stored type (lower is
    better, absent: not offered). `empty(out, in)` builds the module with unset buffers;
    `pack(module, first_row, raw, ggml_type, factors)` fills a run of rows, `row_granularity` at a time.
    `factors` multiply the run's weights, to which they are broadcast (None: as they are).
    """

    name: str
    rank: dict[str, int]
    fits: Callable[[int, int], bool]
    empty: Callable[[int, int], nn.Module]
    pack: Callable[[nn.Module, int, Tensor, str, Tensor | None], None]
    row_granularity: int = 1
    numerics: frozenset[str] = frozenset({"stable", "fast"})
    devices: frozenset[str] = frozenset({"cpu", "cuda"})
    is_calibrated: bool = False
    """Whether it gains by what `core.execution.calibration` finds out."""


def linear_kernels() -> dict[str, LinearKernel]:
    """Every kernel by name."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return {name: importlib.import_module(f"{__name__}.{name}").KERNEL for name in names}


class RowPadded(Encoded, nn.Module):
    """Feeds a kernel whole multiples of rows, where only those are row-invariant."""

    linear: PackedLinear

    def __init__(self, linear: PackedLinear, row_multiple: int) -> None:
        super().__init__()
        self.linear, self.row_multiple = linear, row_multiple
        self.codec = linear.codec
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def product(self, codes: Tensor) -> Tensor:
        num_rows = codes.shape[0]
        padding = (0, 0, 0, 0, 0, -num_rows % self.row_multiple)
        return self.linear.product(nn.functional.pad(codes, padding))[:num_rows]


def choose_kernel(
    ggml_types: Sequence[str],
    shape: tuple[int, int],
    *,
    boundaries: Sequence[int] = (0,),
    numerics: str,
    device: str,
    row_multiple: Callable[[LinearKernel], int | None],
    among: Callable[[LinearKernel], bool] = lambda kernel: True,
) -> tuple[LinearKernel, int]:
    """The best-ranked kernel for stored types and an `(out, in)` shape, and the multiple of rows it needs.

    Args:
        ggml_types: of the stored rows, which may differ where a weight is made of several.
        boundaries: rows at which another stored weight begins.
        row_multiple: what a kernel needs on this machine; None where it does not work.
        among: the kernels that may be chosen.
    """
    offered = [
        kernel
        for kernel in linear_kernels().values()
        if all(ggml_type in kernel.rank for ggml_type in ggml_types)
        and numerics in kernel.numerics
        and device in kernel.devices
        and kernel.fits(*shape)
        and among(kernel)
        and not any(row % kernel.row_granularity for row in boundaries)
    ]
    for kernel in sorted(offered, key=lambda kernel: max(kernel.rank[name] for name in ggml_types)):
        multiple = row_multiple(kernel)
        if multiple is not None:
            return kernel, multiple
    raise ConfigError(
        f"numerics={numerics}: no linear kernel for {', '.join(ggml_types)} weights of shape {shape} "
        "is usable here"
    )
