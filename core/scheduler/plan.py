"""The values that cross between the loop and the executor: what to compute, and what came out.

Both directions are frozen, hold ids and numbers only, and encode with msgspec, so that a thread
and a child process are served alike.
"""

import msgspec

from core.request import SamplingParams, TokenLogprob


class TokenHistory(msgspec.Struct, frozen=True, kw_only=True):
    """What came before a sampled row. Sent in every step, so that a worker has nothing to remember:
    a request that was cached, preempted or moved to another row looks back on the same tokens.
    """

    num_prompt_tokens: int
    token_ids: bytes = b""
    """Prompt and output so far, native 32-bit integers; empty where only the count matters."""


class PromptScoring(msgspec.Struct, frozen=True, kw_only=True):
    """The first rows of an item whose next token is known, and its log-probability asked for."""

    token_ids: tuple[int, ...]
    """`token_ids[i]` follows the item's row `i`."""
    num_top: int


class PlannedTokens(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The tokens of one request that a step computes.

    `token_ids[i]` stands at position `first_position + i`. `block_table` is the request's whole
    block table so far as native 32-bit integers: position `p` lives in slot
    `table[p // block_size] * block_size + p % block_size`. The last `num_samples` rows are
    sampled (0: this is the inside of a prompt; 1: the usual case).
    `sampling` is given exactly when `num_samples` is above 0, with `seed` always set, and `history`
    where its options look back.
    """

    request_id: str
    token_ids: tuple[int, ...]
    first_position: int
    block_table: bytes
    num_samples: int = 0
    sampling: SamplingParams | None = None
    history: TokenHistory | None = None
    scoring: PromptScoring | None = None
    pooling: bytes | None = None
    """The sum of the final hidden states of all earlier positions as native float64 (empty: there are
    none), to which this item's rows are added one by one. None: not asked for."""

    @property
    def answers(self) -> bool:
        """Whether the step's result has an entry for this item."""
        return self.num_samples > 0 or self.scoring is not None or self.pooling is not None


class BlockCopy(msgspec.Struct, frozen=True, kw_only=True):
    """The KV of the first `num_tokens` slots of a block, to be copied into another block."""

    source: int
    target: int
    num_tokens: int


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One forward over many requests. `step_id` counts up from 1."""

    step_id: int
    items: tuple[PlannedTokens, ...]
    block_copies: tuple[BlockCopy, ...] = ()
    """Done before anything is computed. No block is both a source and a target."""

    @property
    def num_tokens(self) -> int:
        return sum(len(item.token_ids) for item in self.items)


class SampledTokens(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one planned item that `answers` gave, or why that failed."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    """One per token id, where `num_logprobs` asks for them."""
    scored: tuple[TokenLogprob, ...] = ()
    """One per id of the item's `scoring`."""
    pooled: bytes = b""
    """The item's `pooling` with its own rows added."""
    error: str | None = None


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """One entry per planned item that `answers`, in plan order, and where the time went (seconds)."""

    step_id: int
    samples: tuple[SampledTokens, ...]
    build_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
