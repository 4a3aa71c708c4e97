"""One function of a region's two compiled variants, chosen per call by the number of rows."""

from collections.abc import Sequence

import torch
from torch import Tensor

from core.compiled.artifacts import MOST_FEW_ROWS, RunList
from core.compiled.keys import row_dims
from core.layers.region import Function, Region


def by_rows(region: Region, *, few: RunList, many: RunList) -> Function:
    """Raises, when called, `RuntimeError` for shapes or types that are not the examples'."""
    place, dim = _place_of_rows(region)

    def run(*tensors: Tensor) -> Sequence[Tensor]:
        chosen = few if tensors[place].shape[dim] <= MOST_FEW_ROWS else many
        try:
            return chosen(tensors)
        except RuntimeError:
            # Compiled code is for dense tensors, and wants even meaningless strides to be the usual ones.
            return chosen([tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors])

    return run


def _place_of_rows(region: Region) -> tuple[int, int]:
    """The first tensor that has rows, and the dimension that they are."""
    for place, dim in enumerate(row_dims(region.examples)):
        if dim is not None:
            return place, dim
    raise AssertionError(f"{region.name}: no example has {Region.ROWS} rows")
