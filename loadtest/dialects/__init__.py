"""The API that a server is asked through. One file per dialect, with a `DIALECT` that is the contract's."""

import importlib
import pkgutil
from typing import Any, Protocol

import msgspec

from loadtest.errors import PlanInvalid
from loadtest.plan import Role


class Message(msgspec.Struct, frozen=True):
    """A part of a prompt."""

    role: Role
    text: str


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One question to a server, in no dialect. Greedy, of exactly `max_tokens` where `ignore_eos` holds."""

    model: str
    messages: tuple[Message, ...]
    max_tokens: int
    ignore_eos: bool = True
    """Servers that do not know the field ignore it or refuse by name; see `servers`."""
    continuous_usage: bool = True
    """Asks for token counts with each event; servers that refuse the field by name are asked without."""
    session: str = ""
    """Not empty: sent as the key by which servers and routers keep a session in one place."""
    extra: dict[str, Any] = {}
    """The user's own body fields. They win over the others; None takes a field away."""


class Usage(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Token counts as the server tells them; None where it does not."""

    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None
    num_cached_tokens: int | None = None


class Reading(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one event of a stream said."""

    text: str = ""
    reasoning: str = ""
    tool_text: str = ""
    """Names and arguments of tool calls."""
    finish_reason: str | None = None
    usage: Usage | None = None
    error: str | None = None


class Dialect(Protocol):
    """How to ask, and what an event means. Stateless."""

    name: str
    path: str
    """Below the target's URL, such as `/v1/chat/completions`."""

    def body(self, ask: Ask) -> dict[str, Any]:
        """The JSON body of a streaming request that asks for usage at the end."""
        ...

    def read(self, data: bytes) -> Reading:
        """One server-sent event's data, `[DONE]` excepted.

        Raises:
            msgspec.DecodeError: not this dialect's JSON.
        """
        ...


def find_dialect(name: str) -> Dialect:
    """The dialect of that name.

    Raises:
        PlanInvalid: naming those there are.
    """
    names = dialect_names()
    if name not in names:
        raise PlanInvalid(f"--dialect is {name!r}; it must be one of {', '.join(names)}")
    dialect: Dialect = importlib.import_module(f"{__name__}.{name}").DIALECT
    return dialect


def dialect_names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(__path__))
