"""What stands before a linear and can divide its inputs at no cost."""

from typing import NamedTuple

from torch import Tensor


class Absorber(NamedTuple):
    """A norm's weights, or rows of another linear, whose outputs reach only this linear, each one unmixed.

    Inputs may come in groups that one output makes: all query heads of a group weigh the same values.
    """

    module: str
    """Dotted name of the norm or linear."""
    first_row: int | None = None
    """Of the linear's rows; None: it is a norm."""
    heads: int = 1
    """Inputs are `[heads, repeats, width]`, of which `repeats` share one number."""
    repeats: int = 1
    is_delicate: bool = False
    """The linear's outputs are multiplied with each other, so that its errors weigh more."""

    def shared(self, per_input: Tensor) -> Tensor:
        """The largest of those that share a number. Shapes: `[in]` -> `[in / repeats]`."""
        return per_input.view(self.heads, self.repeats, -1).amax(1).flatten()

    def spread(self, per_output: Tensor) -> Tensor:
        """Each input's number. Shapes: `[in / repeats]` -> `[in]`."""
        return per_output.view(self.heads, 1, -1).expand(-1, self.repeats, -1).flatten()
