"""Whole sessions wait when the cache cannot hold all of them.

Sessions come back, turn after turn, to what they computed before. When more of them are at it than the
pool holds, least-recently-used eviction takes from each what it needs next, and all of them compute
everything again and again. Then it is better that some wait while the others find their prefixes.

    session's turn ── has a seat, or there is room for one more ──> the policy's queue
                   └─ no room, while those with seats are running or expected back ──> held

A seat is kept while its session is away, until it has been away for longer than it ever is, or for so long
that the whole pool could have been computed anew (rent or buy: Gray's five-minute rule). An engine that has
nothing to do waits for those who are away, but no longer than it would take to compute again what the
newcomer would drive out (ski rental: at most twice what knowing the future would cost).
(Pausing whole programs on thrash is ThunderAgent's idea; see also Continuum, arXiv 2511.02230.)

Invariants (`check()` asserts them):
    - requests without a session are never held, and nobody is where nobody has a seat;
    - an idle engine whose gate holds somebody back is told when to ask again.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from math import inf

from core.cache.reservation import KVManager
from core.request import Request
from core.scheduler.returns import Gaps, Returns, TokenCost

POOL_SHARE = 0.85
"""Of the pool, for seats; the rest is for answers, for what is superseded, and for who has no session."""
MAX_PASSES = 48
"""After so many turns of others the oldest held request gets a seat, and who had most turns gives one up."""
MAX_HELD_S = 60.0
"""The same after so many seconds."""
MAX_IDLE_S = 5.0
"""An engine with nothing to do waits no longer for who is away."""
FIRST_GAP_S = 5.0
"""How long sessions are expected back for while none ever came."""
NUM_LOOKS = 16
"""Held requests that are looked at before each step, the oldest first."""
MAX_SESSIONS = 4096

_Key = tuple[str, str]


@dataclass(slots=True, eq=False)
class _Session:
    """What is known of a session."""

    num_tokens: int = 0
    """Of its longest path in the cache, as far as it does not share them."""
    num_shared_tokens: int = 0
    """What its first turn found in the cache: others' prefix, and not its own to lose."""
    num_prompt_tokens: int = 0
    """Of its last turn, and below what they were: a next turn that begins with them comes back to them."""
    prompt_hash: int = 0
    num_turns: int = 0
    """Since it has its seat."""
    num_here: int = 0
    """Its requests that have not ended: held, waiting or running."""
    away_since: float | None = None
    """When its last request ended; None while it has one here."""
    gaps: Gaps = field(default_factory=Gaps)


@dataclass(slots=True)
class _Held:
    request: Request
    since_turn: int
    since: float
    need: int
    """Tokens that it will have of its own in the cache, as of turn `looked_at`."""
    looked_at: int


class SessionGate:
    """Lets turns of sessions pass, or holds them. Torch-free, touched by the loop alone.

    Reads no clock: `now` is set by who does. If nobody does it waits for nobody, and only turns count.

    Args:
        num_pool_tokens: what the KV pool holds.
        match_length: how many tokens of a prompt are cached now.
    """

    def __init__(self, num_pool_tokens: int, match_length: Callable[[Request], int] = lambda _: 0) -> None:
        self.now = 0.0
        self.wakes_at: float | None = None
        """When to ask again although nothing has happened; None where only an event changes anything."""
        self._room = int(num_pool_tokens * POOL_SHARE)
        self._match_length = match_length
        self._sessions: OrderedDict[_Key, _Session] = OrderedDict()  # idle longest first
        self._seats: OrderedDict[_Key, _Session] = OrderedDict()  # the longest without a turn first
        self._num_seated_tokens = 0
        self._held: OrderedDict[str, _Held] = OrderedDict()
        self._here: dict[str, _Key] = {}
        self._admitted: set[str] = set()
        self._turn = 0
        self._last_rotation = (0, 0.0)
        self._idle_since: float | None = None
        self._gaps = Gaps()
        self._returns = Returns()
        self._cost = TokenCost()

    def __len__(self) -> int:
        """Held requests."""
        return len(self._held)

    def __iter__(self) -> Iterator[Request]:
        return (held.request for held in self._held.values())

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Learn from a step that computed prompts what a lost token costs."""
        self._cost.add(num_tokens, seconds)

    def hold(self, request: Request) -> bool:
        """Hold a new turn back, if it must wait for a seat."""
        if not request.session_id:
            return False
        key = _key(request)
        session = self._arrived(request)
        if key in self._seats:
            return False
        need = self._need(request, session)
        if not self._held and self._fits(need):
            self._seat(key, session, need)
            return False
        self._held[request.request_id] = _Held(request, self._turn, self.now, need, looked_at=self._turn)
        return True

    def discard(self, request: Request) -> bool:
        """Forget a held request that has ended; False if it is not held."""
        if self._held.pop(request.request_id, None) is None:
            return False
        if not self._held:
            self.wakes_at = None
        return True

    def release(self, *, idle: bool) -> list[Request]:
        """Take out who may go now, in order of arrival; who fits may pass who does not.

        Args:
            idle: nobody else can be computed. Then somebody goes, or `wakes_at` says when to ask again.
        """
        self.wakes_at = None
        if not idle:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = self.now
        if not self._held:
            return []
        released: list[Request] = []
        gone = [key for key, session in self._seats.items() if self._is_gone(session)]
        for held in list(islice(self._held.values(), NUM_LOOKS)):
            key = _key(held.request)
            session = self._sessions[key]
            if key not in self._seats:
                if held.looked_at != self._turn:  # what is cached has changed
                    held.need, held.looked_at = self._need(held.request, session), self._turn
                if not self._may_enter(held, gone, idle=idle and not released):
                    continue
                self._seat(key, session, held.need)
            del self._held[held.request.request_id]
            released.append(held.request)
        if released:
            self.wakes_at = self._idle_since = None
        return released

    def admitted(self, request: Request) -> None:
        """A request gets its blocks for the first time: a turn begins."""
        if not request.session_id:
            return
        key = _key(request)
        session = self._sessions[key] if request.request_id in self._here else self._arrived(request)
        known = session.num_prompt_tokens
        if known and hash(_prefix(request, known)) == session.prompt_hash:
            self._returns.add(came=True)
        elif not known:
            session.num_shared_tokens = request.num_computed_tokens
        self._turn += 1
        session.num_prompt_tokens = request.num_prompt_tokens
        session.prompt_hash = hash(_prefix(request, request.num_prompt_tokens))
        self._admitted.add(request.request_id)
        own = max(0, request.num_prompt_tokens - session.num_shared_tokens)
        if key in self._seats:
            self._resize(key, session, own)
            self._seats.move_to_end(key)
        else:  # it lost its seat on the way through the policy's queue
            self._seat(key, session, own)
        session.num_turns += 1
        self._take_seats_beyond_room()

    def ended(self, request: Request) -> None:
        """A request has ended, wherever it stood; what it computed is cached for the next turn."""
        key = self._here.pop(request.request_id, None)
        if key is None:
            return
        session = self._sessions[key]
        session.num_here -= 1
        if request.request_id in self._admitted:
            self._admitted.remove(request.request_id)
            self._resize(key, session, max(0, len(request.token_ids) - session.num_shared_tokens))
        if not session.num_here:
            session.away_since = self.now

    def clear(self) -> None:
        """The cache is gone, by no fault of the sessions; nobody may be here."""
        assert not self._here, "somebody is here"
        self._sessions.clear()
        self._seats.clear()
        self._num_seated_tokens = 0
        self.wakes_at = None

    def check(self) -> None:
        """Assert the invariants. For tests."""
        assert self._seats or not self._held, "somebody is held, and nobody has a seat"
        for held in self._held.values():
            assert held.request.session_id, "a request without a session is held"
            assert self._here[held.request.request_id] == _key(held.request)
            assert held.since_turn <= self._turn
            assert held.since <= self.now
        for key, session in self._sessions.items():
            assert session.num_here == sum(here == key for here in self._here.values())
            assert (session.away_since is None) == (session.num_here > 0)
        for key, session in self._seats.items():
            assert self._sessions[key] is session, "a seat without its session"
        assert sum(session.num_tokens for session in self._seats.values()) == self._num_seated_tokens
        assert self._admitted <= self._here.keys()
        assert len(self._sessions) <= MAX_SESSIONS + len(self._here) + 1
        assert self.wakes_at is None or self._held, "an alarm is set and nobody waits"

    def _may_enter(self, held: _Held, gone: list[_Key], *, idle: bool) -> bool:
        """Whether a held request gets a seat, now that room was made for it as far as that is right."""
        need = held.need
        if self._fits(need):
            return True
        self._take_seats(need, gone)
        if self._fits(need):
            return True
        turn, at = self._last_rotation
        if (
            self._turn - max(held.since_turn, turn) >= MAX_PASSES
            or self.now - max(held.since, at) >= MAX_HELD_S
        ):
            self._last_rotation = self._turn, self.now
            self._take_seats(need, sorted(self._seats, key=lambda key: -self._seats[key].num_turns))
            return True
        if not idle:
            return False
        victims = self._victims(need)
        until = self._waits_until(victims)
        if until <= self.now:
            self._take_seats(need, victims)
            return True
        self.wakes_at = min(until, self.wakes_at or inf)
        return False

    def _is_overdue(self, held: _Held) -> bool:
        """Held for too long, and the last that was has had its time."""
        turn, at = self._last_rotation
        num_passes, held_s = self._turn - max(held.since_turn, turn), self.now - max(held.since, at)
        return num_passes >= MAX_PASSES or held_s >= MAX_HELD_S

    def _waits_until(self, victims: list[_Key]) -> float:
        """How long an idle engine waits for who is away before it takes these seats; `now` for not at all."""
        assert self._idle_since is not None
        num_tokens = sum(self._seats[key].num_tokens for key in victims)
        loss_s = num_tokens * self._cost.token_s * self._returns.share
        until = self._idle_since + min(loss_s, MAX_IDLE_S)
        away = [(session, session.away_since) for session in self._seats.values() if not session.num_here]
        back_at, given_up_at = inf, inf
        for session, since in away:
            assert since is not None
            gaps = self._gaps_of(session)
            back_at = min(back_at, max(since + gaps.mean_s, self.now + gaps.deviation_s))
            given_up_at = min(given_up_at, since + self._patience_s(session))
        if until <= self.now or back_at > until:
            return self.now  # nobody is expected back in time
        return min(until, given_up_at)

    def _victims(self, need: int) -> list[_Key]:
        """Who is away, the longest without a turn first, as many as must go: the cache's own order."""
        missing = self._num_seated_tokens + need - self._room
        victims: list[_Key] = []
        for key, session in self._seats.items():
            if missing > 0 and not session.num_here:
                victims.append(key)
                missing -= session.num_tokens
        return victims

    def _gaps_of(self, session: _Session) -> Gaps:
        return session.gaps if session.gaps.number else self._gaps

    def _patience_s(self, session: _Session) -> float:
        """How long a session that is away keeps its seat against others."""
        gaps = self._gaps_of(session)
        usual_s = gaps.latest_s if gaps.number else FIRST_GAP_S
        pool_s = self._room * self._cost.token_s
        return min(usual_s, pool_s) if pool_s else usual_s

    def _is_gone(self, session: _Session) -> bool:
        return session.away_since is not None and self.now >= session.away_since + self._patience_s(session)

    def _take_seats(self, need: int, keys: Iterable[_Key]) -> None:
        """Take these seats, one by one, until so many tokens fit."""
        for key in keys:
            if self._fits(need):
                return
            if key in self._seats:
                self._unseat(key)

    def _take_seats_beyond_room(self) -> None:
        """Who has a seat may outgrow the room. First to go is who is away, then who had most turns."""
        if self._num_seated_tokens <= self._room:
            return
        away = [key for key, session in self._seats.items() if not session.num_here]
        here = [key for key, session in self._seats.items() if session.num_here]
        for key in (*away, *sorted(here, key=lambda key: -self._seats[key].num_turns)):
            if self._num_seated_tokens <= self._room or len(self._seats) == 1:
                return
            self._unseat(key)

    def _fits(self, need: int) -> bool:
        """Nobody is kept out by an empty room, however much it needs."""
        return self._num_seated_tokens + need <= self._room or not self._seats

    def _need(self, request: Request, session: _Session) -> int:
        """What a turn will have of its own in the cache."""
        known = session.num_prompt_tokens
        num_shared = session.num_shared_tokens if known else self._match_length(request)
        return max(0, len(request.token_ids) - num_shared)

    def _seat(self, key: _Key, session: _Session, num_tokens: int) -> None:
        session.num_turns = 0
        session.num_tokens = num_tokens
        self._num_seated_tokens += num_tokens
        self._seats[key] = session

    def _unseat(self, key: _Key) -> None:
        session = self._seats.pop(key)
        self._num_seated_tokens -= session.num_tokens
        if self._is_gone(session):
            self._returns.add(came=False)

    def _resize(self, key: _Key, session: _Session, num_tokens: int) -> None:
        if key in self._seats:
            self._num_seated_tokens += num_tokens - session.num_tokens
        session.num_tokens = num_tokens

    def _arrived(self, request: Request) -> _Session:
        """A request is here; it may show for how long its session was away."""
        key = _key(request)
        session = self._session(key)
        if session.away_since is not None:
            session.gaps.add(self.now - session.away_since)
            self._gaps.add(self.now - session.away_since)
            session.away_since = None
        session.num_here += 1
        self._here[request.request_id] = key
        return session

    def _session(self, key: _Key) -> _Session:
        """The session, known from now on; it counts as used. Too many forget who was idle longest."""
        session = self._sessions.setdefault(key, _Session())
        self._sessions.move_to_end(key)
        for _ in range(2 if len(self._sessions) > MAX_SESSIONS else 0):
            oldest_key, oldest = next(iter(self._sessions.items()))
            if oldest.num_here or oldest is session:
                self._sessions.move_to_end(oldest_key)
                continue
            if oldest_key in self._seats:
                self._unseat(oldest_key)
            del self._sessions[oldest_key]
        return session


def open_gate(manager: KVManager) -> SessionGate | None:
    """A gate for a pool; none where there is no prefix to come back to."""
    if not manager.shares_prefixes:
        return None
    return SessionGate(manager.num_blocks * manager.block_size, manager.match_length)


def _key(request: Request) -> _Key:
    return request.tenant, request.session_id


def _prefix(request: Request, num_tokens: int) -> bytes:
    return memoryview(request.token_ids)[:num_tokens].tobytes()
