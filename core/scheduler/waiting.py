"""Everyone who may be admitted: first who was before and lost the blocks, then the policy's order."""

from collections import OrderedDict
from collections.abc import Iterator

from core.request import Request
from core.scheduler.policies import WaitingQueue


class WaitingLine:
    """Preempted requests before all others, the one that was preempted last first.

    They stand outside the policy: they hold a reader who has seen tokens already, and were next once.
    """

    def __init__(self, policy: WaitingQueue) -> None:
        assert not len(policy), "a policy serves one scheduler"
        self._policy = policy
        self._resuming: OrderedDict[str, Request] = OrderedDict()

    def push(self, request: Request, *, is_follower: bool = False) -> None:
        self._policy.push(request, is_follower=is_follower)

    def push_back(self, request: Request) -> None:
        """Queue a preempted request."""
        self._resuming[request.request_id] = request
        self._resuming.move_to_end(request.request_id, last=False)

    def head(self) -> Request:
        return next(iter(self._resuming.values())) if self._resuming else self._policy.head()

    def admit(self, request: Request) -> None:
        """Take out who got blocks, and tell the policy what that gives."""
        if self._resuming.pop(request.request_id, None) is not None:
            return
        self._policy.remove(request, admitted=True)
        num_cached_tokens = request.num_computed_tokens
        self._policy.charge(
            request,
            num_prefill_tokens=request.num_prompt_tokens - num_cached_tokens,
            num_cached_tokens=num_cached_tokens,
        )

    def discard(self, request: Request) -> None:
        """Take out who has ended."""
        if self._resuming.pop(request.request_id, None) is None:
            self._policy.remove(request, admitted=False)

    def charge_output(self, request: Request, num_tokens: int) -> None:
        self._policy.charge(request, num_output_tokens=num_tokens)

    def __len__(self) -> int:
        return len(self._resuming) + len(self._policy)

    def __iter__(self) -> Iterator[Request]:
        yield from self._resuming.values()
        yield from self._policy
