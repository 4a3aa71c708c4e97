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
