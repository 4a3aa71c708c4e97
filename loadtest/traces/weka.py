"""Weka's Claude Code traces: a line a session, with hashes of blocks of 64 tokens and client pauses.

Source: github.com/callanjfox/kv-cache-tester, traces/.
"""

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec

from loadtest.errors import PlanInvalid
from loadtest.text_files import json_lines
from loadtest.traces import Trace, TraceRequest

Seconds = Annotated[float, msgspec.Meta(ge=0)]


class _Call(msgspec.Struct, frozen=True):
    t: Seconds
    num_input_tokens: Annotated[int, msgspec.Meta(ge=1, le=10_000_000)] = msgspec.field(name="in")
    num_output_tokens: Annotated[int, msgspec.Meta(ge=0, le=10_000_000)] = msgspec.field(name="out")
    hash_ids: tuple[int, ...] = ()
    api_time: Seconds | None = None
    think_time: Seconds | None = None


class _Session(msgspec.Struct, frozen=True):
    id: str
    block_size: Annotated[int, msgspec.Meta(ge=1, le=65_536)]
    requests: tuple[dict[str, Any], ...]
    hash_id_scope: str = "local"


class Weka:
    name = "weka"

    def fits(self, first_line: str) -> bool:
        return first_line.startswith("{") and '"block_size"' in first_line and '"requests"' in first_line

    def read(self, text: str, source: str) -> Trace:
        requests: list[TraceRequest] = []
        for number, session in json_lines(text, _Session, source):
            try:
                requests.extend(_SessionReader(session).read())
            except msgspec.ValidationError as error:
                raise PlanInvalid(f"{source}, line {number}: {error}") from error
        return Trace(name=source, format=self.name, clock="session", requests=tuple(requests))


class _SessionReader:
    """One session's calls, those of its sub-agents between them by time."""

    def __init__(self, session: _Session) -> None:
        self._session = session
        self._scope = f"{session.id}:" if session.hash_id_scope == "local" else ""
        self._blocks: dict[int, tuple[str, int]] = {}

    def read(self) -> list[TraceRequest]:
        found = list(self._calls(self._session.requests, agent="", start=0.0))
        for index, entry in enumerate(self._session.requests):
            if entry.get("type") == "subagent":
                start = msgspec.convert(entry.get("t"), Seconds)
                inner = msgspec.convert(entry.get("requests", ()), tuple[dict[str, Any], ...])
                found.extend(self._calls(inner, agent=f"agent{index}", start=start))
        return sorted(found, key=lambda request: request.at_s)

    def _calls(
        self, entries: tuple[dict[str, Any], ...], *, agent: str, start: float
    ) -> Iterator[TraceRequest]:
        first = True
        for entry in entries:
            if entry.get("type") == "subagent":
                continue
            call = msgspec.convert(entry, _Call)
            yield TraceRequest(
                session=self._session.id,
                agent=agent,
                at_s=start + call.t,
                num_input_tokens=call.num_input_tokens,
                num_output_tokens=call.num_output_tokens,
                parts=self._parts(call, f"{agent}{call.t}"),
                pause_s=None if first else call.think_time,
                server_s=call.api_time,
            )
            first = False

    def _parts(self, call: _Call, name: str) -> tuple[tuple[str, int], ...]:
        """Hashed blocks, then the tail that has none and so is taken for its own."""
        size = self._session.block_size
        num_whole = min(call.num_input_tokens // size, len(call.hash_ids))
        whole = tuple(
            self._blocks.setdefault(block, (f"{self._scope}{block}", size))
            for block in call.hash_ids[:num_whole]
        )
        rest = call.num_input_tokens - num_whole * size
        return (*whole, (f"{self._session.id}:tail{name}", rest)) if rest else whole


FORMAT = Weka()
