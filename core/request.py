"""What a generation is inside the engine: token ids in, token ids out.

`Request` is live state and is touched by the event loop alone. `SamplingParams` and
`TokenOutput` are frozen values that cross boundaries.
"""

from array import array
from dataclasses import dataclass, field
from enum import Enum, StrEnum

import msgspec


class RequestStatus(Enum):
    """Where a request stands. A preempted request is WAITING again."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(StrEnum):
    """Why a request ended. The gateway's dialects translate these."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is chosen and when to end.

    Defaults are "off". `temperature` 0 means greedy (lowest id wins a tie). `top_k` 0, `min_p` 0 and
    `typical_p` 1 keep everything. `repetition_penalty` looks at prompt and output,
    `presence_penalty` and `frequency_penalty` at the output alone. `logit_bias` is (token id, bias)
    pairs. Before `min_tokens` output tokens no stop token can be chosen. `num_logprobs` counts the
    most likely tokens reported beside each chosen one (0: the chosen one alone, None: nothing);
    `prompt_logprobs` the same for the prompt, which is then computed in full. `seed` makes the
    output a function of the request alone; the engine draws one where it is None. `stop_token_ids`
    end the request with `stop`, are reported and are counted like any other token.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    num_logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def looks_back(self) -> bool:
        """Whether earlier tokens change which token is next."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty)
        return penalties != (0.0, 0.0, 1.0)


class TokenLogprob(msgspec.Struct, frozen=True):
    """A token's log-probability before any sampling option, and the most likely tokens in its place."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability), most likely first."""


class TokenOutput(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one step gave one request. `finish_reason` is set on the last one and only there.

    `token_ids` may hold several ids (speculation) or none (abort, error).
    `num_cached_tokens` is how much of the prompt came from the prefix cache at first admission.
    `error` says what happened when `finish_reason` is `error`.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    queue_s: float = 0.0
    """Seconds from submission to the first step, as the caller's stream saw it."""
    error: str | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    """One per token id where they were asked for."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """One per prompt token but the first, on the first output that has them."""
    pooled: bytes = b""
    """The sum of the prompt's final hidden states, native float64, on the last output of `pools`."""


@dataclass(slots=True, eq=False)
class Request:
    """One generation. Owned by the scheduler; `block_table` by the cache manager.

    Invariant: `num_computed_tokens <= num_computed_tokens + num_scheduled_tokens <= len(token_ids)`.
    Progress is one number: `num_computed_tokens` chases `len(token_ids)`.
    """

    request_id: str
    token_ids: "array[int]"
    """Prompt and generated ids, signed 32-bit (`array("i")`)."""
    num_prompt_tokens: int
    sampling: SamplingParams
    namespace: bytes = b""
    """Who may share KV with this request (model, adapter, tenant salt, numerics, KV dtype)."""
    tenant: str = ""
    """Who pays for it: whose share a fair policy counts it in."""
    session_id: str = ""
    """Which of the tenant's conversations it is a turn of; empty: none."""
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    num_computed_tokens: int = 0
    num_scheduled_tokens: int = 0
    """Tokens of plans in flight: reserved by `schedule()`, confirmed by `update()`."""
    num_cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache at first admission; None before it."""
    num_preemptions: int = 0
    block_table: "array[int]" = field(default_factory=lambda: array("i"))
    pools: bool = False
    """Gives the sum of its hidden states instead of tokens."""
    pooled: bytes = b""
    """That sum so far."""
    num_scored_tokens: int = 0
    """Prompt tokens whose log-probabilities are known; the first has none."""
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    """Those not handed out yet."""
    is_plain: bool = field(init=False)
    """A plan carries nothing but its tokens: what nearly all requests are, told by one look."""

    def __post_init__(self) -> None:
        sampling = self.sampling
        self.is_plain = not (
            self.pools or sampling.looks_back or sampling.min_tokens or sampling.prompt_logprobs is not None
        )

    @property
    def must_compute_prompt(self) -> bool:
        """Cached KV does not serve: what is asked for needs every row of the prompt."""
        scores = self.sampling.prompt_logprobs is not None
        return self.pools or (scores and self.num_scored_tokens < self.num_prompt_tokens - 1)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens neither computed nor in flight."""
        return len(self.token_ids) - self.num_computed_tokens - self.num_scheduled_tokens
