"""KV accounting as before paging: each request holds one contiguous run of blocks. For comparison.

How long a run is says the reservation (vLLM, arXiv 2309.06180, section 6.1, the three Orca baselines):

    max             as long as a request can ever become
    power_of_two    the next power of two above what is known; doubled when that is full
    oracle          prompt and output, as if it were known how long the output becomes

    blocks   0   1   2   3   4   5   6   7   8   9
           |  a: reserved 4  | free |   b: 3  | free |     a run of 3 does not fit, though 3 are free

The kernels see block tables as ever; here they count up by one. Nothing is shared: a prefix lies
inside somebody's run.
"""

from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from core.cache.reservation import KVUsage
from core.request import Request
from core.scheduler.plan import BlockCopy


@dataclass(slots=True, frozen=True)
class Lengths:
    """Of one request, in tokens."""

    needed: int
    """It has to hold now."""
    expected: int
    """Prompt and output together: the most it may ask for."""
    limit: int
    """As long as any request can ever become."""


Reservation = Callable[[Lengths], int]
"""How many tokens a request's run is to hold: at least those needed, at most the limit."""


def reserve_max(lengths: Lengths) -> int:
    return lengths.limit


def reserve_power_of_two(lengths: Lengths) -> int:
    return min(lengths.limit, 1 << (lengths.needed - 1).bit_length())


def reserve_oracle(lengths: Lengths) -> int:
    return max(lengths.needed, min(lengths.limit, lengths.expected))


class RunPool:
    """Blocks `0 .. num_blocks - 1`, handed out in contiguous runs, the first that is long enough.

    Invariant: the free runs are sorted, disjoint, and never touch.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0, f"a pool of {num_blocks} blocks"
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self._runs: list[tuple[int, int]] = [(0, num_blocks)]  # (first, end)

    @property
    def largest(self) -> int:
        return max((end - first for first, end in self._runs), default=0)

    def allocate(self, count: int) -> int | None:
        """The first block of a run; None if no free run is long enough."""
        assert count > 0
        for index, (first, end) in enumerate(self._runs):
            if end - first >= count:
                self._take(index, first, end, count=count)
                return first
        return None

    def extend(self, end: int, count: int) -> bool:
        """Lengthen a run that ends before block `end`, if the blocks behind it are free."""
        index = bisect_left(self._runs, (end, 0))
        if index == len(self._runs) or self._runs[index][0] != end or self._runs[index][1] - end < count:
            return False
        self._take(index, end, self._runs[index][1], count=count)
        return True

    def release(self, first: int, count: int) -> None:
        end = first + count
        self.num_free += count
        index = bisect_left(self._runs, (first, end))
        if index < len(self._runs) and self._runs[index][0] == end:
            end = self._runs.pop(index)[1]
        if index and self._runs[index - 1][1] == first:
            first = self._runs.pop(index - 1)[0]
        insort(self._runs, (first, end))

    def check(self) -> None:
        """Assert the invariant. Tests call this after every operation."""
        assert sum(end - first for first, end in self._runs) == self.num_free
        borders = [border for run in self._runs for border in run]
        assert borders == sorted(set(borders)), f"free runs touch, overlap or are empty: {self._runs}"
        assert not borders or 0 <= borders[0] < borders[-1] <= self.num_blocks

    def _take(self, index: int, first: int, end: int, *, count: int) -> None:
        self.num_free -= count
        if first + count == end:
            del self._runs[index]
        else:
            self._runs[index] = (first + count, end)


@dataclass(slots=True, eq=False)
class _Run:
    """One request's blocks. `left` are the runs it moved out of, until no plan in flight names them."""

    first: int
    num_blocks: int
    left: list[tuple[int, int]] = field(default_factory=list)
    moved_from: int | None = None
    """The first block of the run it left, while no plan carries the copies."""
    num_moved_tokens: int = 0
    num_counted_tokens: int = 0
    """Computed tokens, as counted in the manager's total."""


class ReservedManager:
    """KV accounting per request, one run each. Torch-free; touched by the event loop alone.

    Args:
        max_request_tokens: as long as a request can ever become.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, reservation: Reservation, max_request_tokens: int
    ) -> None:
        self.block_size = block_size
        self.num_query_tokens = 0
        self.num_hit_tokens = 0
        self._pool = RunPool(num_blocks)
        self._reservation = reservation
        self._limit = min(max_request_tokens, num_blocks * block_size)
        self._runs: dict[str, _Run] = {}
        self._moved: set[str] = set()
        """Requests whose copies are in no plan yet."""
        self._num_live_tokens = 0

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free

    @property
    def num_cached_blocks(self) -> int:
        return 0

    @property
    def num_available_blocks(self) -> int:
        return self._pool.num_free

    @property
    def num_held_blocks(self) -> int:
        return self._pool.num_blocks - self._pool.num_free

    @property
    def shares_prefixes(self) -> bool:
        return False

    def usage(self) -> KVUsage:
        return KVUsage(
            num_live_tokens=self._num_live_tokens,
            num_allocated_tokens=self.num_held_blocks * self.block_size,
            num_largest_run_blocks=self._pool.largest,
        )

    def holds(self, request_id: str) -> bool:
        return request_id in self._runs

    def match_length(self, request: Request) -> int:
        """Nothing is ever cached."""
        return 0

    def nearest(self, request: Request) -> tuple[int, int | None]:
        """Nothing is ever cached."""
        return 0, None

    def attach_prefix(self, request: Request, *, room_for: int) -> bool:
        """Reserve a waiting request's run, if there is one: for what it knows and a token more at least."""
        assert request.request_id not in self._runs, f"{request.request_id} has its run already"
        assert not request.block_table
        num_blocks = self._num_reserved_blocks(request, needed=min(len(request.token_ids) + 1, room_for))
        first = self._pool.allocate(num_blocks)
        if first is None:
            return False
        self._runs[request.request_id] = _Run(first, num_blocks)
        request.block_table = array("i", range(first, first + num_blocks))
        request.num_computed_tokens = 0
        if request.num_cached_tokens is None:
            request.num_cached_tokens = 0
            self.num_query_tokens += request.num_prompt_tokens
        return True

    def try_grow(self, request: Request, num_tokens: int) -> bool:
        """Stay within the reservation, or get a longer one: in place, or elsewhere with all rows copied."""
        run = self._runs[request.request_id]
        end = request.num_computed_tokens + request.num_scheduled_tokens + num_tokens
        if end <= run.num_blocks * self.block_size:
            return True
        wanted = self._num_reserved_blocks(request, needed=end)
        more = wanted - run.num_blocks
        assert more > 0, f"{request.request_id} outgrew what it can ever become"
        if self._pool.extend(run.first + run.num_blocks, more):
            request.block_table.extend(range(run.first + run.num_blocks, run.first + wanted))
            run.num_blocks = wanted
            return True
        return run.moved_from is None and self._move(request, run, num_blocks=wanted)

    def take_copies(self, requests: Iterable[Request]) -> tuple[BlockCopy, ...]:
        """The rows of requests that moved, block by block, each given once."""
        if not self._moved:
            return ()
        moved = [request for request in requests if request.request_id in self._moved]
        return tuple(copy for request in moved for copy in self._copies_for(request))

    def commit(self, request: Request) -> None:
        run = self._runs[request.request_id]
        if run.left and request.num_scheduled_tokens == 0:
            assert run.moved_from is None, "a plan landed without the copies made for it"
            self._release_left(run)
        self._count(run, request.num_computed_tokens)

    def release(self, request: Request, *, num_kept_tokens: int | None = None) -> None:
        """Take everything back; nothing stays cached."""
        assert request.num_scheduled_tokens == 0, f"{request.request_id} has tokens in flight"
        run = self._runs.pop(request.request_id)
        self._moved.discard(request.request_id)
        self._count(run, 0)
        self._release_left(run)
        self._pool.release(run.first, run.num_blocks)
        request.block_table = array("i")

    def forget_beyond(self, request: Request, num_kept_tokens: int) -> None:
        """Nothing is ever cached."""
        assert request.request_id not in self._runs

    def clear(self) -> None:
        assert not self._runs, "requests still hold blocks"

    def check(self, requests: Iterable[Request] = ()) -> None:
        """Assert the invariants, given every request that holds blocks. For tests."""
        requests = list(requests)
        assert {request.request_id for request in requests} == self._runs.keys()
        self._pool.check()
        held: list[int] = []
        for request in requests:
            run = self._runs[request.request_id]
            assert list(request.block_table) == list(range(run.first, run.first + run.num_blocks))
            num_tokens = request.num_computed_tokens + request.num_scheduled_tokens
            assert num_tokens <= run.num_blocks * self.block_size
            assert (run.moved_from is not None) == (request.request_id in self._moved)
            assert run.num_counted_tokens <= request.num_computed_tokens
            for first, count in (*run.left, (run.first, run.num_blocks)):
                held += range(first, first + count)
        assert len(held) == len(set(held)) == self.num_held_blocks, "a block is lost, or in two runs"
        assert self._num_live_tokens == sum(run.num_counted_tokens for run in self._runs.values())

    def _num_reserved_blocks(self, request: Request, *, needed: int) -> int:
        expected = request.num_prompt_tokens + request.sampling.max_tokens
        return self._num_blocks_for(self._reservation(Lengths(needed, expected, self._limit)))

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _move(self, request: Request, run: _Run, *, num_blocks: int) -> bool:
        """Reserve a longer run elsewhere. The old one is still read: by plans in flight, and to copy."""
        first = self._pool.allocate(num_blocks)
        if first is None:
            return False
        run.left.append((run.first, run.num_blocks))
        run.moved_from, run.first, run.num_blocks = run.first, first, num_blocks
        run.num_moved_tokens = request.num_computed_tokens + request.num_scheduled_tokens
        request.block_table = array("i", range(first, first + num_blocks))
        self._moved.add(request.request_id)
        return True

    def _copies_for(self, request: Request) -> list[BlockCopy]:
        self._moved.remove(request.request_id)
        run = self._runs[request.request_id]
        source, run.moved_from = run.moved_from, None
        assert source is not None
        return [
            BlockCopy(
                source=source + index,
                target=run.first + index,
                num_tokens=min(self.block_size, run.num_moved_tokens - index * self.block_size),
            )
            for index in range(self._num_blocks_for(run.num_moved_tokens))
        ]

    def _release_left(self, run: _Run) -> None:
        for first, count in run.left:
            self._pool.release(first, count)
        run.left = []

    def _count(self, run: _Run, num_tokens: int) -> None:
        self._num_live_tokens += num_tokens - run.num_counted_tokens
        run.num_counted_tokens = num_tokens
