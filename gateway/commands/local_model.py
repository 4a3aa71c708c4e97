"""A model asked directly, without a server between: what `generate` and `chat` share."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import monotonic

import typer
from rich.console import Console

from core import EngineError
from gateway.backends import Backend
from gateway.backends.local import open_local_backend
from gateway.commands import CommandFailed
from gateway.config import ServerConfig
from gateway.errors import GatewayError
from gateway.events import EndReason, Failed, Finished, TextDelta, Usage
from gateway.request import GenerateRequest
from gateway.telemetry.logging import configure_logging
from tokenization import TokenizationError

_CONTROLS = dict.fromkeys((*range(9), *range(11, 32), *range(127, 160)), "\N{REPLACEMENT CHARACTER}")
"""All but tab and newline: a model must not be able to command the terminal."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One complete answer, and how fast it came. Times in seconds."""

    text: str
    reason: EndReason
    usage: Usage
    ttft_s: float
    """From the request to the first text."""
    e2e_s: float

    def speed(self) -> str:
        """One line for people."""
        usage = self.usage
        prompt_rate = _rate(usage.num_prompt_tokens - usage.num_cached_tokens, self.ttft_s)
        output_rate = _rate(usage.num_output_tokens - 1, self.e2e_s - self.ttft_s)
        cut = "; cut at the limit of tokens" if self.reason is EndReason.LENGTH else ""
        return (
            f"prompt {usage.num_prompt_tokens} tokens, {usage.num_cached_tokens} cached, {prompt_rate}; "
            f"output {usage.num_output_tokens} tokens, {output_rate}; "
            f"first token after {self.ttft_s:.2f} s{cut}"
        )


def run_loop(main: Coroutine[None, None, None]) -> None:
    """Run to the end. A task group's wrapping is taken off, so that callers see the error itself."""
    try:
        asyncio.run(main)
    except BaseExceptionGroup as group:
        raise _innermost(group) from None


@asynccontextmanager
async def loaded(config: ServerConfig, *, console: Console) -> AsyncIterator[Backend]:
    """Load the model, with a word on the terminal, until the scope is left."""
    configure_logging(level="error", log_format="console")
    status = console.status(f"loading {config.model_id}")
    status.start()
    try:
        async with open_local_backend(config) as backend:
            status.stop()
            yield backend
    except TokenizationError as error:
        raise CommandFailed(str(error)) from error
    finally:
        status.stop()


async def stream_answer(backend: Backend, request: GenerateRequest, *, show: Callable[[str], None]) -> Answer:
    """Ask, and show the answer piece by piece.

    Raises:
        CommandFailed: the request was refused, or its answer broke off.
    """
    pieces: list[str] = []
    began_s = monotonic()
    first_s: float | None = None
    try:
        async with backend.open(request, request_id="terminal") as events:
            async for event in events:
                match event:
                    case TextDelta():
                        first_s = first_s or monotonic()
                        pieces.append(event.text)
                        show(event.text)
                    case Finished():
                        ended_s = monotonic()
                        return Answer(
                            text="".join(pieces),
                            reason=event.reason,
                            usage=event.usage,
                            ttft_s=(first_s or ended_s) - began_s,
                            e2e_s=ended_s - began_s,
                        )
                    case Failed():
                        raise CommandFailed(": ".join(filter(None, (event.message, event.detail))))
                    case _:
                        continue
    except (GatewayError, EngineError, TokenizationError) as error:
        raise CommandFailed(str(error)) from error
    raise AssertionError("an answer ends with a terminal event")


def write(text: str) -> None:
    """Show text of the model now; what would command a terminal is shown as a mark."""
    typer.echo(text.translate(_CONTROLS) if sys.stdout.isatty() else text, nl=False)


def checked_text(text: str, *, what: str) -> str:
    """Return text that is some, in Unicode.

    Raises:
        CommandFailed: it is empty, or an argument's bytes were not UTF-8.
    """
    if not text.strip():
        raise CommandFailed(f"{what} is empty")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise CommandFailed(f"{what} is not UTF-8") from None
    return text


def _rate(num_tokens: int, seconds: float) -> str:
    return f"{num_tokens / seconds:.1f} tokens/s" if num_tokens > 0 and seconds > 0 else "no rate"


def _innermost(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
