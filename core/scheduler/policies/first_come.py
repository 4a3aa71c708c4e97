"""Who came first goes first. Nobody can be overtaken, and nobody is favoured."""

from collections import OrderedDict
from collections.abc import Iterator

from core.request import Request
from core.scheduler.policies import MatchLength


class FirstCome:
    """Newcomers at the tail; followers at the head, as the one they waited for was. All of it is O(1)."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def push(self, request: Request, *, is_follower: bool = False) -> None:
        self._requests[request.request_id] = request
        if is_follower:
            self._requests.move_to_end(request.request_id, last=False)

    def head(self) -> Request:
        return next(iter(self._requests.values()))

    def remove(self, request: Request, *, admitted: bool) -> None:
        del self._requests[request.request_id]

    def charge(
        self,
        request: Request,
        *,
        num_prefill_tokens: int = 0,
        num_cached_tokens: int = 0,
        num_output_tokens: int = 0,
    ) -> None:
        """Nobody's share matters here."""

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())


def create(_: MatchLength) -> FirstCome:
    return FirstCome()
