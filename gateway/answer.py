"""An engine's outputs -> events: detokenise, stop, count; several choices become one answer.

Text lives on this side of the engine, token ids on the other.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

import msgspec

from core import FinishReason, TokenOutput
from gateway.errors import Draining, GenerationFailed
from gateway.events import (
    LEAST_LOGPROB,
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
from tokenization import Detokenizer, StopMatcher, Tokenizer

INLINE_TOKENS = 1024
"""A prompt up to this length is spelled out on the loop: a thread costs more than it takes."""

Chances = tuple[float | None, tuple[tuple[int, float], ...]]
"""A token's log-probability and the (token id, log-probability) of the most likely ones in its place."""


class TokenStream(Protocol):
    """What is read of an engine's stream."""

    def __aiter__(self) -> AsyncIterator[TokenOutput]: ...

    def finish(self, num_tokens: int) -> None:
        """End it now with its first `num_tokens` output tokens."""
        ...


class AnswerText:
    """Output token ids in, text out, up to the first stop string. Owned by one choice.

    Invariant: the pieces joined, and their tokens, do not depend on how the ids were cut into pushes.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, stop: Sequence[str] = (), continues_text: bool = False
    ) -> None:
        """
        Args:
            continues_text: the answer goes on after a plain prompt, so its leading space is a real one.
        """
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, continues_text=continues_text)
        self._matcher = StopMatcher(stop)
        self._num_shown_chars = 0
        self._waiting: list[tuple[int, Chances]] = []
        self._num_told_tokens = 0
        self.first_offset = 0
        """Characters that stand before this text in its choice: an echoed prompt."""
        self.stop_string: str | None = None
        """The stop string that ended the text."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer: those before the stop string, or all that came."""
        if self._matcher.match_offset is None:
            return self._detokenizer.num_tokens
        return self._detokenizer.num_tokens_before(self._matcher.match_offset)

    def push(self, token_ids: Sequence[int], chances: Iterable[Chances] = ()) -> str:
        """Return what may be shown by now. After `stop_string` is set there is nothing more to push.

        Args:
            chances: one for each token, if `tokens()` is to tell of them.
        """
        self._waiting.extend(zip(token_ids, chances, strict=False))
        return self._matched(self._detokenizer.push(token_ids))

    def finish(self) -> str:
        """The last token has come: return what was held back. May still find a stop string."""
        text = self._matched(self._detokenizer.finish())
        if self.stop_string is None:
            rest = self._matcher.flush()
            self._num_shown_chars += len(rest)
            text += rest
        return text

    def tokens(self, *, all_came: bool) -> tuple[AnswerToken, ...]:
        """Those not told yet that begin in the text shown so far; at the end, all that count."""
        end = self._detokenizer.num_tokens_before(self._num_shown_chars)
        num_tokens = (self.num_tokens if all_came else end) - self._num_told_tokens
        told, self._waiting = self._waiting[:num_tokens], self._waiting[max(0, num_tokens) :]
        tokens = []
        for token_id, (logprob, top) in told:
            offset = self.first_offset + self._detokenizer.first_char(self._num_told_tokens)
            tokens.append(self._answer_token(token_id, logprob=logprob, top=top, offset=offset))
            self._num_told_tokens += 1
        return tuple(tokens)

    def _answer_token(
        self, token_id: int, *, logprob: float | None, top: Iterable[tuple[int, float]], offset: int
    ) -> AnswerToken:
        token_bytes = self._tokenizer.token_bytes
        return AnswerToken(
            token_bytes(token_id),
            None if logprob is None else max(LEAST_LOGPROB, logprob),
            tuple((token_bytes(each), max(LEAST_LOGPROB, chance)) for each, chance in top),
            offset,
        )

    def _matched(self, text: str) -> str:
        shown, self.stop_string = self._matcher.push(text)
        self._num_shown_chars += len(shown)
        return shown


class EchoedPrompt:
    """A prompt that its choice begins with, log-probabilities and all."""

    def __init__(self, tokenizer: Tokenizer, token_ids: Sequence[int], *, text: str | None) -> None:
        """`text` is what the client wrote, if it wrote text and no token ids."""
        self._tokenizer = tokenizer
        self._token_ids = token_ids
        self._text = text

    async def delta(self, output: TokenOutput, *, index: int, has_logprobs: bool) -> TextDelta:
        """The prompt as the first delta of choice `index`. Long ones are spelled away from the loop."""
        if len(self._token_ids) <= INLINE_TOKENS:
            return self._delta(output, index, has_logprobs)
        return await asyncio.to_thread(self._delta, output, index, has_logprobs)

    def _delta(self, output: TokenOutput, index: int, has_logprobs: bool) -> TextDelta:
        chances: list[Chances] = []
        if has_logprobs:
            chances = [(None, ()), *((each.logprob, each.top) for each in output.prompt_logprobs)]
            assert len(chances) == len(self._token_ids), "one for each token but the first"
        spelled = AnswerText(self._tokenizer)
        text = spelled.push(self._token_ids, chances) + spelled.finish()
        return TextDelta(text if self._text is None else self._text, index, spelled.tokens(all_came=True))


class Choice:
    """One choice on its way: its place in the answer, its text, and what was asked to come with it."""

    def __init__(
        self,
        text: AnswerText,
        *,
        num_prompt_tokens: int,
        stop_token_ids: frozenset[int],
        index: int = 0,
        has_logprobs: bool = False,
        echo: EchoedPrompt | None = None,
        max_tokens: int | None = None,
    ) -> None:
        """`max_tokens` 0 wants the prompt alone; the engine makes a token all the same."""
        self.text = text
        self.index = index
        self.num_prompt_tokens = num_prompt_tokens
        self._stop_token_ids = stop_token_ids
        self._has_logprobs = has_logprobs
        self._echo = echo
        self._only_prompt = max_tokens == 0
        self._num_cached_tokens = 0
        self._num_silent_tokens = 0
        self._queue_s = 0.0

    @property
    def usage(self) -> Usage:
        """As of now."""
        return Usage(
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
            num_output_tokens=self.text.num_tokens + self._num_silent_tokens,
            queue_s=self._queue_s,
        )

    async def events(
        self, outputs: TokenStream, *, is_draining: Callable[[], bool]
    ) -> AsyncGenerator[Event, None]:
        """Turn an engine's outputs into events, ending with exactly one terminal event.

        Args:
            is_draining: whether an error now means that the server stops, not that something broke.
        """
        yield Started(num_prompt_tokens=self.num_prompt_tokens)
        async for output in outputs:
            self._num_cached_tokens = max(self._num_cached_tokens, output.num_cached_tokens)
            self._queue_s = output.queue_s
            whole_prompt = output.token_ids or output.prompt_logprobs
            if self._echo is not None and whole_prompt:
                yield await self._echoed(self._echo, output)
            if self._only_prompt and whole_prompt:
                outputs.finish(0)
                yield Finished(reason=EndReason.LENGTH, usage=self.usage, index=self.index)
                return
            if delta := self._delta(output):
                yield delta
            if self.text.stop_string is not None:
                outputs.finish(self.text.num_tokens)
            elif output.finish_reason is None:
                continue
            yield self._end(output, draining=is_draining())
            return
        raise AssertionError("the engine's stream ended without a finish reason")

    async def _echoed(self, echo: EchoedPrompt, output: TokenOutput) -> TextDelta:
        self._echo = None
        delta = await echo.delta(output, index=self.index, has_logprobs=self._has_logprobs)
        self.text.first_offset = len(delta.text)
        return delta

    def _delta(self, output: TokenOutput) -> TextDelta | None:
        token_ids = output.token_ids
        if output.finish_reason is FinishReason.STOP and token_ids and token_ids[-1] in self._stop_token_ids:
            # Counted, as every token is that the model made; but the end of a turn is no text.
            token_ids, self._num_silent_tokens = token_ids[:-1], 1
        text, ended = self.text, output.finish_reason is not None
        shown = text.push(token_ids, ((each.logprob, each.top) for each in output.logprobs))
        if ended and text.stop_string is None:
            shown += text.finish()
        if text.stop_string is not None:
            self._num_silent_tokens = 0
        tokens = text.tokens(all_came=ended or text.stop_string is not None) if self._has_logprobs else ()
        return TextDelta(shown, self.index, tokens) if shown or tokens else None

    def _end(self, output: TokenOutput, *, draining: bool) -> Finished | Failed:
        usage = self.usage
        stop_string = self.text.stop_string
        if stop_string is not None:
            return Finished(reason=EndReason.STOP, usage=usage, stop_string=stop_string, index=self.index)
        match output.finish_reason:
            case FinishReason.STOP:
                return Finished(reason=EndReason.STOP, usage=usage, index=self.index)
            case FinishReason.LENGTH:
                return Finished(reason=EndReason.LENGTH, usage=usage, index=self.index)
        return broken_off(draining=draining, detail=output.error or "", usage=usage)


def broken_off(*, draining: bool, detail: str, usage: Usage) -> Failed:
    """What is told of a generation that the engine ended: `detail` is for the log alone."""
    if draining:
        code, message = Draining.code, "the server stopped before the answer was complete"
    else:
        code = GenerationFailed.code
        message = "the engine failed while computing the answer; the server's log says more"
    return Failed(code=code, message=message, detail=detail, usage=usage)


async def joined(
    events: AsyncIterator[Event], choices: Sequence[Choice], *, n: int
) -> AsyncGenerator[Event, None]:
    """Make one answer of the mixed events of all its choices. One that fails ends them all.

    Args:
        n: choices for each prompt; a prompt's tokens are those of the first of them.
    """

    def usage() -> Usage:
        each = [choice.usage for choice in choices]
        return Usage(
            num_prompt_tokens=sum(one.num_prompt_tokens for one in each[::n]),
            num_cached_tokens=sum(one.num_cached_tokens for one in each[::n]),
            num_output_tokens=sum(one.num_output_tokens for one in each),
            queue_s=min(one.queue_s for one in each),
        )

    yield Started(num_prompt_tokens=usage().num_prompt_tokens)
    num_open = len(choices)
    async for event in events:
        match event:
            case Started():
                continue
            case Finished():
                num_open -= 1
                if num_open == 0:
                    yield msgspec.structs.replace(event, usage=usage())
                    return
                yield ChoiceEnded(index=event.index, reason=event.reason, stop_string=event.stop_string)
            case Failed():
                yield msgspec.structs.replace(event, usage=usage())
                return
            case _:
                yield event


@asynccontextmanager
async def mixed(sources: Sequence[AsyncIterator[Event]]) -> AsyncIterator[AsyncIterator[Event]]:
    """The events of all sources as they come, read ahead by one event in all; ends never.

    Leaving the scope stops all readers. They end of themselves after a terminal event.
    """
    # One place: a slow reader holds the sources back, and each keeps what waits as bare token ids.
    queue: asyncio.Queue[Event] = asyncio.Queue(maxsize=1)

    async def read(source: AsyncIterator[Event]) -> None:
        async for event in source:
            await queue.put(event)

    async def events() -> AsyncGenerator[Event, None]:
        while True:
            yield await queue.get()

    raised: BaseException | None = None
    async with asyncio.TaskGroup() as tasks:
        readers = [tasks.create_task(read(source)) for source in sources]
        try:
            yield events()
        except BaseException as error:
            raised = error  # raised below, outside the group, which would wrap it
        for reader in readers:
            reader.cancel()
    if raised is not None:
        raise raised
