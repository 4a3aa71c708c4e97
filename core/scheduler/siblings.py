"""Requests that share a prompt: the first computes it, the others wait and then match it."""

from collections.abc import Iterator

from core.request import Request, RequestStatus


class Siblings:
    """Waiting requests that are held back from the queue until their leader's prompt is in the tree.

    They hold no blocks and are in nobody's way. A leader that ends without having come so far hands
    its part to the first of those that waited for it. Nothing here waits for a moment that may be
    missed: `release` looks at the leaders' progress anew before each step, and a leader that is not
    held back itself is waiting or running, so it moves.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._groups: dict[str, tuple[Request, list[Request]]] = {}
        """Leader's id -> leader, and who waits for it, in order of arrival; never nobody."""

    def __len__(self) -> int:
        return sum(len(held) for _, held in self._groups.values())

    def __bool__(self) -> bool:
        return bool(self._groups)

    def __iter__(self) -> Iterator[Request]:
        for _, held in self._groups.values():
            yield from held

    def hold(self, request: Request, leader: Request | None) -> bool:
        """Hold a request back, if it has a leader to wait for."""
        if leader is None or self._has_prompt(leader):
            return False
        self._groups.setdefault(leader.request_id, (leader, []))[1].append(request)
        return True

    def discard(self, request: Request) -> bool:
        """Forget a request that has ended; False if it is not held back."""
        for leader_id, (_, held) in self._groups.items():
            if request in held:
                held.remove(request)
                if not held:
                    del self._groups[leader_id]
                return True
        return False

    def release(self) -> tuple[list[Request], list[Request]]:
        """Take out who may go now: those whose prompt is there, and those that must compute it themselves."""
        followers: list[Request] = []
        heirs: list[Request] = []
        for leader_id, (leader, held) in tuple(self._groups.items()):
            if self._has_prompt(leader):
                del self._groups[leader_id]
                followers += held
            elif leader.status is RequestStatus.FINISHED:
                del self._groups[leader_id]
                heir, *rest = held
                heirs.append(heir)
                if rest:  # it may lead others already
                    self._groups.setdefault(heir.request_id, (heir, []))[1][:0] = rest
        return followers, heirs

    def _has_prompt(self, leader: Request) -> bool:
        """Whether all blocks that another could match are committed. Never true for a request that
        ended too early: ending leaves `num_computed_tokens` as it was.
        """
        shared = (leader.num_prompt_tokens - 1) // self._block_size * self._block_size
        return shared == 0 or (
            leader.num_computed_tokens >= shared and leader.status is not RequestStatus.WAITING
        )
