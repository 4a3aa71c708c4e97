"""Who holds which KV blocks: the one place where pool, tree and requests meet.

The blocks of a running request, in the order of its block table:

    | committed: the tree's, locked and shared | private: full or not, still written |
    0                       num_committed_blocks                    len(block_table)

`commit` moves the border to the right as tokens are really computed. At every step
free + evictable + held = total, where held counts each block of a live request once.

A plan in flight names blocks by id, so nothing it names may be reused before its update:
`release` is called only when the request has no tokens in flight, and a block that a commit
replaced by the tree's own stays with the request (`retired`) until then.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from core.cache.block_pool import BlockPool
from core.cache.radix_tree import Node, RadixTree
from core.cache.retention import RetentionPolicy
from core.request import Request


@dataclass(slots=True, eq=False)
class _Holding:
    """What one request holds besides its block table. `node` is locked; None without a prefix cache."""

    node: Node | None
    num_committed_blocks: int
    retired: list[int] = field(default_factory=list)


class KVCacheManager:
    """KV accounting per request. Torch-free; touched by the event loop alone.

    A request holds blocks from a successful `attach_prefix` to `release`.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_cache: bool = True,
        retention: RetentionPolicy | None = None,
    ) -> None:
        self.block_size = block_size
        self._pool = BlockPool(num_blocks)
        self._tree = RadixTree(block_size, retention=retention)
        self._prefix_cache = prefix_cache
        self._holdings: dict[str, _Holding] = {}
        self.num_query_tokens = 0
        """Prompt tokens of all requests at their first admission."""
        self.num_hit_tokens = 0
        """Those of them found in the cache."""

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free

    @property
    def num_cached_blocks(self) -> int:
        """Blocks in the tree, in use or not."""
        return self._tree.num_blocks

    @property
    def num_available_blocks(self) -> int:
        """Blocks a request could get now: free, or evictable."""
        return self._pool.num_free + self._tree.num_evictable

    @property
    def num_held_blocks(self) -> int:
        return self._pool.num_blocks - self.num_available_blocks

    def holds(self, request_id: str) -> bool:
        return request_id in self._holdings

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def attach_prefix(self, request: Request, *, room_for: int) -> bool:
        """Give a waiting request its cached prefix, if the rest of `room_for` tokens would fit now.

        Sets `block_table` and `num_computed_tokens`; at least one known token is left to compute.
        A request that must compute its prompt is given none of it. Returns False, with nothing
        changed, where there is no room.
        """
        assert request.request_id not in self._holdings, f"{request.request_id} has its prefix already"
        assert not request.block_table
        node: Node | None = None
        block_ids: list[int] = []
        num_tokens = 0
        if self._prefix_cache:
            most = 0 if request.must_compute_prompt else -1
            node, block_ids, num_tokens = self._tree.match(request.namespace, request.token_ids[:most])
        num_unlocked = self._tree.num_unlocked_blocks(node) if node else 0
        if self.num_blocks_for(room_for) - len(block_ids) > self.num_available_blocks - num_unlocked:
            return False
        if node:
            self._tree.lock(node)
            self._pool.share(block_ids)
        self._holdings[request.request_id] = _Holding(node, len(block_ids))
        request.block_table = array("i", block_ids)
        request.num_computed_tokens = num_tokens
        if request.num_cached_tokens is None:
            request.num_cached_tokens = num_tokens
            self.num_query_tokens += request.num_prompt_tokens
            self.num_hit_tokens += num_tokens
        return True

    def try_grow(self, request: Request, num_tokens: int) -> bool:
        """Make room for `num_tokens` more, evicting if needed. All or nothing."""
        end = request.num_computed_tokens + request.num_scheduled_tokens + num_tokens
        missing = -(-end // self.block_size) - len(request.block_table)
        if missing <= 0:
            return True
        if missing > self.num_available_blocks:
            return False
        if missing > self._pool.num_free:
            self._pool.release(self._tree.evict(missing - self._pool.num_free))
        request.block_table.extend(self._pool.allocate(missing))
        return True

    def commit(self, request: Request) -> None:
        """Put the blocks that are full of computed tokens into the tree. O(1) where there is no new one."""
        holding = self._holdings[request.request_id]
        if holding.retired and request.num_scheduled_tokens == 0:
            self._pool.release(holding.retired)
            holding.retired = []
        first, end = holding.num_committed_blocks, request.num_computed_tokens // self.block_size
        if first == end or holding.node is None:
            return
        old = holding.node
        mine = request.block_table[first:end]
        token_ids = request.token_ids[first * self.block_size : end * self.block_size]
        holding.node, kept = self._tree.extend(old, token_ids, mine)
        holding.num_committed_blocks = end
        if holding.node is not old:
            self._tree.lock(holding.node)
            self._tree.unlock(old)
        # The tree is a holder of its own. The request holds the tree's block in place of a duplicate.
        self._pool.share(kept)
        duplicates = [block_id for block_id, keeper in zip(mine, kept, strict=True) if block_id != keeper]
        request.block_table[first:end] = array("i", kept)
        self._retire(request, holding, duplicates)

    def release(self, request: Request, *, num_kept_tokens: int | None = None) -> None:
        """Take everything back: on finish, preempt and abort. What is committed stays cached.

        Args:
            num_kept_tokens: the request turned out to end here; blocks beyond leave the tree too,
                unless another request holds them.
        """
        assert request.num_scheduled_tokens == 0, f"{request.request_id} has tokens in flight"
        holding = self._holdings.pop(request.request_id)
        self._pool.release(reversed(request.block_table))
        self._pool.release(holding.retired)
        request.block_table = array("i")
        if holding.node is not None:
            kept = holding.num_committed_blocks
            if num_kept_tokens is not None:
                kept = min(kept, num_kept_tokens // self.block_size)
            node = holding.node
            self._tree.unlock(node)
            self._pool.release(self._tree.discard(node, holding.num_committed_blocks - kept))

    def forget_beyond(self, request: Request, num_kept_tokens: int) -> None:
        """The same for a request that holds nothing now, but did before it was preempted."""
        assert request.request_id not in self._holdings
        node, block_ids, _ = self._tree.match(request.namespace, request.token_ids)
        excess = max(0, len(block_ids) - num_kept_tokens // self.block_size)
        self._pool.release(self._tree.discard(node, excess))

    def clear(self) -> None:
        """Empty the tree: the tensors behind it are gone. Nobody may hold anything."""
        assert not self._holdings, "requests still hold blocks"
        self._pool.release(self._tree.evict(self._tree.num_evictable))

    def check(self, requests: Iterable[Request] = ()) -> None:
        """Assert the invariants, given every request that holds blocks. For tests."""
        requests = list(requests)
        assert {request.request_id for request in requests} == self._holdings.keys()
        self._pool.check()
        self._tree.check()
        num_holders = [0] * self.num_blocks
        held: set[int] = set()
        for node in self._tree.nodes():
            for block_id in node.block_ids:
                num_holders[block_id] += 1
        for request in requests:
            holding = self._holdings[request.request_id]
            for block_id in (*request.block_table, *holding.retired):
                num_holders[block_id] += 1
                held.add(block_id)
            self._check_holding(request, holding)
        assert num_holders == [self._pool.num_holders(block_id) for block_id in range(self.num_blocks)]
        assert self._pool.num_free + self._tree.num_evictable + len(held) == self.num_blocks

    def _check_holding(self, request: Request, holding: _Holding) -> None:
        table = request.block_table
        assert len(set(table)) == len(table), "a block stands twice in a table"
        assert request.num_computed_tokens + request.num_scheduled_tokens <= len(table) * self.block_size
        if holding.node is None:
            assert holding.num_committed_blocks == 0
            return
        path: list[int] = []
        step: Node | None = holding.node
        while step is not None:
            assert step.lock_count > 0, "a request's prefix is not locked"
            path = step.block_ids + path
            step = step.parent
        assert list(table[: holding.num_committed_blocks]) == path, "table and tree disagree"

    def _retire(self, request: Request, holding: _Holding, duplicates: list[int]) -> None:
        if request.num_scheduled_tokens == 0:
            self._pool.release(duplicates)
        else:
            holding.retired += duplicates
