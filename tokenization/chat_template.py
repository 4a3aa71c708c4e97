"""Messages -> prompt text, as Hugging Face renders it. The only place that runs a template."""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

import jinja2

from tokenization.errors import BadVocabulary, NoChatTemplate, TemplateError
from tokenization.prompt import RenderedPrompt
from tokenization.template_environment import template_environment, texts_and_names
from tokenization.tokenizer import Tokenizer
from tokenization.user_text import Plain, UserText, choose_marker, plain_copy

_KEY = "tokenizer.chat_template"
_FAILURES = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,  # RecursionError among them
    TypeError,
    ValueError,
)
"""What a wrong template or unexpected messages make Jinja raise. Not AssertionError: that is ours."""


class ChatTemplate:
    """One checkpoint's template, compiled once. Immutable, so any thread may render.

    Invariant: no control token of the tokeniser is made, wholly or partly, of a caller's strings;
    `Tokenizer.encode_rendered` of the result holds exactly those the template wrote. Tokens that are
    added but not special (`<tool_call>`, `</think>`) count as control tokens where the template writes
    them itself, except in assistant messages: there they are the model's own words.
    """

    def __init__(
        self,
        source: str,
        tokenizer: Tokenizer,
        *,
        now: Callable[[], datetime] = datetime.now,
        max_chars: int = 1 << 26,
        max_seconds: float = 30.0,
    ) -> None:
        """
        Args:
            now: the clock behind `strftime_now`.
            max_chars, max_seconds: a rendering past either is stopped, looked at between its chunks.

        Raises:
            TemplateError: the template does not compile.
        """
        environment = template_environment(now)
        try:
            self._template = environment.from_string(source)
            texts, names = texts_and_names(environment, source)
        except _FAILURES as error:
            raise TemplateError(f"the chat template does not compile: {error}") from error
        self._source = source
        self._max_chars = max_chars
        self._max_seconds = max_seconds
        self._token_texts = _token_texts(tokenizer)
        texts.extend(self._token_texts.values())
        special = {token.text for token in tokenizer.added_tokens if token.special}
        written = {
            token.text
            for token in tokenizer.added_tokens
            if token.text.strip() and len(token.text) > 1 and any(token.text in text for text in texts)
        }
        self._reserved = {"messages", "tools", "add_generation_prompt", *self._token_texts}
        self._reserved.update(environment.globals)
        self._model_text = UserText(special, template_texts=texts, template_names=names)
        self._user_text = UserText(special | written, template_texts=texts, template_names=names)
        # The escape of a marker must not stand in the template either, or it would vanish.
        self._template_plain: Plain = list(texts)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object], tokenizer: Tokenizer) -> "ChatTemplate":
        """The template in a checkpoint's metadata.

        Raises:
            NoChatTemplate: there is none.
            BadVocabulary: it is not a string.
            TemplateError: it does not compile.
        """
        source = metadata.get(_KEY)
        if source is None:
            raise NoChatTemplate
        if not isinstance(source, str):
            raise BadVocabulary(_KEY, f"is {type(source).__name__}, not a string")
        return cls(source, tokenizer)

    @property
    def fingerprint(self) -> str:
        """SHA-256, in hex, of the template's source."""
        return hashlib.sha256(self._source.encode(errors="surrogatepass")).hexdigest()

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        **variables: object,
    ) -> RenderedPrompt:
        """Render a conversation.

        Args:
            variables: what else the template may read (`enable_thinking`, `documents`). Strings in them
                are the caller's, too.

        Raises:
            BadText: a value is not JSON or holds a lone surrogate; names where.
            TemplateError: the template refused or failed; quotes its message.
        """
        for name in variables.keys() & self._reserved:
            raise TemplateError(f"the variable {name!r} belongs to the template and cannot be set")
        chat = [_normalised(message, f"messages[{n}]") for n, message in enumerate(messages)]
        others: dict[str, Plain] = {"tools": None if tools is None else plain_copy(tools, "tools")}
        others |= {name: plain_copy(value, name) for name, value in variables.items()}
        chat, others, marker = self._mark(chat, others)
        text = self._run(
            {"messages": chat, **others, "add_generation_prompt": add_generation_prompt}, marker=marker
        )
        return RenderedPrompt(text, marker)

    def _mark(
        self, chat: list[dict[str, Plain]], others: dict[str, Plain]
    ) -> tuple[list[dict[str, Plain]], dict[str, Plain], str]:
        writers = [self._model_text if m.get("role") == "assistant" else self._user_text for m in chat]
        paths = (
            f"messages[{n}].{key}"
            for n, (writer, message) in enumerate(zip(writers, chat, strict=True))
            for key, value in message.items()
            if writer.needs_marks(key) or writer.needs_marks(value)
        )
        other_paths = (name for name, value in others.items() if self._user_text.needs_marks(value))
        path = next(paths, None) or next(other_paths, None)
        if path is None:
            return chat, others, ""
        marker = choose_marker([*chat, *others.values(), self._template_plain], path=path)
        marked_chat: list[dict[str, Plain]] = []
        for writer, message in zip(writers, chat, strict=True):
            marked = writer.mark(message, marker)
            assert isinstance(marked, dict)
            marked_chat.append(marked)
        return marked_chat, {n: self._user_text.mark(v, marker) for n, v in others.items()}, marker

    def _run(self, variables: Mapping[str, object], *, marker: str) -> str:
        pieces: list[str] = []
        num_chars = 0
        deadline = time.monotonic() + self._max_seconds
        try:
            for piece in self._template.generate(**self._token_texts, **variables):
                pieces.append(piece)
                num_chars += len(piece)
                if num_chars > self._max_chars:
                    raise TemplateError(f"the chat template wrote more than {self._max_chars} characters")
                if time.monotonic() > deadline:
                    raise TemplateError(f"the chat template ran longer than {self._max_seconds} s")
        except _FAILURES as error:
            message = str(error) or type(error).__name__
            raise TemplateError(RenderedPrompt(message, marker).text) from error
        return "".join(pieces)


def _normalised(message: object, path: str) -> dict[str, Plain]:
    """Null means absent, as in OpenAI's API, except that content is always there for the template."""
    copy = plain_copy(message, path)
    if not isinstance(copy, dict):
        raise TemplateError(f"{path} is {type(message).__name__}, not an object")
    present: dict[str, Plain] = {key: value for key, value in copy.items() if value is not None}
    present.setdefault("content", "")
    return present


def _token_texts(tokenizer: Tokenizer) -> dict[str, str]:
    """`bos_token` and `eos_token`, as far as the checkpoint has them."""
    texts: dict[str, str] = {}
    if tokenizer.bos_token_id is not None:
        texts["bos_token"] = tokenizer.token_bytes(tokenizer.bos_token_id).decode()
    if tokenizer.eos_token_id is not None:
        texts["eos_token"] = tokenizer.token_bytes(tokenizer.eos_token_id).decode()
    return texts
