"""Where the time of each request went, and why it did or did not hit the prefix cache.

From submission to its end a request is in one of four states, so that their times add up to its life:

    queued      submitted or preempted, and in no step
    prefilling  in a step, computing tokens of its prompt, or tokens that it lost by a preemption
    decoding    in a step, computing its newest generated token
    stalled     running, but kept by others: all of a turn of the loop that left it out; and of a turn
                that has it, the share that others' prefilling tokens have in the step's tokens

A turn goes from the end of the turn before (or, after idleness, from the planning) to the delivery of
its step's tokens, so the loop's own work counts with the step. A step's time is shared out by tokens:
what a step would have taken without the others cannot be known, and tokens are what costs.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Literal

import msgspec

from core.request import FinishReason, Request, RequestStatus

NUM_REMEMBERED = 1024
"""Finished requests that can still be explained; about a MiB."""

QUEUED, PREFILLING, DECODING, STALLED = range(4)
STATES = ("queued", "prefilling", "decoding", "stalled")

Writer = tuple[str | None, str]
"""Who wrote a block: a request by its caller's name, and its session."""


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """One request, finished or not. Times in seconds; the four states' add up to `total_s`."""

    request_id: str
    """The caller's name for it."""
    engine_id: str
    session_id: str
    """Its caller's name for the conversation; empty: none."""
    status: str
    finish_reason: str | None
    total_s: float
    queued_s: float
    prefilling_s: float
    decoding_s: float
    stalled_s: float
    num_steps: int
    num_preemptions: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    """Of the prompt, found in the cache at first admission."""
    num_prefilled_tokens: int
    """Of the prompt, computed for the first time."""
    num_decoded_tokens: int
    """Generated ones, computed for the first time; the last one never is."""
    num_recomputed_tokens: int
    """Computed again: their KV was lost by a preemption."""
    cache: Literal["hit", "miss", "bypassed"] | None
    """`bypassed`: every row of the prompt was asked for. None: it was not admitted yet."""
    diverged_at: int | None
    """The first token of the prompt that the nearest cached sequence does not have at its place; the
    prompt's length where it has them all. Known from the first admission on."""
    nearest_request_id: str | None
    """Who computed the last of the equal tokens, under its caller's name; None: nobody that is known."""
    nearest_session_id: str
    """Whose turn that was; empty: no session's."""


class Account:
    """The books of one request. `begin` and `end` enclose each turn that has it in its step."""

    __slots__ = (
        "at", "caller_id", "in_turn", "is_open", "nearest", "num_decoded_tokens", "num_equal_tokens",
        "num_preemptions", "num_prefilled_tokens", "num_reached_tokens", "num_recomputed_tokens",
        "num_steps", "request", "seconds", "stall_share", "state", "submitted_at", "traced",
    )  # fmt: skip

    def __init__(self, request: Request, *, caller_id: str, at: float) -> None:
        self.request = request
        """Replaced when a restart queues it anew."""
        self.caller_id = caller_id
        self.submitted_at = self.at = at
        """`at`: until when the time is booked."""
        self.seconds = [0.0, 0.0, 0.0, 0.0]
        self.state = QUEUED
        self.stall_share = 0.0
        self.in_turn = False
        self.num_steps = 0
        self.num_preemptions = 0
        """Those that were booked."""
        self.num_reached_tokens = 0
        """Tokens whose KV it once had, cached ones too."""
        self.num_prefilled_tokens = self.num_decoded_tokens = self.num_recomputed_tokens = 0
        self.num_equal_tokens: int | None = None
        self.nearest: Writer = (None, "")
        self.is_open = True
        self.traced = -1
        """The state that the trace shows; -1: none."""

    @property
    def waiting_state(self) -> int:
        """What a time in no step was: it had no blocks, or it had and others went first."""
        lost_its_blocks = self.request.num_preemptions != self.num_preemptions
        return QUEUED if self.num_steps == 0 or lost_its_blocks else STALLED

    def saw_nearest(self, num_tokens: int, writer: "Writer") -> None:
        self.num_equal_tokens = num_tokens
        self.nearest = writer

    def wait(self, until: float) -> int:
        """Book the time up to the turn that takes it into its step, and return as what."""
        state = self.waiting_state
        self._book(until, state=state, stall_share=0.0)
        self.num_preemptions = self.request.num_preemptions
        return state

    def begin(self, first: int, num_tokens: int) -> tuple[int, int]:
        """Take in an item of a plan. Returns how many tokens are the prompt's new ones, and lost ones."""
        end = first + num_tokens
        reached = max(first, self.num_reached_tokens)
        num_lost = min(end, reached) - first
        num_new = max(0, min(end, self.request.num_prompt_tokens) - reached)
        self.num_reached_tokens = max(end, reached)
        self.num_recomputed_tokens += num_lost
        self.num_prefilled_tokens += num_new
        self.num_decoded_tokens += num_tokens - num_lost - num_new
        self.state = PREFILLING if num_lost or num_new else DECODING
        self.num_steps += 1
        self.num_preemptions = self.request.num_preemptions
        self.in_turn = True
        return num_new, num_lost

    def add_cruise(self, *, own_s: float, stalled_s: float, num_turns: int, until: float) -> None:
        """Book turns with one generated token each, which others have added up."""
        self.seconds[DECODING] += own_s
        self.seconds[STALLED] += stalled_s
        self.num_steps += num_turns
        self.num_decoded_tokens += num_turns
        self.num_reached_tokens += num_turns
        self.at = max(self.at, until)

    def end(self, at: float) -> None:
        """Book its turn."""
        self._book(at, state=self.state, stall_share=self.stall_share)
        self.in_turn = False

    def seconds_until(self, at: float) -> list[float]:
        """The four states' times, without booking what has not ended."""
        seconds = list(self.seconds)
        elapsed = max(0.0, at - self.at)
        state, stall_share = (self.state, self.stall_share) if self.in_turn else (self.waiting_state, 0.0)
        seconds[state] += elapsed * (1.0 - stall_share)
        seconds[STALLED] += elapsed * stall_share
        return seconds

    def explain(self, at: float, reason: FinishReason | None = None) -> Explanation:
        request = self.request
        times = self.seconds_until(at)
        status = RequestStatus.FINISHED if reason is not None else request.status
        return Explanation(
            request_id=self.caller_id,
            engine_id=request.request_id,
            session_id=request.session_id,
            status=status.value,
            finish_reason=reason,
            total_s=max(self.at, at) - self.submitted_at,
            queued_s=times[QUEUED],
            prefilling_s=times[PREFILLING],
            decoding_s=times[DECODING],
            stalled_s=times[STALLED],
            num_steps=self.num_steps,
            num_preemptions=request.num_preemptions,
            num_prompt_tokens=request.num_prompt_tokens,
            num_output_tokens=request.num_output_tokens,
            num_cached_tokens=request.num_cached_tokens or 0,
            num_prefilled_tokens=self.num_prefilled_tokens,
            num_decoded_tokens=self.num_decoded_tokens,
            num_recomputed_tokens=self.num_recomputed_tokens,
            cache=self._cache(),
            diverged_at=self.num_equal_tokens,
            nearest_request_id=self.nearest[0],
            nearest_session_id=self.nearest[1],
        )

    def _cache(self) -> Literal["hit", "miss", "bypassed"] | None:
        if self.request.num_cached_tokens is None:
            return None
        if self.request.num_cached_tokens:
            return "hit"
        bypasses = self.request.pools or self.request.sampling.prompt_logprobs is not None
        return "bypassed" if bypasses else "miss"

    def _book(self, until: float, *, state: int, stall_share: float) -> None:
        elapsed = until - self.at
        if elapsed > 0.0:  # submitted while this turn was being planned: nothing to book yet
            self.seconds[state] += elapsed * (1.0 - stall_share)
            if stall_share:
                self.seconds[STALLED] += elapsed * stall_share
            self.at = until


class RequestBooks:
    """The accounts of live requests, and what finished ones amounted to. Bounded by both numbers."""

    def __init__(self, *, num_remembered: int = NUM_REMEMBERED) -> None:
        self._live: OrderedDict[str, Account] = OrderedDict()  # by the engine's id
        self._finished: deque[Explanation] = deque(maxlen=num_remembered)
        self.seconds = [0.0, 0.0, 0.0, 0.0]
        """Of finished requests, by state, total."""

    def __len__(self) -> int:
        return len(self._live)

    def __getitem__(self, engine_id: str) -> Account:
        return self._live[engine_id]

    def __iter__(self) -> Iterator[Account]:
        return iter(self._live.values())

    def open(self, account: Account) -> None:
        self._live[account.request.request_id] = account

    def close(self, engine_id: str, reason: FinishReason, *, at: float) -> Account:
        account = self._live.pop(engine_id)
        account.is_open = False
        explanation = account.explain(at, reason)
        self._finished.append(explanation)
        for state, seconds in enumerate(account.seconds_until(at)):
            self.seconds[state] += seconds
        return account

    def explain(self, request_id: str, *, at: float) -> tuple[Explanation, ...]:
        """All requests that their caller named so, oldest first: an answer may have several choices."""
        finished = [each for each in self._finished if each.request_id == request_id]
        live = [account.explain(at) for account in self if account.caller_id == request_id]
        return tuple(sorted((*finished, *live), key=_number))

    def live(self, *, at: float) -> tuple[Explanation, ...]:
        """Who is here now, oldest first."""
        return tuple(account.explain(at) for account in self)


def _number(explanation: Explanation) -> int:
    """The engine numbers its requests as they come: `r12`."""
    return int(explanation.engine_id[1:])
