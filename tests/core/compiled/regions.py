"""Small regions, and functions that stand in for compiled ones."""

from functools import partial

import torch
from torch import Tensor

from core.layers.region import Region

WIDTH = 24


def scaled(factor: float, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """The same bits however it is compiled: one product and one sum per number."""
    return (x * factor + weight,)


def normed(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """A reduction over each row: compiled, its order is another."""
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
    return x * scale * weight, scale


def picked(places: Tensor, pool: Tensor) -> tuple[Tensor, ...]:
    return (pool[places].sum(1),)


def centred(x: Tensor) -> tuple[Tensor, ...]:
    """Not a region's function: a row depends on its company."""
    return (x - x.mean(0),)


def scaled_region(factor: float = 0.5) -> Region:
    return Region(
        f"scaled.{factor}.{WIDTH}",
        partial(scaled, factor),
        (torch.zeros(Region.ROWS, WIDTH), torch.ones(WIDTH)),
    )


def normed_region() -> Region:
    return Region(f"normed.{WIDTH}", normed, (torch.zeros(Region.ROWS, WIDTH), torch.ones(WIDTH)))


def picked_region() -> Region:
    places = torch.arange(Region.ROWS * 3).remainder(Region.POOL_ROWS).view(Region.ROWS, 3)
    return Region("picked", picked, (places, torch.zeros(Region.POOL_ROWS, WIDTH)), eager=picked)
