"""Clients without a network: they satisfy `runner.Sender` and answer as a test says."""

import asyncio
import time
from collections.abc import Mapping

import msgspec

from loadtest.call import Call
from loadtest.record import Fault, RequestRecord


class Answers:
    """Answers each call after `answer_s`, or when the test releases it; fails the ones it is told to."""

    def __init__(
        self,
        *,
        answer_s: float = 0.0,
        failing: tuple[str, ...] = (),
        held: tuple[str, ...] = (),
        texts: Mapping[str, str] | None = None,
    ) -> None:
        self.calls: list[Call] = []
        self.num_live = self.max_live = 0
        self.live_sessions: set[str] = set()
        self.max_live_sessions = 0
        self._answer_s = answer_s
        self._failing = failing
        self._held = {name: asyncio.Event() for name in held}
        self._texts = dict(texts or {})

    def release(self, name: str) -> None:
        self._held[name].set()

    @property
    def ids(self) -> list[str]:
        return [call.id for call in self.calls]

    def body(self, name: str) -> dict[str, object]:
        body: dict[str, object] = msgspec.json.decode(next(c.body for c in self.calls if c.id == name))
        return body

    async def send(self, call: Call) -> RequestRecord:
        sent_at = time.monotonic()
        self.calls.append(call)
        self.num_live += 1
        self.max_live = max(self.max_live, self.num_live)
        try:
            if call.id in self._held:
                await self._held[call.id].wait()
            await asyncio.sleep(self._answer_s)
        finally:
            self.num_live -= 1
        ended_at = time.monotonic()
        failed = call.id in self._failing
        return RequestRecord(
            id=call.id,
            session=call.session,
            turn=call.turn,
            scheduled_at=call.scheduled_at,
            sent_at=sent_at,
            first_token_at=None if failed else ended_at,
            ended_at=ended_at,
            num_planned_prompt_tokens=call.num_planned_prompt_tokens,
            fault=Fault(kind="http", message="told to fail", status=500) if failed else None,
            text=self._texts.get(call.id, "") if call.keep_text else "",
        )
