"""Linear kernels, one file each: how a weight lies in memory and what computes with it.

`ls` of this folder is the list. A kernel file exports `KERNEL`. This file is the contract, the
finder and the choice.

Invariant of every kernel used in `stable`: a row of the result depends on that row of the input
alone, bit for bit, whatever the number of rows. `core.execution.probe` checks it on the machine at
load, as torch's operators differ between processors; some need their rows padded to a multiple.
"""

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from core.errors import ConfigError


class PackedLinear(Protocol):
    """A module that stands in for `core.layers.Linear`: float32 `[T, in]` -> float32 `[T, out]`.

    Every tensor it reads is a registered buffer, so that memory is counted and the packed form
    can be kept in a file.
    """

    in_features: int
    out_features: int

    def forward(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class LinearKernel:
    """What a kernel file exports as `KERNEL`.

    `rank[ggml_type]` is its place in the order of preference for a stored type (lower is
    better, absent: not offered). `empty(out, in)` builds the module with unset buffers;
    `pack(module, first_row, raw, ggml_type)` fills a run of rows, `row_granularity` at a time.
    """

    name: str
    rank: dict[str, int]
    fits: Callable[[int, int], bool]
    empty: Callable[[int, int], nn.Module]
    pack: Callable[[nn.Module, int, Tensor, str], None]
    row_granularity: int = 1
    numerics: frozenset[str] = frozenset({"stable", "fast"})
    devices: frozenset[str] = frozenset({"cpu", "cuda"})


def linear_kernels() -> dict[str, LinearKernel]:
    """Every kernel by name."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return {name: importlib.import_module(f"{__name__}.{name}").KERNEL for name in names}


class RowPadded(nn.Module):
    """Feeds a kernel whole multiples of rows, where only those are row-invariant."""

    def __init__(self, linear: nn.Module, row_multiple: int) -> None:
        super().__init__()
        self.linear, self.row_multiple = linear, row_multiple

    def forward(self, x: Tensor) -> Tensor:
        num_rows = x.shape[0]
        out: Tensor = self.linear(nn.functional.pad(x, (0, 0, 0, -num_rows % self.row_multiple)))
        return out[:num_rows]


def choose_kernel(
    ggml_type: str,
    shape: tuple[int, int],
    *,
    numerics: str,
    device: str,
    row_multiple: Callable[[LinearKernel], int | None],
) -> tuple[LinearKernel, int]:
    """The best-ranked kernel for a stored type and an `(out, in)` shape, and the multiple of rows it needs.

    Args:
        row_multiple: what a kernel needs on this machine; None where it does not work.
    """
    offered = [
        kernel
        for kernel in linear_kernels().values()
        if ggml_type in kernel.rank
        and numerics in kernel.numerics
        and device in kernel.devices
        and kernel.fits(*shape)
    ]
    for kernel in sorted(offered, key=lambda kernel: kernel.rank[ggml_type]):
        multiple = row_multiple(kernel)
        if multiple is not None:
            return kernel, multiple
    raise ConfigError(
        f"numerics={numerics}: no linear kernel for {ggml_type} weights of shape {shape} is usable here"
    )
