"""How many rows a batched product must have to be row-invariant on this machine."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowRule:
    """Found at load by trying.

    Rows are padded to a multiple of `multiple`; `exact` means that only exactly `multiple` rows
    will do, so that larger products are cut. `accumulates`: adding a product to a tensor within the
    operator gives the same bits as adding it afterwards.
    """

    multiple: int = 1
    exact: bool = False
    accumulates: bool = False

    def bmm(self, a_JMC: Tensor, b_JCN: Tensor) -> Tensor:
        """Batched product of an already padded `a`."""
        if not self.exact or a_JMC.shape[1] == self.multiple:
            return torch.bmm(a_JMC, b_JCN)
        starts = range(0, a_JMC.shape[1], self.multiple)
        parts = [torch.bmm(a_JMC.narrow(1, start, self.multiple).contiguous(), b_JCN) for start in starts]
        return torch.cat(parts, 1)

    def add_bmm(self, sum_JMN: Tensor, a_JMC: Tensor, b_JCN: Tensor) -> None:
        """Add the product to a tensor, in place."""
        if self.accumulates:
            sum_JMN.baddbmm_(a_JMC, b_JCN)
        else:
            sum_JMN.add_(self.bmm(a_JMC, b_JCN))
