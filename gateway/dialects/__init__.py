"""The HTTP APIs a client may speak, one file each. `ls` of this folder is the support list.

This file is only the contract and the finder; every other module here exports `DIALECT`.
"""

import importlib
import pkgutil
from collections.abc import Sequence
from typing import Protocol

from gateway.errors import ErrorReport
from gateway.events import Event
from gateway.request import GenerateRequest


class AnswerWriter(Protocol):
    """Turns the events of one answer into bytes. Made for one answer; called in event order."""

    def chunk(self, event: Event) -> bytes:
        """The SSE bytes of one event, the end of the stream included with a terminal one; may be empty."""
        ...

    def error(self, report: ErrorReport) -> bytes:
        """The SSE bytes that end a stream which broke off."""
        ...

    def whole(self, events: Sequence[Event]) -> bytes:
        """The body of an answer that is not streamed. The last event is `Finished`."""
        ...


class Dialect(Protocol):
    """One way to ask for a generation."""

    path: str
    """The route, served for POST."""

    def example(self, *, model: str, stream: bool) -> bytes:
        """The smallest body that asks `model` something: the conformance suite starts from it."""
        ...

    def parse(self, body: bytes, *, max_depth: int) -> GenerateRequest:
        """Read a request body. Pure: may run on another thread.

        Raises:
            InvalidRequest: naming the field; nothing that changes an answer is ignored.
        """
        ...

    def writer(
        self, request: GenerateRequest, *, request_id: str, created: int, model: str, fingerprint: str
    ) -> AnswerWriter: ...

    def error(self, report: ErrorReport) -> bytes:
        """The body of a response that is not 200."""
        ...


def find_dialects() -> tuple[Dialect, ...]:
    """Return `DIALECT` of every module in this folder, by name."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return tuple(importlib.import_module(f"{__name__}.{name}").DIALECT for name in names)
