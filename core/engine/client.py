"""A generation as its caller sees it: a scope, and in it an async iterator of tokens."""

import asyncio
from array import array
from collections.abc import Sequence
from time import monotonic
from types import TracebackType
from typing import Protocol, Self

from core.request import SamplingParams, TokenLogprob, TokenOutput


class StreamOwner(Protocol):
    """What a stream asks of the engine. All of it happens at once, on the event loop."""

    def submit(self, stream: "TokenStream") -> None:
        """Queue the stream's request.

        Raises:
            RequestTooLong, EngineDraining: refused; nothing was queued.
        """
        ...

    def finish(self, stream: "TokenStream", num_tokens: int) -> None: ...

    def abort(self, stream: "TokenStream") -> None: ...


class TokenStream:
    """One request, made by `Engine.generate`. Entering the scope submits it, leaving it aborts.

    Iterating gives everything that has arrived since the last look as one `TokenOutput`, so a slow
    reader costs four bytes a token. The last output has the `finish_reason`; after it the iterator
    ends. It also ends, without one, after `finish()` or when the scope is left.
    """

    def __init__(
        self,
        owner: StreamOwner,
        request_id: str,
        *,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        namespace: bytes,
        tenant: str = "",
        session_id: str = "",
        pools: bool = False,
    ) -> None:
        self.request_id = request_id
        """The caller's name for it; need not be unique."""
        self.token_ids: Sequence[int] = token_ids
        self.sampling = sampling
        self.namespace = namespace
        self.tenant = tenant
        self.session_id = session_id
        self.pools = pools
        self.engine_id = ""
        """The engine's own name for it, unique; set when it is submitted."""
        self._owner = owner
        self._pending = array("i")
        self._logprobs: list[TokenLogprob] = []
        self._prompt_logprobs: tuple[TokenLogprob, ...] = ()
        self._last: TokenOutput | None = None
        self._num_cached_tokens = 0
        self._submitted_at = 0.0
        self._queue_s: float | None = None
        self._entered = False
        self._ended = False
        self._arrived = asyncio.Event()

    async def __aenter__(self) -> Self:
        assert not self._entered, "a stream is entered once"
        self._owner.submit(self)
        self._submitted_at = monotonic()
        self._entered = True
        self.token_ids = ()  # the engine keeps its own, smaller copy
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._owner.abort(self)
        self._end()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenOutput:
        assert self._entered, "iterate inside the scope"
        while not (self._ended or self._pending or self._last):
            self._arrived.clear()
            await self._arrived.wait()
        if self._ended:
            raise StopAsyncIteration
        return self._take()

    def finish(self, num_tokens: int) -> None:
        """End the request with `stop` after its first `num_tokens` generated tokens: a stop string was met.

        Later tokens are neither counted nor kept. Harmless if the request has ended already.
        """
        self._owner.finish(self, num_tokens)
        self._end()

    def began(self) -> None:
        """A step has it; only the first one counts. For the engine only."""
        if self._queue_s is None:
            self._queue_s = monotonic() - self._submitted_at

    def push(self, output: TokenOutput) -> None:
        """Take what a step gave. For the engine only."""
        self._pending.extend(output.token_ids)
        self._logprobs += output.logprobs
        self._prompt_logprobs += output.prompt_logprobs
        self._num_cached_tokens = output.num_cached_tokens
        if output.finish_reason is not None:
            assert self._last is None, "a request ends once"
            self._last = output
        self._arrived.set()

    def _take(self) -> TokenOutput:
        token_ids, self._pending = tuple(self._pending), array("i")
        logprobs, self._logprobs = tuple(self._logprobs), []
        prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, ()
        last = self._last
        self._ended = last is not None
        return TokenOutput(
            request_id=self.request_id,
            token_ids=token_ids,
            finish_reason=None if last is None else last.finish_reason,
            num_cached_tokens=self._num_cached_tokens,
            queue_s=self._queue_s or 0.0,
            error=None if last is None else last.error,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            pooled=b"" if last is None else last.pooled,
        )

    def _end(self) -> None:
        self._ended = True
        self._pending = array("i")
        self._logprobs, self._prompt_logprobs = [], ()
        self._arrived.set()
