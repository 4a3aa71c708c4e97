"""The session that was served least so far goes first: short programs get through among long ones.

Service is counted in weighted tokens over all requests of a session; a request without one is its own
session. Nobody waits for ever: who was passed over `MAX_PASSES` times is next.

Source: least attained service over programs, Autellix (arXiv 2502.13965), section 4.
"""

from collections.abc import Iterator

from core.request import Request
from core.scheduler.patience import Patience
from core.scheduler.policies import MatchLength
from core.scheduler.service import LeastServed, weigh

MAX_PASSES = 64
"""Later requests that may go before an earlier one."""

_Key = tuple[str, str, str]


class LeastAttained:
    """Queues per session, and the patience of those whose session has had much."""

    def __init__(self) -> None:
        self._sessions: LeastServed[_Key] = LeastServed()
        self._patience = Patience(MAX_PASSES)

    def push(self, request: Request, *, is_follower: bool = False) -> None:
        self._patience.arrived(request)
        self._sessions.push(_key(request), request)

    def head(self) -> Request:
        return self._patience.overdue() or self._sessions.head()

    def remove(self, request: Request, *, admitted: bool) -> None:
        self._patience.left(request)
        self._sessions.remove(_key(request), request)

    def charge(
        self,
        request: Request,
        *,
        num_prefill_tokens: int = 0,
        num_cached_tokens: int = 0,
        num_output_tokens: int = 0,
    ) -> None:
        amount = weigh(
            num_prefill_tokens=num_prefill_tokens,
            num_cached_tokens=num_cached_tokens,
            num_output_tokens=num_output_tokens,
        )
        self._sessions.add(_key(request), amount)

    def __len__(self) -> int:
        return len(self._patience)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._patience)

    def check(self) -> None:
        self._sessions.check()
        assert len(self._sessions) == len(self._patience)


def _key(request: Request) -> _Key:
    if request.session_id:
        return (request.tenant, request.session_id, "")
    return ("", "", request.request_id)


def create(_: MatchLength) -> LeastAttained:
    return LeastAttained()
