"""A target that is ready to be measured: found, asked the questions that come first, and warm."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec

from loadtest.calibration import Speed, calibrate
from loadtest.checks import ControlHit, Overhead, Questions
from loadtest.client import Client, Deadlines, encode_body
from loadtest.dialects import Ask, Dialect, Message, find_dialect
from loadtest.filler import MIN_WORDS, Filler
from loadtest.plan import Plan
from loadtest.report import TargetFacts
from loadtest.runner import History, RunOptions
from loadtest.servers import Server
from loadtest.target import Looker, Target, Words, probe, words_by_tokenize
from loadtest.words import WORDS

Say = Callable[[str], None]
"""A line for the person who waits."""

_WARM_UP_TOKENS = 64
_WARM_UP_ANSWER = 8


class TargetOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a target is asked."""

    url: str
    dialect: str = "chat"
    model: str | None = None
    api_key: str | None = None
    deadlines: Deadlines = Deadlines()
    history: History = "recorded"
    concurrency: int | None = None
    ignore_eos: bool = True
    extra: dict[str, Any] = {}
    num_warm_ups: int = 8
    calibrate: bool = True


class Bench(msgspec.Struct, frozen=True, kw_only=True):
    """One target, and what is known of it before the load."""

    target: Target
    server: Server
    dialect: Dialect
    looker: Looker
    client: Client
    options: RunOptions
    words: Words
    overhead: Overhead | None
    control: ControlHit
    speed: Speed | None
    notes: tuple[str, ...]

    def filler(self) -> Filler:
        """Text that no server has seen: a new nonce each time."""
        return new_filler(self.words)

    def encode(self, ask: Ask) -> bytes:
        return encode_body(self.dialect, ask)

    def facts(self) -> TargetFacts:
        return TargetFacts(
            url=self.target.url,
            dialect=self.dialect.name,
            model=self.target.model,
            server=self.target.server,
            server_version=self.target.version,
        )


@asynccontextmanager
async def open_bench(options: TargetOptions, *, plans: Sequence[Plan], say: Say) -> AsyncIterator[Bench]:
    """Find, question and warm up a target.

    Args:
        plans: what will be played; questions stay within their lengths.
    Raises:
        TargetUnusable: naming the target and what is wrong.
        PlanInvalid: an option that cannot be used.
    """
    dialect = find_dialect(options.dialect)
    async with Looker(options.url, api_key=options.api_key) as looker:
        target, server = await probe(looker, model=options.model)
        say(f"{target.url}: {target.server} {target.version or '(version unknown)'}, model {target.model}")
        async with Client(
            target.url, dialect, api_key=options.api_key, deadlines=options.deadlines
        ) as client:
            run_options = RunOptions(
                model=target.model,
                concurrency=options.concurrency,
                history=options.history,
                ignore_eos=options.ignore_eos,
                extra=options.extra,
            )
            encode = partial(encode_body, dialect)
            questions = Questions(client, url=target.url, encode=encode, options=run_options)
            notes = await questions.find_options(new_filler(Words(words=WORDS, source="unchecked")))
            words = await _find_words(questions, looker, server=server, model=target.model)
            overhead = await _overhead(questions, words, plans)
            await _warm_up(questions, words, number=options.num_warm_ups)
            control = await questions.control(new_filler(words), overhead=overhead)
            speed = await _speed(questions, words, plans, say=say) if options.calibrate else None
            yield Bench(
                target=target,
                server=server,
                dialect=dialect,
                looker=looker,
                client=client,
                options=questions.options,
                words=words,
                overhead=overhead,
                control=control,
                speed=speed,
                notes=(*target.notes, *notes, *_unknowns(words, control)),
            )


def _unknowns(words: Words, control: ControlHit) -> Iterator[str]:
    """What could not be found out, and what follows from it."""
    if words.source == "unchecked":
        yield "words could not be checked to be one token each: prompts may be of other lengths than planned"
    if control.hit is None:
        yield "the server tells no cached tokens: hits are unknown, and a warm cache would not show"


async def _speed(questions: Questions, words: Words, plans: Sequence[Plan], *, say: Say) -> Speed:
    longest = max(plans, key=lambda plan: max(request.num_prompt_tokens for request in plan.requests))
    speed = await calibrate(questions, new_filler(words), plan=longest)
    say(f"about {speed.prefill:,.0f} tokens/s of prompts, {speed.decode:,.1f} tokens/s of one answer")
    return speed


def new_filler(words: Words) -> Filler:
    """Text with a nonce of its own."""
    return Filler(words.words, nonce=secrets.token_hex(8))


async def _find_words(questions: Questions, looker: Looker, *, server: Server, model: str) -> Words:
    """Too few words that are one token each are no better than unchecked ones."""
    found = await words_by_tokenize(looker, server, model=model, words=WORDS)
    if found is not None and len(found) >= MIN_WORDS:
        return Words(words=found, source="/tokenize")
    if found is None:
        found = await questions.words_by_usage(WORDS)
        if found is not None and len(found) >= MIN_WORDS:
            return Words(words=found, source="usage")
    return Words(words=WORDS, source="unchecked")


async def _overhead(questions: Questions, words: Words, plans: Sequence[Plan]) -> Overhead | None:
    roles = {segment.role for plan in plans for request in plan.requests for segment in request.segments}
    return await questions.overhead(
        new_filler(words), with_system="system" in roles, with_turns="assistant" in roles
    )


async def _warm_up(questions: Questions, words: Words, *, number: int) -> None:
    """Connections, compiled code, thread pools: with text that no pass uses."""
    filler = new_filler(words)
    async with asyncio.TaskGroup() as tasks:
        for i in range(number):
            message = Message("user", filler.text(f"warm-up-{i}", _WARM_UP_TOKENS))
            tasks.create_task(questions.try_to_ask([message], max_tokens=_WARM_UP_ANSWER))
