"""The values that cross between the loop and the executor: what to compute, and what came out.

Both directions are frozen, hold ids and numbers only, and encode with msgspec, so that a thread
and a child process are served alike.
"""

import msgspec

from core.request import SamplingParams


class PlannedTokens(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of one request that a step computes.

    `token_ids[i]` stands at position `first_position + i`. `block_table` is the request's whole
    block table so far as native 32-bit integers: position `p` lives in slot
    `table[p // block_size] * block_size + p % block_size`. The last `num_samples` rows are
    sampled (0: this is the inside of a prompt; 1: the usual case).
    `sampling` is given exactly when `num_samples` is above 0, with `seed` always set.
    """

    request_id: str
    token_ids: tuple[int, ...]
    first_position: int
    block_table: bytes
    num_samples: int = 0
    sampling: SamplingParams | None = None


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One forward over many requests. `step_id` counts up from 1."""

    step_id: int
    items: tuple[PlannedTokens, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(item.token_ids) for item in self.items)


class SampledTokens(msgspec.Struct, frozen=True, kw_only=True):
    """What one planned item with `num_samples > 0` gave: ids, or why its sampling failed."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    error: str | None = None


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """One entry per planned item with `num_samples > 0`, in plan order, and where the time went (seconds)."""

    step_id: int
    samples: tuple[SampledTokens, ...]
    build_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
