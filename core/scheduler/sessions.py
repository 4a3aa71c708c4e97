"""Whole sessions wait when the cache cannot hold all of them.

Sessions come back, turn after turn, to what they computed before. When more of them are at it than the
pool holds, least-recently-used eviction takes from each what it needs next, and all of them compute
everything again and again. Then it is better that some wait while the others find their prefixes.

    session's turn ── has a seat, or there is room for one more ──> the policy's queue
                   └─ the gate is shut and there is no room ─────> held, in order of arrival

The gate shuts when a good part of what sessions had computed before turns out to be evicted, and opens
again when all of them fit. (Pausing whole programs on thrash is ThunderAgent's idea; see also Continuum,
arXiv 2511.02230.)

Invariants (`check()` asserts them):
    - a held request's session has no seat; requests without a session are never held;
    - with the gate open nobody is held.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from core.cache.reservation import KVManager
from core.request import Request

LOST_SHARE = 0.25
"""The gate shuts when sessions compute so much of their earlier prompts again."""
MEMORY = 15 / 16
"""How much of the share measured so far the next turn leaves: it looks back on about 16 turns."""
POOL_SHARE = 0.9
"""Of the pool, for seats; the rest is for what is superseded, and for requests without a session."""
MAX_PASSES = 48
"""After so many turns of others the oldest held request gets a seat, and who had most turns gives one up."""
IDLE_ROUNDS = 4
"""Who takes no turn while all others have so many on average loses its seat: it may have ended."""
MAX_SESSIONS = 4096

_Key = tuple[str, str]


@dataclass(slots=True, eq=False)
class _Session:
    """What is known of a session. Turns are counted over all sessions: they are this module's clock."""

    number: int
    """In order of appearance."""
    last_turn: int
    num_tokens: int = 0
    """Of its longest path in the cache, as far as it does not share them."""
    num_shared_tokens: int = 0
    """What its first turn found in the cache: others' prefix, and not its own to lose."""
    num_prompt_tokens: int = 0
    """Of its last turn, and below what they were: a next turn that begins with them should find them."""
    prompt_hash: int = 0
    num_turns: int = 0
    """Since it has its seat."""
    num_live: int = 0
    seated: bool = False


class SessionGate:
    """Lets turns of sessions pass, or holds them. Torch-free, clock-free; touched by the loop alone.

    Args:
        num_pool_tokens: what the KV pool holds.
    """

    def __init__(self, num_pool_tokens: int) -> None:
        self._room = int(num_pool_tokens * POOL_SHARE)
        self._num_pool_tokens = num_pool_tokens
        self._sessions: OrderedDict[_Key, _Session] = OrderedDict()  # idle longest first
        self._held: OrderedDict[str, tuple[Request, int]] = OrderedDict()  # with the turn it came at
        self._live: dict[str, _Session] = {}
        self._is_shut = False
        self._turn = 0
        self._num_seen = 0
        self._last_rotation = 0
        self._swept_at = 0
        self._num_known_tokens = 0.0
        self._num_lost_tokens = 0.0

    @property
    def is_shut(self) -> bool:
        return self._is_shut

    @property
    def lost_share(self) -> float:
        """Of what sessions had computed before and asked for again: how much was evicted, lately."""
        return self._num_lost_tokens / self._num_known_tokens if self._num_known_tokens else 0.0

    def __len__(self) -> int:
        """Held requests."""
        return len(self._held)

    def __iter__(self) -> Iterator[Request]:
        return (request for request, _ in self._held.values())

    def hold(self, request: Request) -> bool:
        """Hold a new turn back, if it must wait for a seat."""
        if not self._is_shut or not request.session_id:
            return False
        session = self._sessions.get(_key(request))
        if session is not None and session.seated:
            return False
        if not self._held and self._fits(request):
            self._seat(request)
            return False
        self._held[request.request_id] = (request, self._turn)
        return True

    def discard(self, request: Request) -> bool:
        """Forget a request that has ended; False if it is not held."""
        return self._held.pop(request.request_id, None) is not None

    def release(self, *, idle: bool) -> list[Request]:
        """Take out who may go now, in order of arrival.

        Args:
            idle: nobody else can be computed. Then one goes in any case: room is no reason to do nothing.
        """
        if not self._is_shut:
            return []
        self._sweep()
        released: list[Request] = []
        while self._held:
            request, since = next(iter(self._held.values()))
            session = self._sessions.get(_key(request))
            if session is None or not session.seated:
                overdue = min(self._turn - since, self._turn - self._last_rotation) >= MAX_PASSES
                if not (self._fits(request) or overdue or (idle and not released)):
                    break
                if overdue:
                    self._last_rotation = self._turn
                self._make_room(request, by_turns=overdue)
                self._seat(request)
            del self._held[request.request_id]
            released.append(request)
        if not self._held and self._num_tokens() <= self._room:
            self._open()
        return released

    def admitted(self, request: Request) -> None:
        """Learn from a first admission what the session found of what it had computed before."""
        if not request.session_id:
            return
        session = self._session(request)
        known = min(session.num_prompt_tokens, request.num_prompt_tokens - 1)
        if known and hash(_prefix(request, session.num_prompt_tokens)) == session.prompt_hash:
            self._measure(known, max(0, known - request.num_computed_tokens))
        elif not session.num_prompt_tokens:
            session.num_shared_tokens = request.num_computed_tokens
        self._turn += 1
        session.last_turn = self._turn
        session.num_turns += 1
        session.num_live += 1
        session.num_prompt_tokens = request.num_prompt_tokens
        session.prompt_hash = hash(_prefix(request, request.num_prompt_tokens))
        session.num_tokens = max(0, request.num_prompt_tokens - session.num_shared_tokens)
        self._live[request.request_id] = session
        self._judge()

    def resumed(self, request: Request) -> None:
        """Learn from a later admission what a preemption has cost."""
        if request.session_id:
            known = len(request.token_ids) - 1
            self._measure(known, max(0, known - request.num_computed_tokens))
            self._judge()

    def ended(self, request: Request) -> None:
        """An admitted request has ended; its blocks are cached for the next turn."""
        session = self._live.pop(request.request_id, None)
        if session is not None:
            session.num_live -= 1
            session.num_tokens = max(0, len(request.token_ids) - session.num_shared_tokens)

    def clear(self) -> None:
        """The cache is gone, by no fault of the sessions; nobody may be held or live."""
        assert not self._held, "somebody is held"
        assert not self._live, "somebody is live"
        self._sessions.clear()
        self._open()

    def check(self) -> None:
        """Assert the invariants. For tests."""
        assert self._is_shut or not self._held
        for request, since in self._held.values():
            assert request.session_id, "a request without a session is held"
            assert since <= self._turn
        assert self._is_shut or not any(session.seated for session in self._sessions.values())
        assert all(session.num_live >= 0 for session in self._sessions.values())
        assert len(self._sessions) <= MAX_SESSIONS + len(self._live)

    def _session(self, request: Request) -> _Session:
        """The request's session, known from now on; it counts as used."""
        key = _key(request)
        session = self._sessions.get(key)
        if session is None:
            self._num_seen += 1
            session = self._sessions[key] = _Session(number=self._num_seen, last_turn=self._turn)
            oldest_key, oldest = next(iter(self._sessions.items()))
            if len(self._sessions) > MAX_SESSIONS and not oldest.num_live:
                del self._sessions[oldest_key]
        self._sessions.move_to_end(key)
        return session

    def _measure(self, num_known: int, num_lost: int) -> None:
        self._num_known_tokens = self._num_known_tokens * MEMORY + num_known
        self._num_lost_tokens = self._num_lost_tokens * MEMORY + num_lost

    def _judge(self) -> None:
        """Shut the gate on thrash; take seats where those inside have outgrown the pool."""
        if not self._is_shut:
            # Much was lost, of as much as the pool holds: a handful of tokens proves nothing.
            if self.lost_share < LOST_SHARE or self._num_known_tokens < self._num_pool_tokens / 4:
                return
            self._forget_idle()
            if self._num_tokens() <= self._room:
                return  # evicted by other work than sessions': to hold them back would help nobody
            self._is_shut = True
            self._last_rotation = self._turn
            for session in self._sessions.values():
                session.seated, session.num_turns = True, 0
        # Who had least of its share keeps its seat; of those who had none, the older ones.
        seated = sorted(self._seated(), key=lambda session: (session.num_turns, session.number))
        num_tokens = sum(session.num_tokens for session in seated)
        while num_tokens > self._room and len(seated) > 1:
            session = seated.pop()
            session.seated = False
            num_tokens -= session.num_tokens

    def _fits(self, request: Request) -> bool:
        return sum(session.num_tokens for session in self._seated()) + self._need(request) <= self._room

    def _need(self, request: Request) -> int:
        session = self._sessions.get(_key(request))
        return max(0, len(request.token_ids) - (session.num_shared_tokens if session else 0))

    def _seat(self, request: Request) -> None:
        session = self._session(request)
        session.seated, session.num_turns, session.last_turn = True, 0, self._turn
        session.num_tokens = self._need(request)

    def _make_room(self, request: Request, *, by_turns: bool) -> None:
        """Take seats until the request fits: from those with most turns, or from the idle ones."""
        free = self._room - self._need(request) - sum(session.num_tokens for session in self._seated())
        for session in sorted(
            self._seated(), key=lambda session: -session.num_turns if by_turns else session.last_turn
        ):
            if free >= 0:
                return
            if by_turns or not session.num_live:
                session.seated = False
                free += session.num_tokens

    def _seated(self) -> Iterator[_Session]:
        return (session for session in self._sessions.values() if session.seated)

    def _num_tokens(self) -> int:
        return sum(session.num_tokens for session in self._sessions.values())

    def _sweep(self) -> None:
        """Take their seats from those who do not come back. Once a turn: nothing changes in between."""
        if self._swept_at == self._turn:
            return
        self._swept_at = self._turn
        seated = list(self._seated())
        patience = IDLE_ROUNDS * len(seated) + MAX_PASSES
        for session in seated:
            if not session.num_live and self._turn - session.last_turn > patience:
                session.seated = False
        self._forget_idle()

    def _forget_idle(self) -> None:
        """Forget sessions that were idle for several rounds of all; they begin anew if they come back."""
        held = {_key(request) for request in self}
        patience = IDLE_ROUNDS * len(self._sessions) + MAX_PASSES
        while self._sessions:
            key, session = next(iter(self._sessions.items()))
            if session.num_live or key in held or self._turn - session.last_turn <= patience:
                return
            del self._sessions[key]

    def _open(self) -> None:
        self._is_shut = False
        self._num_known_tokens = self._num_lost_tokens = 0.0
        for session in self._seated():
            session.seated = False


def open_gate(manager: KVManager) -> SessionGate | None:
    """A gate for a pool; none where there is no prefix to come back to."""
    return SessionGate(manager.num_blocks * manager.block_size) if manager.shares_prefixes else None


def _key(request: Request) -> _Key:
    return request.tenant, request.session_id


def _prefix(request: Request, num_tokens: int) -> bytes:
    return memoryview(request.token_ids)[:num_tokens].tobytes()
