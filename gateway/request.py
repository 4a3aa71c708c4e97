"""What a client asks for. Every dialect parses into this; every backend reads it."""

import msgspec

MAX_CHOICES = 128
"""Choices of one answer: prompts times `n`."""
MAX_ANSWER_TOKENS = 1 << 20
"""Choices times `max_tokens`: what one request of several choices may ask for."""

Prompt = str | tuple[int, ...]
"""Raw text that no template touches, or token ids."""


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of a conversation. `role` is `system`, `user` or `assistant`; `content` is plain text."""

    role: str
    content: str


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of one or more choices. Either `messages` or `prompts` is given; values are in range.

    Only what needs the vocabulary (token ids) or the context's size is left for the backend to check.
    `max_tokens` None means "the rest of the context". `model` is the name the client used, before
    aliases. Sampling options are those of `core.SamplingParams`, and off by default.
    """

    model: str
    messages: tuple[Message, ...] = ()
    prompts: tuple[Prompt, ...] = ()
    n: int = 1
    """Choices for each prompt. Those of prompt `i` have the indices from `i * n` on."""
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    """Go on after the tokens that end the model's turn."""
    num_logprobs: int | None = None
    """Most likely tokens reported beside each token; None: no log-probabilities."""
    echo: bool = False
    """Each choice begins with its prompt, which has log-probabilities too where the answer has."""
    stream: bool = False
    include_usage: bool = False
    """A streamed answer ends with its usage."""
    session_id: str = ""
    """The client's name for the conversation this is a turn of; empty: none."""
    cache_salt: str = ""
    """Cached prompts are shared only among a tenant's requests of the same salt."""
    tenant: str = ""
    """Whose API key this came with, set by the server: nobody else's cached prompts are used for it."""

    @property
    def cache_namespace(self) -> bytes:
        """Who may share cached prompts with it. No two pairs of tenant and salt give the same."""
        tenant, salt = self.tenant.encode(), self.cache_salt.encode()
        return b"%d:%s%s" % (len(tenant), tenant, salt)

    @property
    def num_choices(self) -> int:
        return self.n * max(1, len(self.prompts))


def num_utf8_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())
