"""What a load test does: requests, who they come after, and which text they share.

A plan is JSON lines, one request each, plain or gzipped:

    {"id": "r1", "session": "a0", "segments": [["sys", 64], ["q1", 24]], "max_tokens": 55,
     "after": "r0", "delay_s": 3.0}

A segment is a run of filler text: the same id is the same text wherever it stands, so every server
sees the same sharing, whatever its tokenizer. Exactly one of `at_s`, `at_unit` and `after` says when:
seconds from the start, units of 1/rate from the start, or `delay_s` after the END of other requests'
answers (all of them, where a list is given). A first line `{"notes": ["..."]}` may say what was done to
the original. A prompt is system segments, then user and assistant
ones; it begins and ends with a user's.
"""

import gzip
import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from loadtest.errors import PlanInvalid
from loadtest.text_files import json_lines, read_text

Role = Literal["system", "user", "assistant"]


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """`num_tokens` tokens of filler text named `segment_id`. `assistant` marks a recorded answer."""

    segment_id: str
    num_tokens: int
    role: Role = "user"


class PlannedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a plan."""

    id: str
    session: str
    segments: tuple[Segment, ...]
    max_tokens: int
    at_s: float | None = None
    at_unit: float | None = None
    after: tuple[str, ...] = ()
    delay_s: float = 0.0
    """Think time between the end of the last answer waited for and this request."""
    cancel_after_s: float | None = None
    """The client leaves so long after sending."""
    cancel_after_tokens: int | None = None
    """The client leaves when it has seen so many tokens."""

    @property
    def num_prompt_tokens(self) -> int:
        """Planned tokens, without what the server's chat template adds."""
        return sum(segment.num_tokens for segment in self.segments)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A checked plan: ids are unique, `after` names requests of the plan and makes no circle."""

    name: str
    requests: tuple[PlannedRequest, ...]
    sha256: str
    """Of the requests as canonical JSON: two reports with the same one did the same work."""
    notes: tuple[str, ...] = ()
    """What was done to the original: bursts spread, lengths scaled. Printed in every report."""


MAX_TOKENS = 10_000_000
"""Of one prompt, and of one answer."""
MAX_SECONDS = 30 * 86_400.0
MAX_ID = 200

NOTES_START = '{"notes"'

_ROLES = re.compile("s*u([ua]*u)?")
"""Many chat templates refuse anything else, or take a last assistant message as one to go on with."""


class _Notes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A plan's first line, where it has one."""

    notes: tuple[str, ...]


class _Line(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A plan's line as written. `join` and `stop` say what is known already, for people who read it."""

    id: str
    session: str
    segments: tuple[Segment, ...]
    max_tokens: int
    at_s: float | None = None
    at_unit: float | None = None
    after: str | tuple[str, ...] | None = None
    join: Literal["all"] | None = None
    stop: str | None = None
    delay_s: float = 0.0
    cancel_after_s: float | None = None
    cancel_after_tokens: int | None = None

    def request(self) -> PlannedRequest:
        after = (self.after,) if isinstance(self.after, str) else self.after or ()
        return PlannedRequest(
            id=self.id,
            session=self.session,
            segments=self.segments,
            max_tokens=self.max_tokens,
            at_s=self.at_s,
            at_unit=self.at_unit,
            after=after,
            delay_s=self.delay_s,
            cancel_after_s=self.cancel_after_s,
            cancel_after_tokens=self.cancel_after_tokens,
        )


def load_plan(path: Path) -> Plan:
    """Read a plan file, plain or gzipped. Its name is the file's, without `.plan.jsonl.gz`.

    Raises:
        PlanInvalid: naming file, line, field and bound.
    """
    name = re.sub(r"(\.plan)?(\.jsonl?)?(\.gz)?$", "", path.name)
    return parse_plan(read_text(path), str(path), name=name)


def parse_plan(text: str, source: str, *, name: str = "") -> Plan:
    """A plan from a file's text; `source` is what errors call it.

    Raises:
        PlanInvalid: naming source, line, field and bound.
    """
    requests: list[PlannedRequest] = []
    numbers: list[int] = []
    notes: tuple[str, ...] = ()
    first, _, rest = text.partition("\n")
    skipped = 0
    if first.startswith(NOTES_START):
        ((_, head),) = json_lines(first, _Notes, source)
        notes, text, skipped = head.notes, rest, 1
    for number, line in json_lines(text, _Line, source, first=1 + skipped):
        requests.append(line.request())
        numbers.append(number)
    return _checked(
        name or source,
        requests,
        where=lambda index: f"{source}, line {numbers[index]}",
        whole=source,
        notes=notes,
    )


def plan_of(name: str, requests: Iterable[PlannedRequest], *, notes: Sequence[str] = ()) -> Plan:
    """Check requests and name what they come to by its hash.

    Raises:
        PlanInvalid: naming request, field and bound.
    """
    requests = tuple(requests)
    return _checked(
        name,
        requests,
        where=lambda index: f"plan {name}, request {requests[index].id!r}",
        whole=f"plan {name}",
        notes=notes,
    )


def dump_plan(plan: Plan, path: Path) -> None:
    """Write a plan so that `load_plan` gives all but its name again; gzipped where the path ends in .gz."""
    head = msgspec.json.encode(_Notes(plan.notes)) + b"\n" if plan.notes else b""
    text = head + b"".join(_canonical(request) + b"\n" for request in plan.requests)
    # Without a time stamp the same plan is the same file.
    path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)


def answer_segments(plan: Plan) -> dict[str, str]:
    """Which recorded segments stand for which request's answer: segment id -> request id.

    A segment does where a later request repeats the earlier one's prompt and the segment comes next,
    marked `assistant`. Plans that mark none cannot be played with live history.
    """
    by_id = {request.id: request for request in plan.requests}
    found: dict[str, str] = {}
    for request in plan.requests:
        for before in (by_id[name] for name in request.after):
            end = len(before.segments)
            if request.segments[:end] == before.segments and len(request.segments) > end:
                segment = request.segments[end]
                if segment.role == "assistant":
                    found.setdefault(segment.segment_id, before.id)
    return found


def _checked(
    name: str,
    requests: Sequence[PlannedRequest],
    *,
    where: Callable[[int], str],
    whole: str,
    notes: Sequence[str] = (),
) -> Plan:
    if not requests:
        raise PlanInvalid(f"{whole} holds no request")
    places: dict[str, int] = {}
    for index, request in enumerate(requests):
        if problem := _problem(request):
            raise PlanInvalid(f"{where(index)}: {problem}")
        if request.id in places:
            raise PlanInvalid(
                f"{where(index)}: id {request.id!r} was used before, at {where(places[request.id])}"
            )
        places[request.id] = index
    for index, request in enumerate(requests):
        for waited_for in request.after:
            if waited_for not in places:
                raise PlanInvalid(
                    f"{where(index)}: after names {waited_for!r}, which is no request of the plan"
                )
    if circle := _circle(requests):
        raise PlanInvalid(f"{where(places[circle[0]])}: after makes a circle: {' -> '.join(circle)}")
    digest = hashlib.sha256()
    for request in requests:
        digest.update(_canonical(request) + b"\n")
    return Plan(name=name, requests=tuple(requests), sha256=digest.hexdigest(), notes=tuple(notes))


def _canonical(request: PlannedRequest) -> bytes:
    """One JSON text per meaning: fixed order, defaults left out, 3 and 3.0 alike."""
    fields: dict[str, object] = {
        "id": request.id,
        "session": request.session,
        "segments": [
            [s.segment_id, s.num_tokens] if s.role == "user" else [s.segment_id, s.num_tokens, s.role]
            for s in request.segments
        ],
        "max_tokens": request.max_tokens,
    }
    for name in ("at_s", "at_unit"):
        if (value := getattr(request, name)) is not None:
            fields[name] = float(value)
    if request.after:
        fields |= {"after": list(request.after), "delay_s": float(request.delay_s)}
    if request.cancel_after_s is not None:
        fields["cancel_after_s"] = float(request.cancel_after_s)
    if request.cancel_after_tokens is not None:
        fields["cancel_after_tokens"] = request.cancel_after_tokens
    return msgspec.json.encode(fields)


def _problem(request: PlannedRequest) -> str | None:
    """What is wrong with a request on its own, with the field and its bound."""
    numbers: tuple[tuple[str, float | None, float, float], ...] = (
        ("max_tokens", request.max_tokens, 1, MAX_TOKENS),
        ("at_s", request.at_s, 0, MAX_SECONDS),
        ("at_unit", request.at_unit, 0, MAX_SECONDS),
        ("delay_s", request.delay_s, 0, MAX_SECONDS),
        ("cancel_after_s", request.cancel_after_s, 0, MAX_SECONDS),
        ("cancel_after_tokens", request.cancel_after_tokens, 1, MAX_TOKENS),
        *((f"segments[{i}] num_tokens", s.num_tokens, 1, MAX_TOKENS) for i, s in enumerate(request.segments)),
        ("the prompt's tokens", request.num_prompt_tokens, 1, MAX_TOKENS),
    )
    for name, number, low, high in numbers:
        if number is not None and not low <= number <= high:  # NaN fails too
            return f"{name} is {number}; it must be between {low} and {high:.0f}"
    texts = (("id", request.id), ("session", request.session))
    for name, text in (
        *texts,
        *((f"segments[{i}] id", s.segment_id) for i, s in enumerate(request.segments)),
    ):
        if not 1 <= len(text) <= MAX_ID:
            return f"{name} has {len(text)} characters; it must have between 1 and {MAX_ID}"
    return _order_problem(request)


def _order_problem(request: PlannedRequest) -> str | None:
    told = [name for name in ("at_s", "at_unit") if getattr(request, name) is not None]
    told += ["after"] if request.after else []
    if len(told) != 1:
        return (
            f"exactly one of at_s, at_unit and after must be given; there is {' and '.join(told) or 'none'}"
        )
    if request.delay_s and not request.after:
        return "delay_s counts from the end of the requests in after, and there are none"
    if len(set(request.after)) < len(request.after):
        return "after names a request twice"
    roles = "".join(segment.role[0] for segment in request.segments)
    if not _ROLES.fullmatch(roles):
        return (
            "segments must be system ones, then user and assistant ones, beginning and ending with a user's; "
            f"they end with {request.segments[-1].role!r}"
            if roles.endswith(("a", "s"))
            else "segments must be system ones, then user and assistant ones, beginning with a user's"
        )
    return None


def _circle(requests: Sequence[PlannedRequest]) -> list[str]:
    """Ids that wait for each other, the first one again at the end; empty where none do."""
    waits = {request.id: len(request.after) for request in requests}
    waiting_on: dict[str, list[str]] = {}
    for request in requests:
        for name in request.after:
            waiting_on.setdefault(name, []).append(request.id)
    free = [name for name, count in waits.items() if not count]
    while free:
        for name in waiting_on.get(free.pop(), ()):
            waits[name] -= 1
            if not waits[name]:
                free.append(name)
    stuck = {request.id: request for request in requests if waits[request.id]}
    if not stuck:
        return []
    path = [next(iter(stuck))]
    while True:  # everything stuck waits for something stuck
        name = next(name for name in stuck[path[-1]].after if name in stuck)
        if name in path:
            return [*path[path.index(name) :], name]
        path.append(name)
