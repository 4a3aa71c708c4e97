"""The fixed pool of KV blocks: which are free, and how many hold each.

A block is room for the keys and values of `block_size` tokens in every layer. This module only
counts; the tensors belong to `core.execution`.
"""

from collections.abc import Iterable

from core.errors import OutOfBlocks


class BlockPool:
    """Reference-counted block ids `0 .. num_blocks - 1`.

    Holders are requests and the radix tree. Touched by the event loop alone; no locks.

    Invariant: a block is on the free list, once, exactly when nobody holds it.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0, f"a pool of {num_blocks} blocks"
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack; low ids leave first
        self._num_holders = [0] * num_blocks

    @property
    def num_blocks(self) -> int:
        return len(self._num_holders)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def num_holders(self, block_id: int) -> int:
        return self._num_holders[block_id]

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, each with one holder. All or nothing.

        Raises:
            OutOfBlocks: fewer than `count` are free; nothing was taken.
        """
        if count > len(self._free):
            raise OutOfBlocks(needed=count, free=len(self._free))
        block_ids = [self._free.pop() for _ in range(count)]
        for block_id in block_ids:
            self._num_holders[block_id] = 1
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Add one holder to each block."""
        num_holders = self._num_holders
        for block_id in block_ids:
            assert num_holders[block_id] > 0, f"block {block_id} is free"
            num_holders[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Drop one holder from each block; a block nobody holds becomes free."""
        num_holders = self._num_holders
        for block_id in block_ids:
            assert num_holders[block_id] > 0, f"block {block_id} is already free"
            num_holders[block_id] -= 1
            if num_holders[block_id] == 0:
                self._free.append(block_id)

    def check(self) -> None:
        """Assert the invariant. Tests call this after every operation."""
        unheld = {block_id for block_id, count in enumerate(self._num_holders) if count == 0}
        assert min(self._num_holders) >= 0, "a block has a negative number of holders"
        assert set(self._free) == unheld, "the free list and the holders disagree"
        assert len(self._free) == len(unheld), "a block is on the free list twice"
