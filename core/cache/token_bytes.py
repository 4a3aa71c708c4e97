"""Token ids as bytes: compared and sliced at memory speed."""

from array import array

from core.cache.content_key import TOKEN_BYTES


def whole_blocks(token_ids: "array[int]", block_size: int) -> bytes:
    """The ids of the full blocks."""
    assert token_ids.itemsize == TOKEN_BYTES
    return memoryview(token_ids)[: len(token_ids) // block_size * block_size].tobytes()


def num_common_tokens(some: bytes, other: bytes) -> int:
    """How many first tokens two runs have in common. Reads each byte about once."""
    low, high = 0, min(len(some), len(other)) // TOKEN_BYTES
    if some.startswith(other[: high * TOKEN_BYTES]):
        return high
    high -= 1
    while low < high:  # the first `low` are equal, and no more than `high` are
        middle = (low + high + 1) // 2
        span = slice(low * TOKEN_BYTES, middle * TOKEN_BYTES)
        if some[span] == other[span]:
            low = middle
        else:
            high = middle - 1
    return low
