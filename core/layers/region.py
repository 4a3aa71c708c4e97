"""Parts of a model that are worth compiling: pure functions of tensors, called many times a step.

A model, its codecs and its attention build their regions once, each shared by all layers; whoever has
compiled one puts the result in `run`. Until then, and where nothing can be compiled, the function itself
runs.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

Function = Callable[..., Sequence[Tensor]]


class Region:
    """A pure function of tensors.

    Args:
        name: of the arithmetic and its sizes, e.g. `swiglu.int8_split.1536`: equal names compute the same.
        function: tensors in, tuple of tensors out; no input is changed, and no output is a view of one.
        examples: a call's arguments. A dimension of `ROWS` rows stands for any number of rows, every
            other is fixed.
    """

    ROWS = 48
    """The number of rows in examples; no fixed dimension may have this size."""

    def __init__(self, name: str, function: Function, examples: Sequence[Tensor]) -> None:
        self.name, self.function, self.examples = name, function, tuple(examples)
        self.run: Function = function

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        return self.run(*tensors)

    def __repr__(self) -> str:
        return f"Region({self.name})"
