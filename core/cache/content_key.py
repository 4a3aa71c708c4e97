"""The name of a committed block by what it holds: for tiers, events and replicas.

    root key  = SHA-256("N" | length of namespace | namespace)
    block key = SHA-256("B" | parent key | length of tokens | tokens)

Lengths are 8 bytes, tokens 4 bytes each, all little-endian, so every machine gives the same key
and no two lists of fields run together. Inside this process a prefix hit is decided by comparing
token ids; keys are computed when somebody asks, never on the way of a step.
"""

import hashlib
import sys
from array import array

TOKEN_BYTES = 4


def root_key(namespace: bytes) -> bytes:
    """The parent key of a namespace's first blocks."""
    return hashlib.sha256(b"N" + len(namespace).to_bytes(8, "little") + namespace).digest()


def block_key(parent_key: bytes, token_bytes: bytes) -> bytes:
    """The key of one block.

    Args:
        token_bytes: the block's ids as native 32-bit integers.
    """
    if sys.byteorder == "big":
        swapped = array("i", token_bytes)
        swapped.byteswap()
        token_bytes = swapped.tobytes()
    return hashlib.sha256(b"B" + parent_key + len(token_bytes).to_bytes(8, "little") + token_bytes).digest()
