"""How KV memory is handed to requests: the contract of a manager, and the finder of one by name.

`paged` is what serves. The others reserve one contiguous run of blocks per request, as servers did
before paging, and exist for comparison: same scheduler, same kernels, other accounting.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from core.request import Request
from core.scheduler.plan import BlockCopy


@dataclass(slots=True, frozen=True)
class KVUsage:
    """A moment's use of the pool by live requests, in tokens."""

    num_live_tokens: int
    """Computed tokens of live requests; shared ones once."""
    num_allocated_tokens: int
    """Slots that live requests hold, filled or not."""
    num_largest_run_blocks: int
    """The most blocks that one reservation could get now."""

    @property
    def waste(self) -> float:
        """The share of allocated slots that holds nothing: reserved too early, or never to be used."""
        if not self.num_allocated_tokens:
            return 0.0
        return 1.0 - self.num_live_tokens / self.num_allocated_tokens


class KVManager(Protocol):
    """KV accounting per request. A request holds blocks from a successful `attach_prefix` to `release`."""

    block_size: int
    num_query_tokens: int
    """Prompt tokens of all requests at their first admission."""
    num_hit_tokens: int
    """Those of them found in the cache."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def num_free_blocks(self) -> int: ...

    @property
    def num_cached_blocks(self) -> int: ...

    @property
    def num_available_blocks(self) -> int:
        """Free, or evictable."""
        ...

    @property
    def num_held_blocks(self) -> int: ...

    @property
    def shares_prefixes(self) -> bool:
        """Whether what one request computed can serve another."""
        ...

    def usage(self) -> KVUsage: ...

    def holds(self, request_id: str) -> bool: ...

    def match_length(self, request: Request) -> int:
        """How many first tokens of a request are cached now. Changes nothing."""
        ...

    def nearest(self, request: Request) -> tuple[int, int | None]:
        """How many first tokens of its prompt are cached, to the token, and the last one's block."""
        ...

    def attach_prefix(self, request: Request, *, room_for: int) -> bool:
        """Give a waiting request what is cached of it, if the rest of `room_for` tokens would fit now.

        Sets `block_table` and `num_computed_tokens`. False, with nothing changed, where there is no room.
        """
        ...

    def try_grow(self, request: Request, num_tokens: int) -> bool:
        """Make room for `num_tokens` more. All or nothing."""
        ...

    def take_copies(self, requests: Iterable[Request]) -> tuple[BlockCopy, ...]:
        """The copies that a plan of these requests must carry, each given once."""
        ...

    def commit(self, request: Request) -> None:
        """Take note of newly computed tokens. O(1) in most steps."""
        ...

    def release(self, request: Request, *, num_kept_tokens: int | None = None) -> None:
        """Take everything back. Not while the request has tokens in flight."""
        ...

    def forget_beyond(self, request: Request, num_kept_tokens: int) -> None:
        """Drop what is cached of a request that holds nothing beyond its first tokens."""
        ...

    def clear(self) -> None:
        """Forget what is cached. Nobody may hold anything."""
        ...

    def check(self, requests: Iterable[Request] = ()) -> None:
        """Assert the invariants, given every request that holds blocks. For tests."""
        ...
