"""In which order waiting requests are admitted. One class per policy."""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from core.request import Request


class WaitingQueue(Protocol):
    """The requests that hold no blocks, in the order in which they want them.

    Only the head is ever admitted, so nobody can be overtaken for ever by smaller requests.
    """

    def push(self, request: Request) -> None:
        """Queue a newcomer."""
        ...

    def push_back(self, request: Request) -> None:
        """Queue before all newcomers: a preempted request, which was admitted once, or one whose
        sibling was.
        """
        ...

    def head(self) -> Request:
        """Who is next. Not called on an empty queue."""
        ...

    def remove(self, request: Request) -> None: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...


class FirstComeFirstServed:
    """Newcomers at the tail, preempted requests at the head. Every operation is O(1)."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def push(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def push_back(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self._requests.move_to_end(request.request_id, last=False)

    def head(self) -> Request:
        return next(iter(self._requests.values()))

    def remove(self, request: Request) -> None:
        del self._requests[request.request_id]

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())
