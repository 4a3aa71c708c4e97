"""Where a server's memory went, as far as it tells."""

import msgspec

from loadtest.servers import ServerState


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """The server's memory at the end of a pass, and its KV cache at the fullest look. None is unknown."""

    weights_bytes: int | None = None
    kv_pool_bytes: int | None = None
    kv_live_bytes: int | None = None
    kv_cached_bytes: int | None = None
    other_bytes: int | None = None
    """The process less weights and pool."""
    kv_waste_share: float | None = None
    """Of the bytes allocated to live requests, those without a token in them."""
    kv_idle_share: float | None = None
    """Of the pool, what neither requests nor reuse ever held."""


def memory_of(state: ServerState, *, peak: ServerState | None = None) -> Memory:
    """
    Args:
        state: at the end of the pass.
        peak: the look with the most live KV bytes, where looks were taken during the pass.
    """
    full = peak or state
    other = waste = idle = None
    if state.server_bytes is not None and state.weights_bytes is not None and state.kv_pool_bytes is not None:
        rest = state.server_bytes - state.weights_bytes - state.kv_pool_bytes
        other = rest if rest >= 0 else None  # a pool that was never touched is not in the process yet
    if full.kv_live_bytes and full.kv_live_token_bytes is not None:
        waste = 1.0 - full.kv_live_token_bytes / full.kv_live_bytes
    if full.kv_pool_bytes and full.kv_live_bytes is not None and full.kv_cached_bytes is not None:
        idle = 1.0 - (full.kv_live_bytes + full.kv_cached_bytes) / full.kv_pool_bytes
    return Memory(
        weights_bytes=state.weights_bytes,
        kv_pool_bytes=state.kv_pool_bytes,
        kv_live_bytes=full.kv_live_bytes,
        kv_cached_bytes=full.kv_cached_bytes,
        other_bytes=other,
        kv_waste_share=waste,
        kv_idle_share=idle,
    )
