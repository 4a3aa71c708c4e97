"""Requests that decode turn after turn: nearly all of them, nearly always, and all with the same times.

So nobody's books are touched for them: two clocks run for all, and an account is brought up to date when
somebody asks, or when its request does anything else than one more token.
"""

from collections.abc import Iterator

from core.engine.explain import DECODING, Account


class Cruise:
    """Accounts that were in every turn since they joined, each with one generated token.

    A turn is opened by `begin` and booked by `end`; one that fails half-way is never booked.
    """

    def __init__(self) -> None:
        self._accounts: dict[str, tuple[Account, float, float, int]] = {}
        """Engine's id -> account, and what the clocks showed when it was brought up to date."""
        self._own_s = 0.0
        self._stalled_s = 0.0
        self._num_turns = 0
        self._at = 0.0
        """Until when the clocks have run."""
        self._share: float | None = None
        """What of the open turn is others'; None between turns."""

    def __len__(self) -> int:
        return len(self._accounts)

    def __contains__(self, engine_id: str) -> bool:
        return engine_id in self._accounts

    def __iter__(self) -> Iterator[str]:
        return iter(self._accounts)

    def join(self, account: Account) -> None:
        """Between two turns, at the end of one that it was in."""
        assert self._share is None
        assert account.state == DECODING
        self._mark(account)

    def leave(self, engine_id: str) -> Account:
        account = self.update(engine_id)
        del self._accounts[engine_id]
        return account

    def begin(self, *, stall_share: float) -> None:
        self._share = stall_share
        self._num_turns += 1

    def end(self, at: float, *, began_at: float) -> None:
        assert self._share is not None, "no turn is open"
        self._own_s += (at - began_at) * (1.0 - self._share)
        self._stalled_s += (at - began_at) * self._share
        self._at = at
        self._share = None

    def update(self, engine_id: str) -> Account:
        """Bring an account up to date; the open turn's time is left to it."""
        account, own_s, stalled_s, num_turns = self._accounts[engine_id]
        account.add_cruise(
            own_s=self._own_s - own_s,
            stalled_s=self._stalled_s - stalled_s,
            num_turns=self._num_turns - num_turns,
            until=self._at,
        )
        account.in_turn = self._share is not None
        account.stall_share = self._share or 0.0
        self._mark(account)
        return account

    def _mark(self, account: Account) -> None:
        mark = (account, self._own_s, self._stalled_s, self._num_turns)
        self._accounts[account.request.request_id] = mark
