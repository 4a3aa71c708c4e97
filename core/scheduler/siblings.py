"""Requests that share an uncached prefix: one computes it, the others wait and then match it."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from core.cache.token_bytes import num_common_tokens
from core.request import Request, RequestStatus


@dataclass(slots=True)
class _Group:
    """Who waits for the same first tokens of a leader, in the order in which they came; never nobody."""

    leader: Request
    num_shared_tokens: int
    held: list[Request] = field(default_factory=list)

    @property
    def waits(self) -> bool:
        """A leader that has ended or lost its blocks computes nothing more for the others."""
        leader = self.leader
        return leader.status is RequestStatus.RUNNING and leader.num_computed_tokens < self.num_shared_tokens


class Siblings:
    """Requests at the head of the queue that are held back while a running one computes what they share.

    They hold no blocks and are in nobody's way. Worth it from one whole block up: less cannot be
    shared. A leader that ends or is preempted early lets them go; the first of them to be admitted
    then leads the others. Nothing here waits for a moment that may be missed: `release` looks at the
    leaders' progress anew before each step, and a leader runs, so it moves.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._groups: dict[tuple[str, int], _Group] = {}
        self._group_of: dict[str, tuple[str, int]] = {}
        """Who is held -> the key of its group; in order of arrival."""
        self._computing: dict[str, tuple[Request, int]] = {}
        """Leaders there may be -> how many tokens they set out to compute. Ended ones leave late."""

    def __len__(self) -> int:
        return len(self._group_of)

    def __bool__(self) -> bool:
        return bool(self._groups)

    def __iter__(self) -> Iterator[Request]:
        for group in self._groups.values():
            yield from group.held

    def lead(self, request: Request) -> None:
        """Note that an admitted request begins to compute what it knows."""
        self._computing[request.request_id] = (request, len(request.token_ids))

    def find_leader(self, request: Request) -> tuple[Request, int] | None:
        """The running request about to compute most first blocks of this one, and how many tokens those are.

        Some of them may be cached already.
        """
        self._forget_idle()
        if request.must_compute_prompt:
            return None
        size = self._block_size
        most = (len(request.token_ids) - 1) // size * size
        wanted = b""
        best: tuple[Request, int] | None = None
        for leader, _ in self._computing.values():
            first = max(leader.num_computed_tokens // size * size, best[1] if best else 0)
            end = first + size  # less than that in common is of no use, so this block is looked at first
            if end > most or leader.token_ids[first:end] != request.token_ids[first:end]:
                continue
            if leader.namespace != request.namespace:
                continue
            wanted = wanted or memoryview(request.token_ids)[:most].tobytes()
            num_common = num_common_tokens(memoryview(leader.token_ids)[:most].tobytes(), wanted)
            if num_common >= end:
                best = leader, num_common // size * size
        return best

    def hold(self, request: Request, leader: Request, num_shared_tokens: int) -> None:
        """Hold a request back until its leader has computed that many tokens."""
        key = leader.request_id, num_shared_tokens
        self._groups.setdefault(key, _Group(leader, num_shared_tokens)).held.append(request)
        self._group_of[request.request_id] = key

    def discard(self, request: Request) -> bool:
        """Forget a request that has ended; False if it is not held back."""
        key = self._group_of.pop(request.request_id, None)
        if key is None:
            return False
        held = self._groups[key].held
        held.remove(request)
        if not held:
            del self._groups[key]
        return True

    def release(self) -> list[Request]:
        """Take out who may go now, in the order in which they came."""
        ready = [key for key, group in self._groups.items() if not group.waits]
        if not ready:
            return []
        free = {request.request_id: request for key in ready for request in self._groups.pop(key).held}
        ordered = [free[request_id] for request_id in self._group_of if request_id in free]
        for request_id in free:
            del self._group_of[request_id]
        return ordered

    def check(self) -> None:
        """Assert the invariants. For tests."""
        assert all(group.held for group in self._groups.values())
        for key, group in self._groups.items():
            assert key == (group.leader.request_id, group.num_shared_tokens)
            assert all(self._group_of[request.request_id] == key for request in group.held)
        assert len(self._group_of) == sum(len(group.held) for group in self._groups.values())

    def _forget_idle(self) -> None:
        """Drop who ended, lost its blocks, or has computed all that it set out with."""
        idle = [
            request_id
            for request_id, (request, num_tokens) in self._computing.items()
            if request.status is not RequestStatus.RUNNING
            or request.num_computed_tokens >= num_tokens // self._block_size * self._block_size
        ]
        for request_id in idle:
            del self._computing[request_id]
