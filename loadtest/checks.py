"""Questions to a server before it is measured: does it answer, what its chat template adds, whether its
cache is cold, and which words are one token each.

They go the way that the load will go: the same dialect, client and options.
"""

import time
from collections.abc import Callable, Sequence
from http import HTTPStatus

import msgspec

from loadtest.call import Call
from loadtest.dialects import Ask, Message
from loadtest.errors import TargetUnusable
from loadtest.filler import MIN_WORDS, Filler
from loadtest.plan import PlannedRequest, Role
from loadtest.record import Fault, RequestRecord
from loadtest.runner import RunOptions, Sender
from loadtest.target import single_token_words

CONTROL_REQUESTS = 8
MAX_ATTEMPTS = 4
"""Of one question before the run."""
CONTROL_TOKENS = 128
MAX_CONTROL_HIT = 0.01
_PART_TOKENS = 8
_MAX_USAGE_COUNTS = 16


class Overhead(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that the server's chat template adds to a prompt."""

    first: int
    """To one user message alone."""
    system: int
    """To a system message and a user message."""
    turn: int
    """By each further answer and user message."""

    def of(self, request: PlannedRequest) -> int:
        roles = [segment.role for segment in request.segments]
        num_answers = sum(a == "assistant" != b for a, b in zip(roles, [*roles[1:], "user"], strict=True))
        return (self.system if roles[0] == "system" else self.first) + num_answers * self.turn


class ControlHit(msgspec.Struct, frozen=True, kw_only=True):
    """Whether prompts that nobody has asked before were found in the cache."""

    hit: float | None
    """Share of tokens, without those the template adds; None where the server does not tell."""

    def void_reasons(self) -> tuple[str, ...]:
        if self.hit is None or self.hit < MAX_CONTROL_HIT:
            return ()
        why = (
            f"prompts that share nothing were found in the cache by {self.hit:.1%}, above "
            f"{MAX_CONTROL_HIT:.0%}: the cache is warm or the server miscounts"
        )
        return (why,)


class Questions:
    """Asks one server, one question at a time or a few at once."""

    def __init__(
        self, client: Sender, *, url: str, encode: Callable[[Ask], bytes], options: RunOptions
    ) -> None:
        self._client = client
        self._url = url
        self._encode = encode
        self._num_asked = 0
        self.options = options
        """As the server takes them: `find_options` takes away what it refuses."""

    async def ask(
        self, messages: Sequence[Message], *, max_tokens: int = 1, cancel_after_s: float | None = None
    ) -> RequestRecord:
        """
        Raises:
            TargetUnusable: it failed.
        """
        record = await self._persist(messages, max_tokens=max_tokens, cancel_after_s=cancel_after_s)
        if record.fault is not None:
            raise TargetUnusable(f"{self._url} failed {_first_words(record)}: {record.fault.message}")
        return record

    async def _persist(
        self, messages: Sequence[Message], *, max_tokens: int = 1, cancel_after_s: float | None = None
    ) -> RequestRecord:
        """A server that fails now and then is one to be measured, so it is asked again a few times."""
        for _ in range(MAX_ATTEMPTS - 1):
            record = await self.try_to_ask(messages, max_tokens=max_tokens, cancel_after_s=cancel_after_s)
            if record.fault is None or not _may_pass(record.fault):
                return record
        return await self.try_to_ask(messages, max_tokens=max_tokens, cancel_after_s=cancel_after_s)

    async def try_to_ask(
        self, messages: Sequence[Message], *, max_tokens: int = 1, cancel_after_s: float | None = None
    ) -> RequestRecord:
        self._num_asked += 1
        name = f"question-{self._num_asked}"
        options = self.options
        ask = Ask(
            model=options.model,
            messages=tuple(messages),
            max_tokens=max_tokens,
            ignore_eos=options.ignore_eos,
            continuous_usage=options.continuous_usage,
            extra=options.extra,
        )
        return await self._client.send(
            Call(
                id=name,
                session=name,
                turn=0,
                body=self._encode(ask),
                scheduled_at=time.monotonic(),
                cancel_after_s=cancel_after_s,
            )
        )

    async def find_options(self, filler: Filler) -> tuple[str, ...]:
        """Send the first request, and leave out optional fields that the server refuses. Notes say which.

        Raises:
            TargetUnusable: it refuses a plain request too.
        """
        message = [Message("user", filler.text("first", _PART_TOKENS))]
        wanted = self.options
        tries = [
            (ignore_eos, continuous_usage)
            for ignore_eos in (True, False)
            for continuous_usage in (True, False)
            if ignore_eos <= wanted.ignore_eos and continuous_usage <= wanted.continuous_usage
        ]
        record = None
        for ignore_eos, continuous_usage in tries:
            self.options = msgspec.structs.replace(
                wanted, ignore_eos=ignore_eos, continuous_usage=continuous_usage
            )
            record = await self._persist(message)
            if record.fault is None:
                return _given_up(ignore_eos, continuous_usage=continuous_usage)
            if record.fault.status not in (HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY):
                break
        assert record is not None
        raise TargetUnusable(_refusal(self._url, record))

    async def overhead(self, filler: Filler, *, with_system: bool, with_turns: bool) -> Overhead | None:
        """What the template adds; None where the server does not count prompt tokens."""
        size = _PART_TOKENS
        shapes: list[tuple[Role, ...]] = [("user",)]
        shapes += [("system", "user")] if with_system else []
        shapes += [("user", "assistant", "user")] if with_turns else []
        added = {}
        for roles in shapes:
            parts = [Message(role, filler.text(f"part-{i}", size)) for i, role in enumerate(roles)]
            record = await self.ask(parts)
            if record.num_prompt_tokens is None:
                return None
            added[roles] = record.num_prompt_tokens - size * len(roles)
        first = added[("user",)]
        return Overhead(
            first=first,
            system=added.get(("system", "user"), first),
            turn=added.get(("user", "assistant", "user"), first) - first,
        )

    async def words_by_usage(self, words: Sequence[str]) -> tuple[str, ...] | None:
        """Those of `words` that are one token each, by the server's count of prompt tokens."""

        async def total(some: Sequence[str]) -> int | None:
            record = await self.ask([Message("user", "".join(f" {word}" for word in some))])
            return record.num_prompt_tokens

        some, others = tuple(words[:8]), tuple(words[8:16])
        counts = [await total(part) for part in (some, others, some + others)]
        known = [count for count in counts if count is not None]
        if len(known) < len(counts):
            return None
        added = known[0] + known[1] - known[2]

        async def count(part: Sequence[str]) -> int | None:
            found = await total(part)
            return None if found is None else found - added

        return await single_token_words(words, count, enough=MIN_WORDS, max_counts=_MAX_USAGE_COUNTS)

    async def control(self, filler: Filler, *, overhead: Overhead | None) -> ControlHit:
        """Ask what nobody has asked, and see what the cache finds."""
        num_found = num_told = 0
        for i in range(CONTROL_REQUESTS):
            # Asked once: a second time the same text could well be in the cache.
            record = await self.try_to_ask(
                [Message("user", filler.text(f"control-{i}", CONTROL_TOKENS))], max_tokens=2
            )
            if record.fault is None and record.num_cached_tokens is not None:
                num_told += 1
                num_found += max(0, record.num_cached_tokens - max(0, overhead.first if overhead else 0))
        return ControlHit(hit=num_found / (num_told * CONTROL_TOKENS) if num_told else None)


def control_of_pass(records: Sequence[RequestRecord], *, overhead_of: Callable[[str], int]) -> ControlHit:
    """The same for a pass of a plan in which nothing is shared."""
    told = [r for r in records if r.num_cached_tokens is not None and r.fault is None]
    num_tokens = sum(record.num_planned_prompt_tokens for record in told)
    found = sum(max(0, (record.num_cached_tokens or 0) - overhead_of(record.id)) for record in told)
    return ControlHit(hit=found / num_tokens if num_tokens else None)


def _given_up(ignore_eos: bool, *, continuous_usage: bool) -> tuple[str, ...]:
    notes = []
    if not ignore_eos:
        notes.append("answers may end before max_tokens: ignore_eos was not asked for, or refused")
    if not continuous_usage:
        notes.append("the server does not count tokens event by event")
    return tuple(notes)


def _may_pass(fault: Fault) -> bool:
    """Not a refusal that will be the same next time, nor one that took a deadline to come."""
    if fault.kind == "http":
        status = fault.status or 0
        return status == HTTPStatus.TOO_MANY_REQUESTS or status >= HTTPStatus.INTERNAL_SERVER_ERROR
    return fault.kind in ("stream", "cut")


def _first_words(record: RequestRecord) -> str:
    assert record.fault is not None
    kind, status = record.fault.kind, record.fault.status
    return "a question before the run" + (f" with HTTP {status}" if status else f" ({kind})")


def _refusal(url: str, record: RequestRecord) -> str:
    assert record.fault is not None
    status = record.fault.status
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return f"{url} refuses us with HTTP {status}: give its key with --api-key ({record.fault.message})"
    return f"{url} failed {_first_words(record)}: {record.fault.message}"
