"""`tidegate chat`: a conversation at the terminal, or piped in line by line.

Answers go to stdout, everything else to stderr. The conversation is sent anew each turn, as every
API client does, and the engine's prefix tree recognises all of it but the newest message.
"""

import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable

import typer
from rich.console import Console
from rich.markup import escape

from gateway.backends import Backend
from gateway.commands import CommandFailed
from gateway.commands.local_model import Answer, checked_text, loaded, run_loop, stream_answer, write
from gateway.commands.sampling_flags import Sampling
from gateway.config import ServerConfig
from gateway.request import GenerateRequest, Message

with contextlib.suppress(ImportError):  # not every Python has it
    import readline  # noqa: F401  # with it, input() edits lines and remembers them

HELP = "/reset forgets the conversation, /system TEXT sets the system message, /quit ends"


def chat(config: ServerConfig, *, system: str | None, sampling: Sampling) -> None:
    """Talk until `/quit`, the end of input or Ctrl-C at the prompt.

    Raises:
        CommandFailed, EngineError: input is no text, or the model cannot be used.
    """
    checked = None if system is None else checked_text(system, what="--system")
    run_loop(_converse(config, system=checked, sampling=sampling))


async def _converse(config: ServerConfig, *, system: str | None, sampling: Sampling) -> None:
    console = Console(stderr=True, highlight=False)
    async with loaded(config, console=console) as backend:
        conversation = Conversation(backend, model=config.model_id, system=system, sampling=sampling)
        console.print(f"[bold]{escape(config.model_id)}[/]  {escape(HELP)}", soft_wrap=True)
        while (line := _read_line()) is not None:
            text = line.strip()
            if text == "/quit":
                return
            note = conversation.command(text) if text.startswith("/") else await conversation.say(text)
            if note:
                console.print(f"[dim]{escape(note)}[/]", soft_wrap=True)


class Conversation:
    """What was said so far. Owned by one `chat`."""

    def __init__(self, backend: Backend, *, model: str, system: str | None, sampling: Sampling) -> None:
        self._backend, self._model, self._sampling = backend, model, sampling
        self._system = system
        self._turns: list[Message] = []

    def command(self, text: str) -> str:
        """Carry out a line that begins with a slash; return what to tell the user."""
        name, _, rest = text.partition(" ")
        match name:
            case "/reset":
                self._turns.clear()
                return "forgotten"
            case "/system":
                self._system = rest.strip() or None
                self._turns.clear()
                return "system message set, conversation forgotten" if self._system else "no system message"
            case "/help":
                return HELP
            case _:
                return f"there is no {name}; {HELP}"

    async def say(self, text: str) -> str:
        """Send one message and show the answer; return what to tell the user about it.

        A refused message is not kept; of an interrupted answer only what was shown.
        """
        if not text:
            return ""
        self._turns.append(Message(role="user", content=text))
        shown: list[str] = []
        answer = await self._ask(shown)
        if isinstance(answer, CommandFailed):
            self._turns.pop()
            return f"{answer}; /reset makes room" if "context" in str(answer) else str(answer)
        self._close_turn("".join(shown))
        return "interrupted" if answer is None else answer.speed()

    async def _ask(self, shown: list[str]) -> Answer | CommandFailed | None:
        """Return the answer or why there is none; None if Ctrl-C ended it."""

        def show(piece: str) -> None:
            shown.append(piece)
            write(piece)

        loop = asyncio.get_running_loop()
        try:
            async with asyncio.TaskGroup() as tasks:
                task = tasks.create_task(self._attempt(show))
                loop.add_signal_handler(signal.SIGINT, task.cancel)
        finally:
            loop.remove_signal_handler(signal.SIGINT)
            write("\n")
        return None if task.cancelled() else task.result()

    async def _attempt(self, show: Callable[[str], None]) -> Answer | CommandFailed:
        """A refusal is a value here: a task group would wrap it."""
        try:
            return await stream_answer(self._backend, self._request(), show=show)
        except CommandFailed as error:
            return error

    def _request(self) -> GenerateRequest:
        head = [Message(role="system", content=self._system)] if self._system else []
        return GenerateRequest(
            model=self._model,
            messages=(*head, *self._turns),
            max_tokens=self._sampling.max_tokens,
            temperature=self._sampling.temperature,
            top_p=self._sampling.top_p,
            seed=self._sampling.seed,
        )

    def _close_turn(self, text: str) -> None:
        if text:
            self._turns.append(Message(role="assistant", content=text))
        else:
            self._turns.pop()  # nothing was said: as if it had not been asked


def _read_line() -> str | None:
    """The next line, or None at the end of input or Ctrl-C.

    Blocks the loop on purpose: while the user types, nothing else runs on it. Python's own handler
    of SIGINT is put back, since asyncio's would only be heard after the line.
    """
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        line = input("> ") + "\n" if sys.stdin.isatty() else sys.stdin.readline()
        line.encode()  # some locales let stray bytes through, as lone surrogates
    except (EOFError, KeyboardInterrupt):
        typer.echo(err=True)
        return None
    except UnicodeError:
        raise CommandFailed("stdin is not UTF-8") from None
    finally:
        signal.signal(signal.SIGINT, previous)
    return line or None
