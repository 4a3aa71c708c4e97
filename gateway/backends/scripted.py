"""Answers from a script, with exact timing: for tests, and to load the gateway without a model.

A script is what each generation says: its deltas, the pause before each, and how it ends.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager

import msgspec

from gateway.backends import BackendHealth, Embeddings, Gauge
from gateway.errors import Draining
from gateway.events import (
    AnswerToken,
    ChoiceEnded,
    EndReason,
    Event,
    Failed,
    Finished,
    Started,
    TextDelta,
    Usage,
)
from gateway.generation import PromptEncoder
from gateway.request import GenerateRequest, Message, Prompt
from tokenization import ChatTemplate, byte_tokenizer

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
MAX_CONTEXT_TOKENS = 100_000


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
    """Plays one script to everyone, in every choice. Counts what is open, so that leaks show.

    Its tokens are bytes. The embedding of a text is how often each of the 256 bytes stands in it.

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
        tokenizer = byte_tokenizer()
        self._encoder = PromptEncoder(
            tokenizer,
            ChatTemplate(TEMPLATE, tokenizer),
            max_context_tokens=MAX_CONTEXT_TOKENS,
            vocab_size=tokenizer.vocab_size,
        )
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

    def explain(self, request_id: str) -> tuple[Mapping[str, object], ...]:
        return ()

    def live_requests(self) -> tuple[Mapping[str, object], ...]:
        return ()

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
        num_deltas = 0
        for text in script.deltas:
            if num_deltas == request.max_tokens:
                break
            await self._pause(script.every_s)
            if self._stopped.is_set():
                break
            self.num_deltas += 1
            offset = sum(map(len, script.deltas[:num_deltas]))
            num_deltas += 1
            for index in range(request.num_choices):
                yield TextDelta(text, index, _tokens(text, request, offset=offset))
        if script.raises is not None:
            raise script.raises
        usage = Usage(
            num_prompt_tokens=script.num_prompt_tokens,
            num_cached_tokens=script.num_cached_tokens,
            num_output_tokens=num_deltas * request.num_choices,
        )
        if self._stopped.is_set():
            yield Failed(code=Draining.code, message=str(Draining()), usage=usage)
        elif script.fails_with is not None:
            code, message = script.fails_with
            yield Failed(code=code, message=message, usage=usage)
        else:
            reason = EndReason.LENGTH if num_deltas < len(script.deltas) else script.reason
            for index in range(request.num_choices - 1):
                yield ChoiceEnded(index=index, reason=reason)
            yield Finished(reason=reason, usage=usage, index=request.num_choices - 1)

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

    async def tokenize(self, text: str, *, add_special_tokens: bool) -> Sequence[int]:
        add_bos = None if add_special_tokens else False
        return await self._encoder.encode_text(text, param="prompt", add_bos=add_bos)

    async def tokenize_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool
    ) -> Sequence[int]:
        return await self._encoder.encode_messages(messages, add_generation_prompt=add_generation_prompt)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        return await self._encoder.decode(token_ids)

    async def apply_template(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        return await self._encoder.render(messages, add_generation_prompt=add_generation_prompt)

    async def embed(self, prompts: Sequence[Prompt], *, request_id: str, tenant: str) -> Embeddings:
        encoded = await self._encoder.encode_prompts(prompts, param="input")
        counts = [tuple(float(list(ids).count(byte)) for byte in range(256)) for ids in encoded]
        return Embeddings(vectors=tuple(counts), num_prompt_tokens=sum(map(len, encoded)))

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


def _tokens(text: str, request: GenerateRequest, *, offset: int) -> tuple[AnswerToken, ...]:
    """One token for a delta, with as many equally unlikely ones in its place as are asked for."""
    if request.num_logprobs is None:
        return ()
    top = tuple((f"{text}{rank}".encode(), -1.0 - rank) for rank in range(request.num_logprobs))
    return (AnswerToken(text.encode(), -0.5, top, offset),)
