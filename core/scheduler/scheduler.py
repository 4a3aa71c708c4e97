"""Decides which tokens each step computes, and takes in what came out.

There is no prefill phase and no decode phase: a request knows `token_ids` and has the KV of the first
`num_computed_tokens`; each step narrows the gap. A prompt, a chunk of one, a prefix hit, a resumed
victim and ordinary decoding are one case. (The idea is vLLM v1's.)

`schedule()` reserves tokens (`num_scheduled_tokens`), `update()` or `fail()` takes the reservation back,
in the order of the plans. While it lasts the request keeps its blocks, whatever happens to it.

Invariants (`check()` asserts them):
    - a waiting request holds no blocks; a running one holds blocks for all tokens it knew when admitted;
    - a request with tokens in flight is never preempted, and gives its blocks back only at the last
      update of a plan that names it, even if it ended meanwhile;
    - with nothing in flight, some unfinished request can always be planned, or `wakes_at` says when.
"""

from collections import OrderedDict

from core.cache.reservation import KVManager
from core.errors import RequestTooLong
from core.request import FinishReason, Request, RequestStatus, TokenOutput
from core.scheduler.batching import Batching, ContinuousBatching
from core.scheduler.plan import PlannedTokens, SampledTokens, StepPlan, StepResult
from core.scheduler.planning import Draft
from core.scheduler.policies import WaitingQueue
from core.scheduler.policies.first_come import FirstCome
from core.scheduler.results import append_tokens, keep_asides, with_scores
from core.scheduler.sessions import SessionGate
from core.scheduler.siblings import Siblings
from core.scheduler.stats import SchedulerStats
from core.scheduler.waiting import WaitingLine


class Scheduler:
    """Continuous batching under a token budget, with preemption by recompute.

    Torch-free, clock-free, touched by the event loop alone. What depends on time goes by what `advance`
    was told; a scheduler that is never told waits for nothing.

    Args:
        max_step_tokens: token budget of one step; at least `max_running`, so that every running
            request can have its next token in each step.
        max_prefill_tokens: the most one request may take of it.
        max_model_len: prompt and output together.
        policy: the order of those who were never admitted; it must be empty.
        gate: holds back turns of sessions that the cache has no room for; none unless given.
        batching: when waiting requests may join; continuous unless given.
        whole_prompts: compute each prompt in one step, whatever `max_prefill_tokens` is. The token budget
            then says how many prompts a step may begin besides its first.
    """

    def __init__(
        self,
        manager: KVManager,
        *,
        max_step_tokens: int,
        max_prefill_tokens: int,
        max_running: int,
        max_model_len: int,
        policy: WaitingQueue | None = None,
        gate: SessionGate | None = None,
        batching: Batching | None = None,
        whole_prompts: bool = False,
    ) -> None:
        assert 1 <= max_running <= max_step_tokens
        assert max_prefill_tokens >= 1
        self._manager = manager
        self._max_step_tokens = max_step_tokens
        self._max_prefill_tokens = max_prefill_tokens
        self._max_running = max_running
        self._max_model_len = max_model_len
        policy = FirstCome() if policy is None else policy
        self._charge = policy.charge
        self._waiting = WaitingLine(policy, gate=gate)
        self._batching: Batching = batching or ContinuousBatching()
        self._whole_prompts = whole_prompts
        self._siblings = Siblings(manager.block_size)
        self._running: OrderedDict[str, Request] = OrderedDict()  # oldest admission first
        self._requests: dict[str, Request] = {}  # waiting and running
        self._in_flight: OrderedDict[int, tuple[StepPlan, list[Request]]] = OrderedDict()
        self._num_kept_tokens: dict[str, int] = {}  # cut short by `finish` while in flight
        self._step_id = 0
        self._num_computed_tokens = 0
        self._num_output_tokens = 0
        self._num_preemptions = 0
        self._num_finished = dict.fromkeys((str(reason) for reason in FinishReason), 0)

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    @property
    def wakes_at(self) -> float | None:
        """When `schedule` must be called again though it gave None and nothing has happened since."""
        return self._waiting.wakes_at

    def advance(self, now: float) -> None:
        """Tell the time, in seconds from any beginning; it never goes back."""
        self._waiting.advance(now)

    @property
    def max_request_tokens(self) -> int:
        """The most tokens, prompt and output together, that a single request may have."""
        return min(self._max_model_len, self._manager.num_blocks * self._manager.block_size)

    def check_admissible(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """Refuse what could never fit, before it is queued.

        Raises:
            RequestTooLong: naming the limit it passes.
        """
        limits = (
            (self._max_model_len, "the context length"),
            (self._manager.num_blocks * self._manager.block_size, "the size of the KV cache"),
        )
        for limit, limit_name in limits:
            if num_prompt_tokens + max_tokens > limit:
                raise RequestTooLong(
                    num_prompt_tokens=num_prompt_tokens,
                    max_tokens=max_tokens,
                    limit=limit,
                    limit_name=limit_name,
                )

    def add(self, request: Request) -> None:
        """Queue a new request.

        Raises:
            RequestTooLong: as `check_admissible` does.
        """
        assert request.num_prompt_tokens == len(request.token_ids) > 0, "a request needs a prompt"
        assert (request.sampling.max_tokens > 0) is not request.pools, "tokens or pooling"
        assert request.sampling.seed is not None, "the engine draws the seed that a client left open"
        assert request.request_id not in self._requests, f"{request.request_id} is already here"
        assert not self._manager.holds(request.request_id), f"{request.request_id} has tokens in flight"
        assert request.status is RequestStatus.WAITING
        assert request.num_computed_tokens == 0
        self.check_admissible(request.num_prompt_tokens, request.sampling.max_tokens)
        self._waiting.push(request)
        self._requests[request.request_id] = request

    def abort(self, request_id: str) -> TokenOutput | None:
        """End a request now, in a step or out of it. None if it is unknown or has ended already."""
        request = self._requests.get(request_id)
        return None if request is None else self._end(request, FinishReason.ABORT)

    def finish(self, request_id: str, num_tokens: int) -> TokenOutput | None:
        """End a request with `stop` after its first `num_tokens` generated tokens, at most those there are.

        Later ones are neither counted nor kept in the prefix cache. None as for `abort`.
        """
        request = self._requests.get(request_id)
        if request is None:
            return None
        assert 0 <= num_tokens <= request.num_output_tokens, (
            f"{num_tokens} of {request.num_output_tokens} tokens"
        )
        self._num_output_tokens -= request.num_output_tokens - num_tokens
        num_kept_tokens = request.num_prompt_tokens + num_tokens
        return self._end(request, FinishReason.STOP, num_kept_tokens=num_kept_tokens)

    def schedule(self) -> StepPlan | None:
        """Plan one step: running requests first, then waiting ones. None if nothing can be computed now."""
        if self._siblings:
            self._release_siblings()
        self._waiting.let_in(idle=not (self._running or self._siblings))
        draft = Draft(self._max_step_tokens, self._max_prefill_tokens, whole_prompts=self._whole_prompts)
        self._continue_running(draft)
        self._admit_waiting(draft)
        if not draft.items:
            can_go_on = self._in_flight or not self._requests or self.wakes_at is not None
            assert can_go_on, "nothing is in flight and nobody can go on"
            return None
        self._step_id += 1
        copies = self._manager.take_copies(draft.requests)
        plan = StepPlan(step_id=self._step_id, items=tuple(draft.items), block_copies=copies)
        self._in_flight[plan.step_id] = (plan, draft.requests)
        return plan

    def update(self, plan: StepPlan, result: StepResult, *, took_s: float | None = None) -> list[TokenOutput]:
        """Confirm a step: an output for each request that sampled, none for those that ended meanwhile.

        Args:
            took_s: how long it was computed, where that is known.
        """
        assert result.step_id == plan.step_id
        if took_s is not None and plan.num_tokens > len(plan.items):
            self._waiting.computed(plan.num_tokens, took_s)
        requests = self._land(plan)
        samples = iter(result.samples)
        outputs: list[TokenOutput] = []
        finished = RequestStatus.FINISHED
        for item, request in zip(plan.items, requests, strict=True):
            sample = next(samples) if item.num_samples or item.answers else None
            if request.status is finished:
                self._settle(request)
                continue
            output = self._confirm(request, item, sample)
            if output is not None:
                outputs.append(output)
        assert next(samples, None) is None, "the result has more samples than the plan"
        return outputs

    def fail(self, plan: StepPlan, message: str) -> list[TokenOutput]:
        """End every request of a plan whose step failed. What the step wrote never enters the tree."""
        outputs: list[TokenOutput] = []
        for request in self._land(plan):
            if request.status is RequestStatus.FINISHED:
                self._settle(request)
            else:
                outputs.append(self._end(request, FinishReason.ERROR, error=message))
        return outputs

    def fail_all(self, message: str) -> list[TokenOutput]:
        """End every request and empty the prefix cache: the worker is gone, and its KV with it.

        Plans in flight are forgotten; no update may come for them.
        """
        for plan, _ in tuple(self._in_flight.values()):
            for request in self._land(plan):
                if request.status is RequestStatus.FINISHED:
                    self._settle(request)
        requests = tuple(self._requests.values())
        outputs = [self._end(request, FinishReason.ERROR, error=message) for request in requests]
        self._manager.clear()
        self._waiting.forget_sessions()
        return outputs

    def stats(self) -> SchedulerStats:
        manager = self._manager
        usage = manager.usage()
        return SchedulerStats(
            num_waiting=len(self._waiting) + len(self._siblings),
            num_running=len(self._running),
            num_steps_in_flight=len(self._in_flight),
            num_free_blocks=manager.num_free_blocks,
            num_evictable_blocks=manager.num_available_blocks - manager.num_free_blocks,
            num_held_blocks=manager.num_held_blocks,
            num_cached_blocks=manager.num_cached_blocks,
            num_query_tokens=manager.num_query_tokens,
            num_hit_tokens=manager.num_hit_tokens,
            num_computed_tokens=self._num_computed_tokens,
            num_output_tokens=self._num_output_tokens,
            num_preemptions=self._num_preemptions,
            num_finished=dict(self._num_finished),
            num_live_tokens=usage.num_live_tokens,
            num_allocated_tokens=usage.num_allocated_tokens,
        )

    def nearest(self, request: Request) -> tuple[int, int | None]:
        """How many first tokens of a request's prompt are cached, to the token, and the block with the last.

        Changes nothing. The block is None where none of them is.
        """
        return self._manager.nearest(request)

    def check(self) -> None:
        """Assert the invariants, the manager's too. Tests call this after every operation."""
        in_flight: dict[str, int] = {}
        holders = dict(self._running)
        for plan, requests in self._in_flight.values():
            for item, request in zip(plan.items, requests, strict=True):
                in_flight[item.request_id] = in_flight.get(item.request_id, 0) + len(item.token_ids)
                holders[item.request_id] = request
        self._manager.check(holders.values())
        self._siblings.check()
        self._waiting.check()
        for request in holders.values():
            assert request.num_scheduled_tokens == in_flight.get(request.request_id, 0)
            assert request.num_uncomputed_tokens >= 0
        assert self._num_kept_tokens.keys() <= holders.keys() - self._requests.keys()
        waiting = [*self._waiting, *self._siblings]
        assert {request.request_id for request in waiting} == self._requests.keys() - self._running.keys()
        assert len(waiting) + len(self._running) == len(self._requests)
        assert len(self._running) <= self._max_running
        for request in waiting:
            assert request.status is RequestStatus.WAITING
            assert not request.block_table
            assert request.num_computed_tokens == request.num_scheduled_tokens == 0
        assert all(request.status is RequestStatus.RUNNING for request in self._running.values())

    def _release_siblings(self) -> None:
        """Those who lost their blocks come first, as others like them; the rest goes before newcomers."""
        for request in reversed(self._siblings.release()):
            if request.num_preemptions:
                self._waiting.push_back(request)
            else:
                self._waiting.push(request, is_follower=True)

    def _continue_running(self, draft: Draft) -> None:
        """First those that need one token, so that no running stream waits for another's prompt."""
        behind: list[Request] = []
        running = RequestStatus.RUNNING
        try_grow = self._manager.try_grow
        for request in tuple(self._running.values()):
            num_in_flight = request.num_scheduled_tokens
            num_tokens = len(request.token_ids) - request.num_computed_tokens - num_in_flight
            if num_in_flight and request.pools:
                continue  # the next chunk adds to the sum of this one
            if num_tokens > 1:
                behind.append(request)
            elif (
                num_tokens == 1
                and request.status is running
                and (try_grow(request, 1) or self._make_room(request))
            ):
                draft.add(request, 1)
        for request in behind:
            if draft.budget and request.status is running:
                draft.add_prompt(request)  # its blocks were taken at admission

    def _make_room(self, request: Request) -> bool:
        """Grow by one token, preempting from the young end until it fits or is itself the victim."""
        while not self._manager.try_grow(request, 1):
            victim = next(r for r in reversed(self._running.values()) if r.num_scheduled_tokens == 0)
            if victim is request and self._in_flight:
                return False  # the others are in flight, and one may soon end or become a victim: just wait
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self._manager.release(request)
        del self._running[request.request_id]
        request.status = RequestStatus.WAITING
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self._waiting.push_back(request)
        self._num_preemptions += 1

    def _admit_waiting(self, draft: Draft) -> None:
        """Admit from the head while budget and room last; nobody overtakes, except whom siblings let by."""
        batching = self._batching
        num_left = batching.num_admissible(num_running=len(self._running), max_running=self._max_running)
        while self._waiting and num_left and (draft.budget or batching.fills_at_once):
            request = self._waiting.head()
            if self._hold_back(request):
                continue
            if not self._admit(request):
                return
            num_left -= 1
            if draft.budget:
                draft.add_prompt(request)

    def _hold_back(self, request: Request) -> bool:
        """Take a request out of the queue while another computes at least one more block for it."""
        if not self._manager.shares_prefixes:
            return False
        found = self._siblings.find_leader(request)
        if found is None or found[1] < self._manager.match_length(request) + self._manager.block_size:
            return False
        self._waiting.discard(request)
        self._siblings.hold(request, *found)
        return True

    def _admit(self, request: Request) -> bool:
        """Give a waiting request its blocks, if there is room.

        All known tokens get their blocks at once, and there must be room for one block more, its own and
        one of each that runs: else it would soon be preempted, or another, and computed twice.
        """
        size, num_known = self._manager.block_size, len(request.token_ids)
        most = request.num_prompt_tokens + request.sampling.max_tokens
        room_for = min(num_known + size, most) + size * len(self._running)
        if not self._manager.attach_prefix(request, room_for=room_for):
            return False
        grown = self._manager.try_grow(request, num_known - request.num_computed_tokens)
        assert grown, "there was room, and now there is none"
        self._waiting.admit(request)
        request.status = RequestStatus.RUNNING
        self._running[request.request_id] = request
        self._siblings.lead(request)
        return True

    def _land(self, plan: StepPlan) -> list[Request]:
        """Take the oldest plan out of flight, with its reservations."""
        step_id, (_, requests) = self._in_flight.popitem(last=False)
        assert step_id == plan.step_id, f"step {step_id} comes before step {plan.step_id}"
        for item, request in zip(plan.items, requests, strict=True):
            request.num_scheduled_tokens -= len(item.token_ids)
        return requests

    def _confirm(
        self, request: Request, item: PlannedTokens, sample: SampledTokens | None
    ) -> TokenOutput | None:
        """Take in one item of a step: computed tokens, then new ones, then full blocks for the tree."""
        num_tokens = len(item.token_ids)
        request.num_computed_tokens += num_tokens
        self._num_computed_tokens += num_tokens
        if sample is None:
            self._manager.commit(request)
            return None
        assert sample.request_id == request.request_id
        if sample.error is not None:  # what cannot be sampled may come from bad KV: nothing is committed
            return self._end(request, FinishReason.ERROR, error=sample.error)
        if not request.is_plain:
            keep_asides(request, item, sample)
            if not item.num_samples:
                return self._confirm_unsampled(request)
        token_ids, reason = append_tokens(request, sample.token_ids)
        self._num_output_tokens += len(token_ids)
        self._charge(request, num_output_tokens=len(token_ids))
        self._manager.commit(request)
        if reason is not None:
            self._close(request, reason)
        output = TokenOutput(
            request_id=request.request_id,
            token_ids=token_ids,
            finish_reason=reason,
            num_cached_tokens=request.num_cached_tokens or 0,
        )
        if request.is_plain and not sample.logprobs:
            return output
        return with_scores(output, request, sample)

    def _confirm_unsampled(self, request: Request) -> TokenOutput | None:
        """A part of a prompt whose rows were asked for something else than tokens."""
        self._manager.commit(request)
        if not request.pools or request.num_computed_tokens < len(request.token_ids):
            return None
        self._close(request, FinishReason.LENGTH)
        return TokenOutput(
            request_id=request.request_id,
            finish_reason=FinishReason.LENGTH,
            num_cached_tokens=request.num_cached_tokens or 0,
            pooled=request.pooled,
        )

    def _end(
        self,
        request: Request,
        reason: FinishReason,
        *,
        num_kept_tokens: int | None = None,
        error: str | None = None,
    ) -> TokenOutput:
        """End a request that gives nothing more."""
        self._close(request, reason, num_kept_tokens=num_kept_tokens)
        return TokenOutput(
            request_id=request.request_id,
            finish_reason=reason,
            num_cached_tokens=request.num_cached_tokens or 0,
            error=error,
        )

    def _close(self, request: Request, reason: FinishReason, *, num_kept_tokens: int | None = None) -> None:
        """The one way in which a request ends. Its blocks come back now, or when its last plan lands."""
        del self._requests[request.request_id]
        was_running = request.status is RequestStatus.RUNNING
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        self._num_finished[reason] += 1
        self._waiting.ended(request)
        if was_running:
            del self._running[request.request_id]
            if num_kept_tokens is not None:
                self._num_kept_tokens[request.request_id] = num_kept_tokens
            self._settle(request)
        elif not self._siblings.discard(request):
            self._waiting.discard(request)
            if num_kept_tokens is not None:
                self._manager.forget_beyond(request, num_kept_tokens)

    def _settle(self, request: Request) -> None:
        """Give back the blocks of an ended request, unless a plan in flight still names them."""
        if request.num_scheduled_tokens == 0:
            num_kept_tokens = self._num_kept_tokens.pop(request.request_id, None)
            self._manager.release(request, num_kept_tokens=num_kept_tokens)
