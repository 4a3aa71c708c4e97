"""What the compiling child is told, in plain values: the regions that are wanted."""

import msgspec
import torch
from torch import Tensor

from core.compiled.references import Plain, describe, restore
from core.layers.region import Region


class Example(msgspec.Struct, frozen=True):
    """One argument of a call. Floats are of no interest; whole numbers are, as they may be places."""

    dtype: str
    shape: tuple[int, ...]
    numbers: list[int] | None = None


class WantedRegion(msgspec.Struct, frozen=True):
    name: str
    key: str
    function: Plain
    eager: Plain
    examples: list[Example]
    fused_multiply_add: bool

    def build(self) -> Region:
        """The region again, in another process."""
        function = restore(self.function)
        return Region(
            self.name,
            function,
            [_tensor(example) for example in self.examples],
            eager=None if self.eager is None else restore(self.eager),
            fused_multiply_add=self.fused_multiply_add,
        )


class CompileJob(msgspec.Struct, frozen=True):
    """The first line of the child's input. The end of its input ends the child."""

    folder: str
    wanted: list[WantedRegion]


def wanted_region(region: Region, key: str) -> WantedRegion:
    """Raises `NoReference` for a function that another process cannot be told of."""
    return WantedRegion(
        region.name,
        key,
        describe(region.function),
        describe(region.eager) if region.must_equal else None,
        [_example(tensor) for tensor in region.examples],
        region.fused_multiply_add,
    )


def _example(tensor: Tensor) -> Example:
    numbers = None if tensor.dtype.is_floating_point else [int(n) for n in tensor.flatten().tolist()]
    return Example(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), numbers)


def _tensor(example: Example) -> Tensor:
    dtype = getattr(torch, example.dtype)
    if example.numbers is None:
        return torch.ones(example.shape, dtype=dtype)
    return torch.tensor(example.numbers, dtype=dtype).view(example.shape)
