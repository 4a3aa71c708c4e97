"""Traces of real use, one file per format, with a `FORMAT` that is the contract's. `ls` is the list.

A trace says when requests came, how long they were and, in some formats, which blocks of their prompts
were the same. It holds no text.
"""

import importlib
import pkgutil
import re
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from loadtest.errors import PlanInvalid
from loadtest.text_files import read_text

Clock = Literal["wall", "session"]
"""One clock for all, or one for each session that begins with it."""

Parts = tuple[tuple[str, int], ...]
"""A prompt as (name, tokens): the same name at the same place is the same text."""


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a trace. None means that the trace does not say."""

    session: str | None
    agent: str = ""
    """Sub-agents of a session have a history of their own."""
    at_s: float
    num_input_tokens: int
    num_output_tokens: int
    parts: Parts | None = None
    pause_s: float | None = None
    """Between the answer before and this request."""
    server_s: float | None = None
    """How long the answer took where the trace was recorded."""


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """A trace in the order of its file."""

    name: str
    format: str
    clock: Clock
    requests: tuple[TraceRequest, ...]
    notes: tuple[str, ...] = ()


class TraceFormat(Protocol):
    """Reads one format. Stateless."""

    name: str

    def fits(self, first_line: str) -> bool:
        """Whether a file that begins so is of this format."""
        ...

    def read(self, text: str, source: str) -> Trace:
        """Raises PlanInvalid naming `source`, line and field."""
        ...


def read_trace(path: Path, *, format_name: str = "") -> Trace:
    """Read a trace, plain or gzipped; the format is seen from its first line where none is named.

    Raises:
        PlanInvalid: it cannot be read, is of no known format, or a line is wrong.
    """
    text = read_text(path)
    first = text.split("\n", 1)[0]
    formats = [_format(name) for name in trace_format_names()]
    named = [each for each in formats if (each.name == format_name if format_name else each.fits(first))]
    if not named:
        known = ", ".join(trace_format_names())
        what = (
            f"there is no trace format {format_name!r}"
            if format_name
            else f"{path} begins like no known trace"
        )
        raise PlanInvalid(f"{what}; known are {known}")
    trace = named[0].read(text, str(path))
    if not trace.requests:
        raise PlanInvalid(f"{path} holds no request")
    return msgspec.structs.replace(trace, name=re.sub(r"\.(gz|jsonl?|csv|plan)(?=\.|$)", "", path.name))


def trace_format_names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def _format(name: str) -> TraceFormat:
    found: TraceFormat = importlib.import_module(f"{__name__}.{name}").FORMAT
    return found
