"""`tidegate generate`: one prompt, its answer on stdout as it comes, the speed on stderr."""

import sys

import typer
from rich.console import Console

from gateway.commands import CommandFailed
from gateway.commands.local_model import checked_text, loaded, run_loop, stream_answer, write
from gateway.commands.sampling_flags import Sampling
from gateway.config import ServerConfig
from gateway.request import GenerateRequest, Message


def generate(config: ServerConfig, prompt: str, *, system: str | None, raw: bool, sampling: Sampling) -> None:
    """Answer one prompt; `-` reads it from stdin.

    Raises:
        CommandFailed, EngineError: the prompt was refused, or the model cannot be used.
    """
    text = checked_text(_from_stdin() if prompt == "-" else prompt, what="the prompt")
    if raw and system is not None:
        raise CommandFailed("--raw takes no --system: there is no template to put it into")
    messages = [Message(role="user", content=text)]
    if system is not None:
        messages.insert(0, Message(role="system", content=checked_text(system, what="--system")))
    request = GenerateRequest(
        model=config.model_id,
        messages=() if raw else tuple(messages),
        prompts=(text,) if raw else (),
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=sampling.seed,
    )
    run_loop(_answer(config, request))


async def _answer(config: ServerConfig, request: GenerateRequest) -> None:
    async with loaded(config, console=Console(stderr=True)) as backend:
        answer = await stream_answer(backend, request, show=write)
        write("\n")
        typer.echo(answer.speed(), err=True)


def _from_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise CommandFailed(f"stdin is not UTF-8: byte {error.start} cannot be read") from None
