"""Where answers come from, one file per kind. `ls` of this folder is the list of kinds.

This file is only the contract and the finder.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import msgspec

from gateway.errors import ModelNotFound, NotReady
from gateway.events import Event
from gateway.request import GenerateRequest, Message, Prompt


class BackendHealth(msgspec.Struct, frozen=True, kw_only=True):
    """`alive` false asks for a restart of the process; `ready` false asks for no more requests."""

    alive: bool
    ready: bool
    detail: str = ""


class Gauge(msgspec.Struct, frozen=True):
    """One number for `/metrics`, read at the moment of a scrape. `counter` says that it only grows."""

    name: str
    description: str
    value: float
    counter: bool = False
    labels: Mapping[str, str] = {}


class Embeddings(msgspec.Struct, frozen=True, kw_only=True):
    """The mean of the hidden states of each prompt."""

    vectors: tuple[tuple[float, ...], ...]
    num_prompt_tokens: int


class Backend(Protocol):
    """Serves models. Made and closed by the lifespan; used by the event loop alone."""

    @property
    def fingerprint(self) -> str:
        """Changes when the same request may be answered differently."""
        ...

    def models(self) -> tuple[str, ...]: ...

    def open(
        self, request: GenerateRequest, *, request_id: str
    ) -> AbstractAsyncContextManager[AsyncIterator[Event]]:
        """Start a generation; leaving the scope ends it and gives everything back.

        The first event is `Started`, the last one terminal. `request_id` is the server's own.

        Raises:
            GatewayError, EngineError: on entering, for a request that was not taken.
        """
        ...

    async def tokenize(self, text: str, *, add_special_tokens: bool) -> Sequence[int]:
        """The token ids of plain text.

        Raises:
            GatewayError, TokenizationError: the text is none, or longer than the context.
        """
        ...

    async def tokenize_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool
    ) -> Sequence[int]:
        """The token ids a conversation is answered from. Raises as `tokenize` does."""
        ...

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, control tokens as their literals.

        Raises:
            InvalidRequest: an id is none of the vocabulary.
        """
        ...

    async def apply_template(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """The prompt that a conversation is answered from. Raises as `tokenize` does."""
        ...

    async def embed(self, prompts: Sequence[Prompt], *, request_id: str, tenant: str) -> Embeddings:
        """Pool the hidden states of each prompt. Cancelling it gives everything back.

        Raises:
            GatewayError, EngineError, TokenizationError: a prompt cannot be taken, or the engine failed.
        """
        ...

    def health(self) -> BackendHealth: ...

    def gauges(self) -> tuple[Gauge, ...]:
        """Live numbers. Never raises, never waits."""
        ...

    def explain(self, request_id: str) -> tuple[Mapping[str, object], ...]:
        """Where the time of a request went, choice by choice; nothing if it is not known here any more."""
        ...

    def live_requests(self) -> tuple[Mapping[str, object], ...]:
        """The same of all that are waiting or running; `request_id` names each."""
        ...

    async def drain(self, *, deadline_s: float) -> None:
        """Let running generations finish; those that have not by the deadline end with `Failed`."""
        ...


class Backends:
    """Finds who serves a model name. Empty until the first backend has loaded."""

    def __init__(self, *, aliases: tuple[str, ...] = ()) -> None:
        self._aliases = aliases
        self._by_model: dict[str, Backend] = {}

    def add(self, backend: Backend) -> None:
        for model in backend.models():
            assert model not in self._by_model, f"two backends serve {model}"
            self._by_model[model] = backend

    def models(self) -> tuple[str, ...]:
        return tuple(self._by_model)

    def aliases(self) -> tuple[tuple[str, str], ...]:
        """(further name, model it stands for); without `*`, which is no name."""
        if not self._by_model:
            return ()
        named = dict.fromkeys(self._aliases)
        return tuple((name, self._first()) for name in named if name != "*" and name not in self._by_model)

    def all(self) -> tuple[Backend, ...]:
        return tuple(dict.fromkeys(self._by_model.values()))

    def find(self, model: str) -> tuple[Backend, str]:
        """Return the backend for `model` and the name it serves it under. An alias means the first model.

        Raises:
            NotReady: nothing has loaded yet.
            ModelNotFound: naming what is served.
        """
        if not self._by_model:
            raise NotReady
        if model not in self._by_model:
            if model not in self._aliases and "*" not in self._aliases:
                aliases = tuple(name for name, _ in self.aliases())
                raise ModelNotFound(model, served=self.models(), aliases=aliases)
            model = self._first()
        return self._by_model[model], model

    def _first(self) -> str:
        return next(iter(self._by_model))
