"""What a client asks for. Every dialect parses into this; every backend reads it."""

import msgspec


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of a conversation. `role` is `system`, `user` or `assistant`; `content` is plain text."""

    role: str
    content: str


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One generation. Either `messages` or `prompt` is given; values are in range already.

    `prompt` is raw text that no template touches. `max_tokens` None means "the rest of the
    context". `model` is the name the client used, before aliases.
    """

    model: str
    messages: tuple[Message, ...] = ()
    prompt: str | None = None
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    """A streamed answer ends with its usage."""

    tenant: str = ""
    """Whose API key this came with, set by the server: nobody else's cached prompts are used for it."""

    @property
    def num_text_bytes(self) -> int:
        """UTF-8 bytes of all text the client sent: a bound on the work of encoding it."""
        texts = [message.content for message in self.messages] + [self.prompt or ""]
        return sum(len(text) if text.isascii() else len(text.encode()) for text in texts)
