"""A scheduler, a fake worker and a record of all that came out: the engine loop without asyncio.

Up to two plans are in flight. Every operation is followed by `check()`. `finish_up` runs to the end
and compares each request with what it would have given alone.
"""

from array import array
from collections import deque
from collections.abc import Sequence

from core.cache.kinds import make_manager
from core.config import BatchingKind, EngineConfig, KVReservation
from core.request import FinishReason, Request, SamplingParams, TokenOutput
from core.scheduler.batching import find_batching
from core.scheduler.plan import PlannedTokens, StepPlan, StepResult
from core.scheduler.policies import WaitingQueue
from core.scheduler.scheduler import Scheduler
from core.scheduler.sessions import SessionGate
from tests.fakes.kv_worker import KVWorker, generate_alone, load_worker, pool_alone, score_alone

VOCAB_SIZE = 7
"""Small, so that stop tokens and equal continuations happen by themselves."""

MAX_STEPS = 5000
"""Nothing here needs as many: beyond it the scheduler is going in circles."""


class Simulation:
    """One scheduler under test, driven by hand."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_step_tokens: int = 16,
        max_prefill_tokens: int = 8,
        max_running: int = 4,
        prefix_cache: bool = True,
        max_model_len: int = 1 << 20,
        kv_reservation: KVReservation = "paged",
        batching: BatchingKind = "continuous",
        whole_prompts: bool = False,
        policy: WaitingQueue | None = None,
        gate: SessionGate | None = None,
    ) -> None:
        self.manager = make_manager(
            kv_reservation,
            num_blocks,
            block_size,
            prefix_cache=prefix_cache,
            max_request_tokens=max_model_len,
        )
        self.scheduler = Scheduler(
            self.manager,
            max_step_tokens=max_step_tokens,
            max_prefill_tokens=max_prefill_tokens,
            max_running=max_running,
            max_model_len=max_model_len,
            batching=find_batching(batching),
            whole_prompts=whole_prompts,
            policy=policy,
            gate=gate,
        )
        checkpoint = f"fake:vocab={VOCAB_SIZE}"
        config = EngineConfig(checkpoint=checkpoint, block_size=block_size, num_blocks=num_blocks)
        self.worker: KVWorker = load_worker(config)
        self.max_step_tokens = max_step_tokens
        self.max_prefill_tokens = max_prefill_tokens
        self.whole_prompts = whole_prompts
        self.in_flight: deque[StepPlan] = deque()
        self.requests: dict[str, Request] = {}
        self.prompts: dict[str, list[int]] = {}
        self.outputs: dict[str, list[TokenOutput]] = {}
        self.finished_at: dict[str, int] = {}
        """Output tokens that count, for requests ended by `finish`."""

    def add(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams | None = None,
        *,
        namespace: bytes = b"a",
        pools: bool = False,
        tenant: str = "",
        session_id: str = "",
    ) -> str:
        """Queue a request; it must fit. Returns its id."""
        if pools:
            sampling = SamplingParams(max_tokens=0, temperature=0.0, seed=0)
        request_id = f"r{len(self.requests)}"
        request = Request(
            request_id=request_id,
            token_ids=array("i", prompt_ids),
            num_prompt_tokens=len(prompt_ids),
            sampling=sampling or greedy(4),
            namespace=namespace,
            pools=pools,
            tenant=tenant,
            session_id=session_id,
        )
        self.scheduler.add(request)
        self.requests[request_id] = request
        self.prompts[request_id] = list(prompt_ids)
        self.outputs[request_id] = []
        self.scheduler.check()
        return request_id

    def schedule(self) -> StepPlan | None:
        plan = self.scheduler.schedule()
        self.scheduler.check()
        if plan is not None:
            self._check_plan(plan)
            self.in_flight.append(plan)
        return plan

    def update(self, result: StepResult | None = None) -> list[TokenOutput]:
        """Compute the oldest plan in flight and confirm it."""
        plan = self.in_flight.popleft()
        outputs = self.scheduler.update(plan, result or self.worker.execute(plan))
        return self._record(outputs)

    def fail(self) -> list[TokenOutput]:
        """The oldest plan raises after it has scribbled over all slots it was to write."""
        plan = self.in_flight.popleft()
        garbled = [
            type(item)(
                request_id=item.request_id,
                token_ids=tuple(VOCAB_SIZE - 1 - token_id for token_id in item.token_ids),
                first_position=item.first_position,
                block_table=item.block_table,
            )
            for item in plan.items
        ]
        self.worker.execute(
            StepPlan(step_id=plan.step_id, items=tuple(garbled), block_copies=plan.block_copies)
        )
        return self._record(self.scheduler.fail(plan, "the step raised"))

    def fail_all(self) -> list[TokenOutput]:
        """The worker dies; a fresh one has an empty KV pool."""
        self.in_flight.clear()
        outputs = self._record(self.scheduler.fail_all("the worker died"))
        self.worker.clear_slots()
        return outputs

    def abort(self, request_id: str) -> None:
        output = self.scheduler.abort(request_id)
        self._record([] if output is None else [output])

    def finish(self, request_id: str, num_tokens: int) -> None:
        output = self.scheduler.finish(request_id, num_tokens)
        if output is not None:
            self.finished_at[request_id] = num_tokens
        self._record([] if output is None else [output])

    def step(self) -> list[TokenOutput]:
        """Schedule and update, with nothing else in flight."""
        assert not self.in_flight
        return self.update() if self.schedule() else []

    def run(self) -> None:
        """Step until every request has ended."""
        for _ in range(MAX_STEPS):
            if not self.in_flight and self.schedule() is None:
                return
            self.update()
        raise AssertionError(f"{self.scheduler.num_unfinished} requests are not served in {MAX_STEPS} steps")

    def finish_up(self) -> None:
        """Run to the end; nothing may be lost, and nobody may have got a wrong token."""
        self.run()
        assert self.scheduler.num_unfinished == 0
        assert self.manager.num_held_blocks == 0, "a block is lost"
        for request_id in self.requests:
            self.check_outputs(request_id)
            self._check_cached_tokens(request_id)

    def output_ids(self, request_id: str) -> list[int]:
        return [token_id for output in self.outputs[request_id] for token_id in output.token_ids]

    def reason(self, request_id: str) -> FinishReason | None:
        """How a request ended; None if it has not. Never two endings, and nothing after one."""
        reasons = [output.finish_reason for output in self.outputs[request_id]]
        assert not any(reasons[:-1]), f"{request_id} went on after its end: {reasons}"
        return reasons[-1] if reasons else None

    def check_outputs(self, request_id: str) -> None:
        """An ended request has one ending, and the tokens it would have had alone."""
        reason = self.reason(request_id)
        assert reason is not None, f"{request_id} never ended"
        output_ids = self.output_ids(request_id)
        request = self.requests[request_id]
        sampling = request.sampling
        self._check_asides(request, whole=reason is FinishReason.LENGTH)
        alone = generate_alone(self.prompts[request_id], sampling, vocab_size=VOCAB_SIZE)
        if reason in (FinishReason.ABORT, FinishReason.ERROR):
            assert output_ids == alone[: len(output_ids)]
        elif request_id in self.finished_at:
            num_tokens = self.finished_at[request_id]
            assert output_ids[:num_tokens] == alone[:num_tokens]
        else:
            stopped = bool(alone) and alone[-1] in sampling.stop_token_ids
            assert reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
            assert output_ids == alone

    def _check_asides(self, request: Request, *, whole: bool) -> None:
        """Scores and sums: each once and right, whatever happened on the way; none that nobody asked for."""
        outputs, prompt_ids = self.outputs[request.request_id], self.prompts[request.request_id]
        scores = [each for output in outputs for each in output.prompt_logprobs]
        num_top = request.sampling.prompt_logprobs
        if scores or (num_top is not None and self.output_ids(request.request_id)):
            assert num_top is not None
            assert list(outputs[0].prompt_logprobs) == scores == score_alone(prompt_ids, num_top)
        pooled = b"".join(output.pooled for output in outputs)
        assert pooled == (pool_alone(prompt_ids) if request.pools and whole else b"")
        for output in outputs:
            asked = request.sampling.num_logprobs is not None
            assert [each.token_id for each in output.logprobs] == list(output.token_ids) * asked

    def _record(self, outputs: list[TokenOutput]) -> list[TokenOutput]:
        for output in outputs:
            self.outputs[output.request_id].append(output)
        self.scheduler.check()
        return outputs

    def _check_cached_tokens(self, request_id: str) -> None:
        """A prefix hit is at most what others of the same namespace have in common with the prompt."""
        mine = self.requests[request_id]
        others = (other for other in self.requests.values() if other is not mine)
        prompt_ids = self.prompts[request_id]
        longest = max(
            (
                _num_common(prompt_ids, other.token_ids)
                for other in others
                if other.namespace == mine.namespace
            ),
            default=0,
        )
        assert (mine.num_cached_tokens or 0) <= min(longest, len(prompt_ids) - 1)

    def _check_plan(self, plan: StepPlan) -> None:
        assert plan.num_tokens > 0
        if self.whole_prompts:
            self._check_whole(plan)
        else:
            assert plan.num_tokens <= self.max_step_tokens
            assert max(len(item.token_ids) for item in plan.items) <= self.max_prefill_tokens
        assert len({item.request_id for item in plan.items}) == len(plan.items)
        for item in plan.items:
            assert item.token_ids
            assert (item.sampling is not None) == (item.num_samples > 0)
            self._check_necessary(item)
        self._check_writes(plan)

    def _check_whole(self, plan: StepPlan) -> None:
        """Each item ends with the last token its request knows; past the budget one prompt may go."""
        for item in plan.items:
            request = self.requests[item.request_id]
            assert item.first_position + len(item.token_ids) == len(request.token_ids)
        prompts = [len(item.token_ids) for item in plan.items if len(item.token_ids) > 1]
        assert plan.num_tokens <= self.max_step_tokens or len(prompts) == 1

    def _check_necessary(self, item: PlannedTokens) -> None:
        """Only what was asked for is carried."""
        request = self.requests[item.request_id]
        sampling = request.sampling
        assert (item.pooling is not None) == request.pools
        assert item.scoring is None or sampling.prompt_logprobs is not None
        assert item.scoring is None or item.first_position < request.num_prompt_tokens - 1
        early = request.num_output_tokens < sampling.min_tokens
        assert (item.history is not None) == (item.num_samples > 0 and (sampling.looks_back or early))

    def _check_writes(self, plan: StepPlan) -> None:
        """No block that a plan writes is named by anybody else's item, in this plan or one in flight."""
        size = self.manager.block_size
        items = [item for other in (*self.in_flight, plan) for item in other.items]
        copies = [copy for other in (*self.in_flight, plan) for copy in other.block_copies]
        for copy in plan.block_copies:
            assert any(copy.target in array("i", item.block_table) for item in plan.items)
        for item in items:
            first_block = item.first_position // size
            last_block = (item.first_position + len(item.token_ids) - 1) // size
            written = set(array("i", item.block_table)[first_block : last_block + 1])
            assert written.isdisjoint(copy.source for copy in copies), "a block to copy from was reused"
            for other in items:
                if other.request_id != item.request_id:
                    assert written.isdisjoint(array("i", other.block_table)), "a block in flight was reused"


def _num_common(some: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(some, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(some), len(other)))


def greedy(max_tokens: int, *, stop_token_ids: tuple[int, ...] = ()) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=0, stop_token_ids=stop_token_ids)
