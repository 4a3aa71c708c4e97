"""What the scheduler counts, as plain numbers."""

import msgspec


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    """A moment's queue lengths and blocks, and totals since the start.

    `num_free_blocks + num_evictable_blocks + num_held_blocks` is the pool. `num_cached_blocks` are
    those in the prefix tree, held or evictable.
    """

    num_waiting: int
    num_running: int
    num_steps_in_flight: int
    num_free_blocks: int
    num_evictable_blocks: int
    num_held_blocks: int
    num_cached_blocks: int
    num_query_tokens: int
    """Prompt tokens at first admission, total."""
    num_hit_tokens: int
    """Those of them found in the prefix cache, total."""
    num_computed_tokens: int
    """Tokens of confirmed steps, recomputed ones included, total."""
    num_output_tokens: int
    num_preemptions: int
    num_finished: dict[str, int]
    """Finish reason -> requests that ended so, total."""
    num_live_tokens: int = 0
    """Computed tokens of live requests, shared ones once."""
    num_allocated_tokens: int = 0
    """Slots of the blocks that live requests hold."""

    @property
    def waste(self) -> float:
        """The share of the allocated slots in which nothing stands; 0 where nothing is allocated."""
        return 1.0 - self.num_live_tokens / self.num_allocated_tokens if self.num_allocated_tokens else 0.0
