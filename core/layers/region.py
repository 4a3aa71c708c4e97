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
            What is compiled.
        examples: a call's arguments. A dimension of `ROWS` rows stands for any number of rows, one of
            `GROUPS` or of `POOL_ROWS` for any other number each; every other is fixed. Integers in them
            are valid as they are (places in another argument), so a probe takes rows of them.
        eager: runs until then, where the function itself would be slow. A compiled one is then adopted
            only where it gives the same bits, at any time.
        fused_multiply_add: `a * b + c` is to be rounded once (`-ffp-contract=fast`).
    """

    ROWS = 48
    """The number of rows in examples; no fixed dimension may have this size."""
    GROUPS = 53
    POOL_ROWS = 211

    def __init__(
        self,
        name: str,
        function: Function,
        examples: Sequence[Tensor],
        *,
        eager: Function | None = None,
        fused_multiply_add: bool = False,
    ) -> None:
        self.name, self.function, self.examples = name, function, tuple(examples)
        self.fused_multiply_add = fused_multiply_add
        self.must_equal = eager is not None
        self.eager: Function = eager or function
        self.run: Function = self.eager

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        return self.run(*tensors)

    def __repr__(self) -> str:
        return f"Region({self.name})"
