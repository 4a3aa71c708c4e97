"""Answers from a script, with exact timing: for tests, and to load the gateway without a model.

A script is what each generation says: its deltas, the pause before each, and how it ends.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager

import msgspec

from gateway.backends import BackendHealth, Gauge
from gateway.errors import Draining
from gateway.events import EndReason, Event, Failed, Finished, Started, TextDelta, Usage
from gateway.request import GenerateRequest


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """One answer. Times in seconds."""

    deltas: tuple[str, ...] = ("Hello", " world", "!")
    start_after_s: float = 0.0
    """Before `Started`: as if the engine were slow to take the request."""
    first_after_s: float = 0.0
    """Before the first delta, on top of `every_s`: a prompt that takes its time."""
    every_s: float = 0.0
    """Before each delta. 0 gives the loop one turn and no more."""
    reason: EndReason = EndReason.STOP
    fails_with: tuple[str, str] | None = None
    """Code and message of a `Failed` that takes the place of `Finished`."""
    raises: Exception | None = None
    """Raised instead of a terminal event: a bug of our own."""
    refuses: Exception | None = None
    """Raised on entering, before anything."""
    num_prompt_tokens: int = 7
    num_cached_tokens: int = 3


class ScriptedBackend:
    """Plays one script to everyone. Counts what is open, so that leaks show.

    Invariant: `num_opened - num_closed` generations are running.
    """

    def __init__(self, script: Script | None = None, *, model_id: str = "scripted") -> None:
        self.script = script or Script()
        self.requests: list[GenerateRequest] = []
        self.num_opened = 0
        self.num_closed = 0
        self.num_deltas = 0
        self.alive = True
        self._model_id = model_id
        self._stopped = asyncio.Event()
        self._changed = asyncio.Event()

    @property
    def fingerprint(self) -> str:
        return "fp_scripted"

    @property
    def num_running(self) -> int:
        return self.num_opened - self.num_closed

    def models(self) -> tuple[str, ...]:
        return (self._model_id,)

    def health(self) -> BackendHealth:
        return BackendHealth(alive=self.alive, ready=self.alive)

    def gauges(self) -> tuple[Gauge, ...]:
        return (Gauge("tidegate_requests_running", "Requests being computed.", self.num_running),)

    def open(
        self, request: GenerateRequest, *, request_id: str
    ) -> AbstractAsyncContextManager[AsyncIterator[Event]]:
        return self._open(request)

    @asynccontextmanager
    async def _open(self, request: GenerateRequest) -> AsyncIterator[AsyncIterator[Event]]:
        script = self.script
        self.requests.append(request)
        if self._stopped.is_set():
            raise Draining
        if script.refuses is not None:
            raise script.refuses
        self.num_opened += 1
        self._tell()
        try:
            async with aclosing(self._play(script, request)) as events:
                yield events
        finally:
            self.num_closed += 1
            self._tell()

    async def _play(self, script: Script, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        if script.start_after_s:
            await self._pause(script.start_after_s)
        yield Started(num_prompt_tokens=script.num_prompt_tokens)
        if script.first_after_s:
            await self._pause(script.first_after_s)
        num_output_tokens = 0
        for text in script.deltas:
            if num_output_tokens == request.max_tokens:
                break
            await self._pause(script.every_s)
            if self._stopped.is_set():
                break
            self.num_deltas += 1
            num_output_tokens += 1
            yield TextDelta(text)
        if script.raises is not None:
            raise script.raises
        usage = Usage(
            num_prompt_tokens=script.num_prompt_tokens,
            num_cached_tokens=script.num_cached_tokens,
            num_output_tokens=num_output_tokens,
        )
        if self._stopped.is_set():
            yield Failed(code=Draining.code, message=str(Draining()), usage=usage)
        elif script.fails_with is not None:
            code, message = script.fails_with
            yield Failed(code=code, message=message, usage=usage)
        else:
            cut = num_output_tokens < len(script.deltas)
            yield Finished(reason=EndReason.LENGTH if cut else script.reason, usage=usage)

    async def _pause(self, seconds: float) -> None:
        """Wait, but not past the moment a drain runs out."""
        if seconds == 0:
            await asyncio.sleep(0)
            return
        try:
            async with asyncio.timeout(seconds):
                await self._stopped.wait()
        except TimeoutError:
            pass

    async def drain(self, *, deadline_s: float) -> None:
        try:
            async with asyncio.timeout(deadline_s):
                await self.until_running(0)
        except TimeoutError:
            self._stopped.set()
            await self.until_running(0)

    async def until_running(self, count: int) -> None:
        """Wait until exactly `count` generations are running."""
        while self.num_running != count:
            await self._changed.wait()

    def _tell(self) -> None:
        """Wake everyone who waits, once: each looks again and waits on the next event."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
