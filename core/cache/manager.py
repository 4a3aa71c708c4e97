"""Who holds which KV blocks: the one place where pool, tree and requests meet.

The blocks of a running request, in the order of its block table:

    | committed: the tree's, locked and shared | private: full or not, still written |
    0                       num_committed_blocks                    len(block_table)

`commit` moves the border to the right as tokens are really computed. At every step
free + evictable + held = total, where held counts each block of a live request once.

A plan in flight names blocks by id, so nothing it names may be reused before its update:
`release` is called only when the request has no tokens in flight, and a block that a commit
replaced by the tree's own stays with the request (`retired`) until then.

Where a prompt parts from the tree inside a block, the rows before that point are copied into the
request's own block by the first plan that names it. The block they come from stays locked until
that plan has landed: until the request's first commit, or its release.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from core.cache.block_pool import BlockPool
from core.cache.radix_tree import Node, RadixTree
from core.cache.reservation import KVUsage
from core.cache.retention import RetentionPolicy
from core.cache.session_tails import SessionTails
from core.request import Request
from core.scheduler.plan import BlockCopy


@dataclass(slots=True, eq=False)
class _Holding:
    """What one request holds besides its block table. `node` is locked; None without a prefix cache."""

    node: Node | None
    num_committed_blocks: int
    retired: list[int] = field(default_factory=list)
    source: Node | None = None
    """One locked block, from which the first rows of the block after `num_committed_blocks` are copied."""
    num_copied_tokens: int = 0
    """That many rows."""
    num_private_tokens: int = 0
    """Computed tokens in private blocks, as counted in the manager's total."""


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
        self._tails = SessionTails(self._tree)
        self._prefix_cache = prefix_cache
        self._holdings: dict[str, _Holding] = {}
        self._uncopied: set[str] = set()
        """Requests whose copies are in no plan yet."""
        self._num_private_tokens = 0
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

    @property
    def shares_prefixes(self) -> bool:
        """Whether what one request computed can serve another."""
        return self._prefix_cache

    def usage(self) -> KVUsage:
        """Live tokens, shared ones once, and the slots allocated for them."""
        num_locked_blocks = self._tree.num_blocks - self._tree.num_evictable
        return KVUsage(
            num_live_tokens=num_locked_blocks * self.block_size + self._num_private_tokens,
            num_allocated_tokens=self.num_held_blocks * self.block_size,
            num_largest_run_blocks=self.num_available_blocks,
        )

    def holds(self, request_id: str) -> bool:
        return request_id in self._holdings

    def match_length(self, request: Request) -> int:
        """How many first tokens of a request are cached now, to the token. Changes nothing."""
        if not self._prefix_cache or request.must_compute_prompt:
            return 0
        return self._tree.match_length(request.namespace, request.token_ids[:-1])

    def nearest(self, request: Request) -> tuple[int, int | None]:
        """How many first tokens of its prompt are cached, to the token, and the last one's block."""
        if not self._prefix_cache:
            return 0, None
        return self._tree.closest(request.namespace, request.token_ids[: request.num_prompt_tokens])

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def attach_prefix(self, request: Request, *, room_for: int) -> bool:
        """Give a waiting request its cached prefix, if the rest of `room_for` tokens would fit now.

        Sets `block_table` and `num_computed_tokens`; at least one known token is left to compute.
        A request that must compute its prompt is given none of it. Returns False, with nothing
        changed, where there is no room. Rows to be copied count as computed: the next plan that names
        the request must carry them (`take_copies`).
        """
        assert request.request_id not in self._holdings, f"{request.request_id} has its prefix already"
        assert not request.block_table
        holding, block_ids = self._cached_prefix(request)
        num_unlocked = self._tree.num_unlocked_blocks(holding.node) if holding.node else 0
        num_left = self.num_available_blocks - num_unlocked
        num_missing = self.num_blocks_for(room_for) - len(block_ids)
        if num_missing > num_left:
            return False
        if holding.node:
            self._tree.lock(holding.node)
            self._pool.share(block_ids)
            if self._prefix_cache and not request.must_compute_prompt:
                self._hold_source(request, holding, may_take=num_left - num_missing)
        self._holdings[request.request_id] = holding
        request.block_table = array("i", block_ids)
        request.num_computed_tokens = len(block_ids) * self.block_size + holding.num_copied_tokens
        self._count_private(request, holding)
        if holding.node:
            self._tails.began(request)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = request.num_computed_tokens
            self.num_query_tokens += request.num_prompt_tokens
            self.num_hit_tokens += request.num_computed_tokens
        return True

    def take_copies(self, requests: Iterable[Request]) -> tuple[BlockCopy, ...]:
        """The copies that a plan of these requests must carry, each given once."""
        if not self._uncopied:
            return ()
        return tuple(self._copy_for(r) for r in requests if r.request_id in self._uncopied)

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
        num_private = request.num_computed_tokens - holding.num_committed_blocks * self.block_size
        if num_private >= self.block_size and holding.node is not None:
            self._commit_blocks(request, holding)
        self._count_private(request, holding)
        if holding.source is not None:
            assert request.request_id not in self._uncopied, "a plan landed without the copies made for it"
            self._drop_source(holding)
        if holding.retired and request.num_scheduled_tokens == 0:
            self._pool.release(holding.retired)
            holding.retired = []
        if self._tails.awaiting and holding.node is not None:
            self._tails.computed(request, holding.node)

    def _commit_blocks(self, request: Request, holding: _Holding) -> None:
        old = holding.node
        assert old is not None
        first, end = holding.num_committed_blocks, request.num_computed_tokens // self.block_size
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
        self._num_private_tokens -= holding.num_private_tokens
        if holding.source is not None:
            self._uncopied.discard(request.request_id)
            self._drop_source(holding)
        self._pool.release(reversed(request.block_table))
        self._pool.release(holding.retired)
        request.block_table = array("i")
        if holding.node is not None:
            kept = holding.num_committed_blocks
            if num_kept_tokens is not None:
                kept = min(kept, num_kept_tokens // self.block_size)
            node = holding.node
            self._tree.unlock(node)
            self._tails.ended(request, node)
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
        assert self._uncopied <= self._holdings.keys()
        self._pool.check()
        self._tree.check()
        self._tails.check(set(self._holdings))
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
            if holding.source is not None:
                held.update(holding.source.block_ids)
            self._check_holding(request, holding)
        assert num_holders == [self._pool.num_holders(block_id) for block_id in range(self.num_blocks)]
        assert self._pool.num_free + self._tree.num_evictable + len(held) == self.num_blocks
        self._check_usage(requests, held)

    def _check_usage(self, requests: list[Request], held: set[int]) -> None:
        """The running total of live tokens against a count of each slot."""
        live: dict[int, int] = {}
        for request in requests:
            holding = self._holdings[request.request_id]
            if holding.source is not None:
                live[holding.source.block_ids[0]] = self.block_size
            num_counted = holding.num_committed_blocks * self.block_size + holding.num_private_tokens
            assert num_counted <= request.num_computed_tokens, "tokens count that are not computed"
            for index, block_id in enumerate(request.block_table):
                num_tokens = max(0, min(self.block_size, num_counted - index * self.block_size))
                live[block_id] = max(live.get(block_id, 0), num_tokens)
        usage = self.usage()
        assert usage.num_live_tokens == sum(live.values()), f"{usage} but {sum(live.values())} live tokens"
        assert usage.num_allocated_tokens == len(held) * self.block_size

    def _check_holding(self, request: Request, holding: _Holding) -> None:
        table = request.block_table
        assert len(set(table)) == len(table), "a block stands twice in a table"
        assert request.num_computed_tokens + request.num_scheduled_tokens <= len(table) * self.block_size
        if holding.source is not None:
            assert len(holding.source.block_ids) == 1
            assert holding.source.lock_count > 0, "a block to copy from is not locked"
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

    def _cached_prefix(self, request: Request) -> tuple[_Holding, list[int]]:
        if not self._prefix_cache:
            return _Holding(None, 0), []
        most = 0 if request.must_compute_prompt else -1
        node, block_ids, _ = self._tree.match(request.namespace, request.token_ids[:most])
        return _Holding(node, len(block_ids)), block_ids

    def _hold_source(self, request: Request, holding: _Holding, *, may_take: int) -> None:
        """Find and lock the block that begins most like what follows the prefix, if that leaves room."""
        assert holding.node is not None
        first = holding.num_committed_blocks * self.block_size
        wanted = request.token_ids[first : min(first + self.block_size, len(request.token_ids) - 1)]
        child, num_tokens = self._tree.nearest(holding.node, wanted)
        if child is None or may_take < (child.lock_count == 0):
            return
        holding.source, holding.num_copied_tokens = self._tree.first_block(child), num_tokens
        self._tree.lock(holding.source)
        self._uncopied.add(request.request_id)

    def _copy_for(self, request: Request) -> BlockCopy:
        self._uncopied.remove(request.request_id)
        holding = self._holdings[request.request_id]
        assert holding.source is not None
        return BlockCopy(
            source=holding.source.block_ids[0],
            target=request.block_table[holding.num_committed_blocks],
            num_tokens=holding.num_copied_tokens,
        )

    def _drop_source(self, holding: _Holding) -> None:
        assert holding.source is not None
        self._tree.unlock(holding.source)
        holding.source = None

    def _count_private(self, request: Request, holding: _Holding) -> None:
        num_tokens = request.num_computed_tokens - holding.num_committed_blocks * self.block_size
        self._num_private_tokens += num_tokens - holding.num_private_tokens
        holding.num_private_tokens = num_tokens
