"""The real scheduler and pool without tensors: one step after another, every sample a token."""

from array import array
from collections.abc import Iterable, Sequence

from core.cache.kinds import make_manager
from core.cache.reservation import KVManager
from core.config import BatchingKind, KVReservation
from core.request import Request, SamplingParams
from core.scheduler.batching import find_batching
from core.scheduler.plan import SampledTokens, StepPlan, StepResult
from core.scheduler.policies import find_policy
from core.scheduler.scheduler import Scheduler
from core.scheduler.sessions import open_gate

BLOCK_SIZE = 16


class Simulated:
    """A scheduler that is driven by hand.

    Args:
        step_s, token_s: what a step costs, and each token in it; nothing, where time does not matter.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        max_model_len: int,
        reservation: KVReservation = "paged",
        batching: BatchingKind = "continuous",
        prefix_cache: bool = False,
        max_running: int = 256,
        max_step_tokens: int = 2048,
        policy: str = "first_come",
        gated: bool = False,
        step_s: float = 0.0,
        token_s: float = 0.0,
    ) -> None:
        self.manager: KVManager = make_manager(
            reservation, num_blocks, BLOCK_SIZE, prefix_cache=prefix_cache, max_request_tokens=max_model_len
        )
        self.scheduler = Scheduler(
            self.manager,
            max_step_tokens=max_step_tokens,
            max_prefill_tokens=max_step_tokens,
            max_running=max_running,
            max_model_len=max_model_len,
            batching=find_batching(batching),
            policy=find_policy(policy)(self.manager.match_length),
            gate=open_gate(self.manager) if gated else None,
        )
        self.now = 0.0
        """Seconds; whoever drives it adds what passes between two calls."""
        self.step_s, self.token_s = step_s, token_s
        self.num_step_tokens = 0
        """Of the newest step."""
        self._requests: dict[str, Request] = {}

    @property
    def wakes_at(self) -> float | None:
        """Until when nothing is done unless somebody comes; None while there is something to do."""
        return self.scheduler.wakes_at

    def add(
        self, request_id: str, token_ids: Sequence[int], *, max_tokens: int, session_id: str = ""
    ) -> Request:
        request = Request(
            request_id=request_id,
            token_ids=array("i", token_ids),
            num_prompt_tokens=len(token_ids),
            session_id=session_id,
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=0),
        )
        self.scheduler.advance(self.now)
        self.scheduler.add(request)
        self._requests[request_id] = request
        return request

    def step(self, *, answers: dict[str, Sequence[int]] | None = None) -> list[str]:
        """Plan and confirm one step. Returns who finished: nobody, where the scheduler waits (`wakes_at`).

        Args:
            answers: the output of a request, token by token; 7 where there is none.
        """
        self.scheduler.advance(self.now)
        plan = self.scheduler.schedule()
        if plan is None:
            assert self.wakes_at is not None, "there is nothing to do"
            return []
        self.num_step_tokens = plan.num_tokens
        took_s = self.step_s + self.token_s * plan.num_tokens
        self.now += took_s
        self.scheduler.advance(self.now)
        outputs = self.scheduler.update(plan, self._result(plan, answers or {}), took_s=took_s)
        return [output.request_id for output in outputs if output.finish_reason is not None]

    def _result(self, plan: StepPlan, answers: dict[str, Sequence[int]]) -> StepResult:
        return StepResult(step_id=plan.step_id, samples=tuple(self._samples(plan, answers)))

    def _samples(self, plan: StepPlan, answers: dict[str, Sequence[int]]) -> Iterable[SampledTokens]:
        for item in plan.items:
            if item.num_samples:
                answer = answers.get(item.request_id)
                known = item.first_position + len(item.token_ids)
                num_prompt_tokens = self._requests[item.request_id].num_prompt_tokens
                token_id = 7 if answer is None else answer[known - num_prompt_tokens]
                yield SampledTokens(request_id=item.request_id, token_ids=(token_id,))
