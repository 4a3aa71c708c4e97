"""Finds the manager of a kind of KV reservation."""

from core.cache.manager import KVCacheManager
from core.cache.reservation import KVManager
from core.cache.reserved import (
    Reservation,
    ReservedManager,
    reserve_max,
    reserve_oracle,
    reserve_power_of_two,
)
from core.config import KVReservation

RESERVATIONS: dict[KVReservation, Reservation] = {
    "max": reserve_max,
    "power_of_two": reserve_power_of_two,
    "oracle": reserve_oracle,
}
"""All but `paged`, which reserves nothing."""


def make_manager(
    kind: KVReservation, num_blocks: int, block_size: int, *, prefix_cache: bool, max_request_tokens: int
) -> KVManager:
    """The manager of a pool. Only `paged` reuses prefixes; `EngineConfig` refuses that for the others.

    Args:
        max_request_tokens: as long as a request can ever become, the pool's size aside.
    """
    reservation = RESERVATIONS.get(kind)
    if reservation is None:
        return KVCacheManager(num_blocks, block_size, prefix_cache=prefix_cache)
    assert not prefix_cache, f"no prefix is reused where KV is reserved ({kind})"
    return ReservedManager(
        num_blocks, block_size, reservation=reservation, max_request_tokens=max_request_tokens
    )
