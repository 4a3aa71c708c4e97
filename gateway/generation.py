"""`GenerateRequest` -> events: render, encode, submit, detokenise, stop.

Text lives on this side of the engine, token ids on the other.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from typing import Protocol

from core import FinishReason, SamplingParams, TokenOutput
from gateway.errors import Draining, GenerationFailed, InvalidRequest
from gateway.events import EndReason, Event, Failed, Finished, Started, TextDelta, Usage
from gateway.request import GenerateRequest
from tokenization import ChatTemplate, Detokenizer, NoChatTemplate, StopMatcher, Tokenizer

INLINE_BYTES = 8 * 1024
"""Text up to this size is encoded on the loop: a thread costs more than the millisecond it takes."""


class TokenStream(Protocol):
    """What is read of an engine's stream."""

    def __aiter__(self) -> AsyncIterator[TokenOutput]: ...

    def finish(self, num_tokens: int) -> None:
        """End it now with its first `num_tokens` output tokens."""
        ...


class PromptEncoder:
    """Renders and encodes prompts of one model. Immutable; its slow work runs on any thread."""

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, *, max_context_tokens: int
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._max_context_tokens = max_context_tokens
        # Also makes the vocabulary's table now, not at the first token of the first answer.
        self._longest_token_bytes = max(
            len(tokenizer.token_bytes(token_id)) for token_id in range(tokenizer.vocab_size)
        )

    async def encode(self, request: GenerateRequest) -> list[int]:
        """Return the prompt's token ids, at least one. Long texts are encoded away from the loop.

        Raises:
            InvalidRequest: the text is empty, or too long whatever its tokens are.
            TokenizationError: the template refused, or the text is none.
        """
        num_bytes = request.num_text_bytes
        least_tokens = -(-num_bytes // self._longest_token_bytes)
        if least_tokens >= self._max_context_tokens:
            # Known from the bytes alone, so that eight hopeless megabytes cost nobody anything.
            raise InvalidRequest(
                f"the prompt has at least {least_tokens} tokens, the context is {self._max_context_tokens}",
                param="prompt" if request.prompt is not None else "messages",
                code="context_length_exceeded",
            )
        if num_bytes <= INLINE_BYTES:
            token_ids = self._encode(request)
        else:
            token_ids = await asyncio.to_thread(self._encode, request)
        if not token_ids:
            raise InvalidRequest("the prompt is empty", param="prompt")
        return token_ids

    def _encode(self, request: GenerateRequest) -> list[int]:
        if request.prompt is not None:
            return self._tokenizer.encode(request.prompt)
        if self._template is None:
            raise NoChatTemplate
        messages = [{"role": message.role, "content": message.content} for message in request.messages]
        return self._tokenizer.encode_rendered(self._template.render(messages, add_generation_prompt=True))


def sampling_params(
    request: GenerateRequest,
    *,
    num_prompt_tokens: int,
    max_context_tokens: int,
    stop_token_ids: Iterable[int],
) -> SamplingParams:
    """What the engine is asked for. Without `max_tokens` the answer may fill the context.

    A prompt that leaves no room asks for one token, so that the engine's own refusal names the numbers.
    """
    rest = max(1, max_context_tokens - num_prompt_tokens)
    return SamplingParams(
        max_tokens=rest if request.max_tokens is None else request.max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        seed=request.seed,
        stop_token_ids=tuple(sorted(stop_token_ids)),
    )


class AnswerText:
    """Output token ids in, text out, up to the first stop string. Owned by one generation.

    Invariant: the pieces joined do not depend on how the ids were cut into pushes.
    """

    def __init__(self, tokenizer: Tokenizer, *, stop: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._matcher = StopMatcher(stop)
        self.stop_string: str | None = None
        """The stop string that ended the text."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer: those before the stop string, or all that came."""
        if self._matcher.match_offset is None:
            return self._detokenizer.num_tokens
        return self._detokenizer.num_tokens_before(self._matcher.match_offset)

    def push(self, token_ids: Iterable[int]) -> str:
        """Return what may be shown by now. After `stop_string` is set there is nothing more to push."""
        return self._matched(self._detokenizer.push(token_ids))

    def finish(self) -> str:
        """The last token has come: return what was held back. May still find a stop string."""
        text = self._matched(self._detokenizer.finish())
        return text if self.stop_string is not None else text + self._matcher.flush()

    def _matched(self, text: str) -> str:
        shown, self.stop_string = self._matcher.push(text)
        return shown


async def answer_events(
    outputs: TokenStream,
    text: AnswerText,
    *,
    num_prompt_tokens: int,
    stop_token_ids: frozenset[int],
    is_draining: Callable[[], bool],
) -> AsyncGenerator[Event, None]:
    """Turn an engine's outputs into events, ending with exactly one terminal event.

    Args:
        is_draining: whether an error now means that the server stops, not that something broke.
    """
    num_cached_tokens = num_silent_tokens = 0
    yield Started(num_prompt_tokens=num_prompt_tokens)
    async for output in outputs:
        num_cached_tokens = max(num_cached_tokens, output.num_cached_tokens)
        token_ids = output.token_ids
        if output.finish_reason is FinishReason.STOP and token_ids and token_ids[-1] in stop_token_ids:
            # Counted, as every token is that the model made; but the end of a turn is no text.
            token_ids, num_silent_tokens = token_ids[:-1], 1
        shown = text.push(token_ids)
        if output.finish_reason is not None and text.stop_string is None:
            shown += text.finish()
        if shown:
            yield TextDelta(shown)
        if text.stop_string is None and output.finish_reason is None:
            continue
        if text.stop_string is not None:
            outputs.finish(text.num_tokens)
            num_silent_tokens = 0
        usage = Usage(
            num_prompt_tokens=num_prompt_tokens,
            num_cached_tokens=num_cached_tokens,
            num_output_tokens=text.num_tokens + num_silent_tokens,
        )
        if text.stop_string is not None:
            yield Finished(reason=EndReason.STOP, usage=usage, stop_string=text.stop_string)
        else:
            yield _terminal(output, usage=usage, draining=is_draining())
        return
    raise AssertionError("the engine's stream ended without a finish reason")


def _terminal(output: TokenOutput, *, usage: Usage, draining: bool) -> Finished | Failed:
    match output.finish_reason:
        case FinishReason.STOP:
            return Finished(reason=EndReason.STOP, usage=usage)
        case FinishReason.LENGTH:
            return Finished(reason=EndReason.LENGTH, usage=usage)
        case _ if draining:
            message = "the server stopped before the answer was complete"
            return Failed(code=Draining.code, message=message, detail=output.error or "", usage=usage)
        case _:
            message = "the engine failed while computing the answer; the server's log says more"
            return Failed(code=GenerationFailed.code, message=message, detail=output.error or "", usage=usage)
