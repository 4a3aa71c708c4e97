"""`GenerateRequest` -> what the engine is asked for: render, encode, check what needs the vocabulary.

The way back, token ids to events, is `answer.py`.
"""

import asyncio
from array import array
from collections.abc import Iterable, Sequence
from functools import partial

from core import SamplingParams
from gateway.errors import InvalidRequest
from gateway.request import GenerateRequest, Message, Prompt, num_utf8_bytes
from gateway.sampling_fields import check_num_choices
from tokenization import ChatTemplate, NoChatTemplate, RenderedPrompt, Tokenizer

INLINE_BYTES = 8 * 1024
"""Text up to this size is encoded on the loop: a thread costs more than the millisecond it takes."""

MAX_LOGPROBS = 1 << 21
"""Log-probabilities in one answer, those of other tokens than the chosen ones included."""


class PromptEncoder:
    """Renders and encodes prompts of one model. Immutable; its slow work runs on any thread."""

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, *, max_context_tokens: int, vocab_size: int
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._max_context_tokens = max_context_tokens
        self.vocab_size = min(vocab_size, tokenizer.vocab_size)
        """Ids below it mean something to both the model and the tokenizer."""
        # Also makes the vocabulary's table now, not at the first token of the first answer.
        self._longest_token_bytes = max(
            len(tokenizer.token_bytes(token_id)) for token_id in range(tokenizer.vocab_size)
        )

    async def encode(self, request: GenerateRequest) -> list[Sequence[int]]:
        """Return the token ids of each prompt, at least one each.

        Raises:
            InvalidRequest: a prompt is empty, or too long whatever its tokens are; an id is none.
            TokenizationError: the template refused, or the text is none.
        """
        for token_id, _ in request.logit_bias:
            self.check_token_ids((token_id,), param=f"logit_bias.{token_id}", place="")
        self.check_token_ids(request.stop_token_ids, param="stop_token_ids")
        if request.messages:
            return [await self.encode_messages(request.messages, tenant=request.cache_namespace.decode())]
        return await self.encode_prompts(request.prompts, param="prompt")

    async def encode_messages(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, tenant: str = ""
    ) -> Sequence[int]:
        """Render a conversation and encode it, as `encode` does. A tenant's earlier turns are remembered."""
        num_bytes = sum(num_utf8_bytes(message.content) for message in messages)
        self._refuse_hopeless(num_bytes, param="messages")
        encode = partial(self._encode_messages, messages, add_generation_prompt, scope=tenant)
        token_ids = encode() if num_bytes <= INLINE_BYTES else await asyncio.to_thread(encode)
        if not token_ids:
            raise InvalidRequest("the prompt is empty", param="messages")
        return token_ids

    async def encode_prompts(self, prompts: Sequence[Prompt], *, param: str) -> list[Sequence[int]]:
        """Encode prompts that no template touches, as `encode` does. `param` is their field's name."""
        encoded: list[Sequence[int]] = []
        for i, prompt in enumerate(prompts):
            at = param if len(prompts) == 1 else f"{param}[{i}]"
            token_ids = await self.encode_text(prompt, param=at) if isinstance(prompt, str) else prompt
            if not token_ids:
                raise InvalidRequest(f"the prompt is empty: {at}", param=at)
            self.check_token_ids(token_ids, param=at)
            encoded.append(token_ids)
        return encoded

    async def encode_text(self, text: str, *, param: str, add_bos: bool | None = None) -> list[int]:
        """Encode plain text, away from the loop if it is long. May give nothing."""
        num_bytes = num_utf8_bytes(text)
        self._refuse_hopeless(num_bytes, param=param)
        encode = partial(self._tokenizer.encode, text, add_bos=add_bos)
        return encode() if num_bytes <= INLINE_BYTES else await asyncio.to_thread(encode)

    async def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The conversation as the template writes it.

        Raises:
            InvalidRequest: too long for the context.
            TokenizationError: as in `encode`.
        """
        num_bytes = sum(num_utf8_bytes(message.content) for message in messages)
        self._refuse_hopeless(num_bytes, param="messages")
        if num_bytes <= INLINE_BYTES:
            return self._render(messages, add_generation_prompt).text
        return (await asyncio.to_thread(self._render, messages, add_generation_prompt)).text

    async def decode(self, token_ids: Sequence[int]) -> str:
        """All text of `token_ids`, control tokens as their literals.

        Raises:
            InvalidRequest: an id is none of the vocabulary.
        """
        self.check_token_ids(token_ids, param="tokens")
        decode = partial(self._tokenizer.decode, token_ids, skip_special=False)
        return decode() if len(token_ids) <= INLINE_BYTES else await asyncio.to_thread(decode)

    def check_token_ids(self, token_ids: Sequence[int], *, param: str, place: str = "[{i}]") -> None:
        """Refuse ids that the vocabulary does not have.

        Raises:
            InvalidRequest: naming the first of them and where it stands.
        """
        if not token_ids or max(token_ids) < self.vocab_size:
            return
        i, token_id = next((i, each) for i, each in enumerate(token_ids) if each >= self.vocab_size)
        at = param + place.format(i=i)
        raise InvalidRequest(
            f"{at}: {token_id} is no token id; the vocabulary has {self.vocab_size}", param=at
        )

    def _refuse_hopeless(self, num_bytes: int, *, param: str) -> None:
        least_tokens = -(-num_bytes // self._longest_token_bytes)
        if least_tokens >= self._max_context_tokens:
            # Known from the bytes alone, so that eight hopeless megabytes cost nobody anything.
            raise InvalidRequest(
                f"the prompt has at least {least_tokens} tokens, the context is {self._max_context_tokens}",
                param=param,
                code="context_length_exceeded",
            )

    def _encode_messages(
        self, messages: Sequence[Message], add_generation_prompt: bool, *, scope: str
    ) -> Sequence[int]:
        rendered = self._render(messages, add_generation_prompt)
        return array("i", self._tokenizer.encode_rendered(rendered, scope=scope))  # packed off the loop

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool) -> RenderedPrompt:
        if self._template is None:
            raise NoChatTemplate
        plain = [{"role": message.role, "content": message.content} for message in messages]
        return self._template.render(plain, add_generation_prompt=add_generation_prompt)


def sampling_params(
    request: GenerateRequest,
    *,
    num_prompt_tokens: int,
    max_context_tokens: int,
    stop_token_ids: Iterable[int],
    vocab_size: int,
    sibling: int = 0,
) -> SamplingParams:
    """What the engine is asked for. Without `max_tokens` the answer may fill the context.

    A prompt that leaves no room asks for one token, so that the engine's own refusal names the numbers.
    So does a request for none: the engine's requests make at least one.

    Args:
        stop_token_ids: those that end the model's turn; the request's own come on top.
        sibling: which of its prompt's `n` choices this is; each has a seed of its own.

    Raises:
        InvalidRequest: all choices together might become too long, or tell of too much.
    """
    rest = max(1, max_context_tokens - num_prompt_tokens)
    max_tokens = rest if request.max_tokens is None else max(1, request.max_tokens)
    if request.min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens is {request.min_tokens}, and at most {max_tokens} tokens fit after this prompt",
            param="min_tokens",
        )
    check_num_choices(n=request.n, num_prompts=max(1, len(request.prompts)), max_tokens=max_tokens)
    _check_num_logprobs(request, num_tokens=max_tokens + (num_prompt_tokens if request.echo else 0))
    ends = set(request.stop_token_ids) if request.ignore_eos else {*stop_token_ids, *request.stop_token_ids}
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        seed=None if request.seed is None else request.seed + sibling,
        stop_token_ids=tuple(sorted(ends)),
        top_k=request.top_k if request.top_k < vocab_size else 0,
        min_p=request.min_p,
        typical_p=request.typical_p,
        repetition_penalty=request.repetition_penalty,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logit_bias=request.logit_bias,
        min_tokens=request.min_tokens,
        num_logprobs=request.num_logprobs,
        prompt_logprobs=request.num_logprobs if request.echo else None,
    )


def _check_num_logprobs(request: GenerateRequest, *, num_tokens: int) -> None:
    """Bound what one answer has to hold by the product of sizes: each alone may be modest."""
    if request.num_logprobs is None:
        return
    num_logprobs = request.num_choices * num_tokens * (1 + request.num_logprobs)
    if num_logprobs > MAX_LOGPROBS:
        raise InvalidRequest(
            f"choices x tokens x log-probabilities is {request.num_choices} x {num_tokens} x "
            f"{1 + request.num_logprobs}; at most {MAX_LOGPROBS}. Give a smaller max_tokens",
            param="logprobs",
        )
