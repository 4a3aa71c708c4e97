"""Everyone who waits: first who was admitted before and lost the blocks, then the policy's order.

Turns of sessions that must wait for room in the cache stand outside both, behind the gate.
"""

from collections import OrderedDict
from collections.abc import Iterator

from core.request import Request
from core.scheduler.policies import WaitingQueue
from core.scheduler.sessions import SessionGate


class WaitingLine:
    """Preempted requests before all others, the one that was preempted last first.

    They stand outside the policy: they have a reader who has seen tokens already, and were next once.

    `len` counts everyone, those behind the gate too; the truth value says whether there is a head.
    """

    def __init__(self, policy: WaitingQueue, *, gate: SessionGate | None = None) -> None:
        assert not len(policy), "a policy serves one scheduler"
        self._policy = policy
        self._gate = gate
        self._resuming: OrderedDict[str, Request] = OrderedDict()

    def advance(self, now: float) -> None:
        """Tell the gate the time."""
        if self._gate is not None:
            assert now >= self._gate.now, "time goes back"
            self._gate.now = now

    @property
    def wakes_at(self) -> float | None:
        """When the gate must be asked again, though nothing else happens."""
        return None if self._gate is None else self._gate.wakes_at

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Tell the gate what a step that computed prompts took."""
        if self._gate is not None:
            self._gate.computed(num_tokens, seconds)

    def push(self, request: Request, *, is_follower: bool = False) -> None:
        """Queue a newcomer, or who was held back for another's prompt: a follower."""
        if is_follower or self._gate is None or not self._gate.hold(request):
            self._policy.push(request, is_follower=is_follower)

    def let_in(self, *, idle: bool) -> None:
        """Queue the turns that the gate lets go. `idle`: nobody runs, nor is held back elsewhere."""
        if self._gate is not None:
            for request in self._gate.release(idle=idle and not self):
                self._policy.push(request)

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
        if self._gate is not None:
            self._gate.admitted(request)
        num_cached_tokens = request.num_computed_tokens
        self._policy.charge(
            request,
            num_prefill_tokens=request.num_prompt_tokens - num_cached_tokens,
            num_cached_tokens=num_cached_tokens,
        )

    def discard(self, request: Request) -> None:
        """Take out who has ended."""
        if self._gate is not None and self._gate.discard(request):
            return
        if self._resuming.pop(request.request_id, None) is None:
            self._policy.remove(request, admitted=False)

    def ended(self, request: Request) -> None:
        """A request has ended, wherever it stood."""
        if self._gate is not None:
            self._gate.ended(request)

    def forget_sessions(self) -> None:
        """The cache is empty by an accident: what sessions had in it is no measure of anything."""
        if self._gate is not None:
            self._gate.clear()

    def __bool__(self) -> bool:
        return bool(self._resuming) or len(self._policy) > 0

    def __len__(self) -> int:
        return len(self._resuming) + len(self._policy) + self.num_gated

    @property
    def num_gated(self) -> int:
        """Turns that wait because the cache has no room for their session."""
        return 0 if self._gate is None else len(self._gate)

    def __iter__(self) -> Iterator[Request]:
        yield from self._resuming.values()
        yield from self._policy
        if self._gate is not None:
            yield from self._gate

    def check(self) -> None:
        """Assert the gate's invariants. For tests."""
        if self._gate is not None:
            self._gate.check()
