"""The engine: the loop that plans a step, has it computed elsewhere, and hands out what came of it."""

import asyncio
import itertools
import secrets
import struct
from array import array
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from time import monotonic

import msgspec
import structlog

from core.cache.kinds import make_manager
from core.config import EngineConfig
from core.engine.client import TokenStream
from core.engine.executor import DEFAULT_WORKER, Executor, find_executor
from core.engine.explain import Explanation
from core.engine.id_bounds import are_below
from core.engine.recorder import Recorder
from core.engine.stats import EngineHealth, EngineStats, StepStats
from core.engine.trace import Trace, open_trace
from core.errors import EngineDraining, EngineError, EngineFailed, StepFailed, WorkerFailed
from core.execution.worker_info import WorkerInfo, WorkerMemory
from core.request import FinishReason, Request, RequestStatus, SamplingParams, TokenOutput
from core.scheduler.batching import find_batching
from core.scheduler.plan import StepPlan, StepResult
from core.scheduler.policies import find_policy
from core.scheduler.scheduler import Scheduler
from core.scheduler.sessions import open_gate

MAX_RESTARTS = 1
"""A worker that fails again after that is not revived: something here needs a person."""

STALL_FACTOR = 10
"""How many times longer than the slowest step so far a step may take before it counts as stalled."""

STALL_MIN_S = 5.0
"""Nothing shorter counts as stalled."""

log = structlog.get_logger()


@dataclass(slots=True)
class _Live:
    """An unfinished request and its reader. `request` is replaced when a restart queues it anew."""

    request: Request
    stream: TokenStream


class Engine:
    """Token ids in, token ids out. Owns scheduler, executor and all live requests.

    Touched by the event loop alone. Made by `Engine.open`, whose scope it lives in.

    Invariants: every submitted request is in `_live` until its stream was given a last output or
    has left; the scheduler's unfinished requests are exactly those of `_live`.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        *,
        info: WorkerInfo,
        wake: asyncio.Event,
        trace: Trace | None = None,
    ) -> None:
        self.config = config
        self.info = info
        self._executor = executor
        manager = make_manager(
            config.kv_reservation,
            info.num_blocks,
            info.block_size,
            prefix_cache=config.prefix_cache,
            max_request_tokens=info.max_model_len,
        )
        self._scheduler = Scheduler(
            manager,
            max_step_tokens=config.max_step_tokens,
            max_prefill_tokens=config.max_prefill_tokens,
            max_running=config.max_running,
            max_model_len=info.max_model_len,
            batching=find_batching(config.batching),
            whole_prompts=not config.chunked_prefill,
            policy=find_policy(config.policy)(manager.match_length),
            gate=open_gate(manager) if config.session_gate else None,
        )
        self._wake = wake
        """Set by what ends idleness: a new request, or the worker's death."""
        self._live: dict[str, _Live] = {}
        self._nobody_lives = asyncio.Event()
        self._nobody_lives.set()
        self._request_numbers = itertools.count(1)
        self._recorder = Recorder(
            find_nearest=self._scheduler.nearest, block_size=info.block_size, trace=trace
        )
        self._refusal: tuple[type[EngineDraining], str] | None = None
        """Why new requests are refused; None while they are taken."""
        self._trouble: str | None = None
        """Why the worker cannot work now; None while it can."""
        self._num_restarts = 0
        self._step_began_at: float | None = None
        self._step_ended_at: float | None = None
        self._asked_at: float | None = None
        """When the worker was asked for its memory, while it has not answered."""

    @classmethod
    @asynccontextmanager
    async def open(cls, config: EngineConfig, *, worker: str = DEFAULT_WORKER) -> AsyncIterator["Engine"]:
        """Load the worker and run the loop until the scope is left; open streams then end with an error.

        Args:
            worker: `module:function` of a `WorkerFactory`.

        Raises:
            ConfigError, CheckpointError: the options or the model file cannot be used.
            WorkerFailed: loading crashed or passed its deadline.
        """
        config = config.validated()
        find_policy(config.policy)  # refused before a model is loaded for nothing
        wake = asyncio.Event()
        executor = find_executor(config.executor)(config, worker=worker, on_failure=wake.set)
        raised: BaseException | None = None
        async with open_trace(config.trace) as trace:
            try:
                info = await executor.start()
                engine = cls(config, executor, info=info, wake=wake, trace=trace)
                async with asyncio.TaskGroup() as tasks:
                    background = [tasks.create_task(engine._run(), name="engine")]
                    background.append(tasks.create_task(engine._recorder.lag.run()))
                    if trace is not None:
                        background.append(tasks.create_task(trace.run()))
                    try:
                        yield engine
                    except BaseException as error:
                        raised = error  # raised below, outside the group, which would wrap it
                    for task in background:
                        task.cancel()
            finally:
                await executor.close()
        if raised is not None:
            raise raised

    def generate(
        self,
        request_id: str,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        namespace: bytes = b"",
        tenant: str = "",
        session_id: str = "",
    ) -> TokenStream:
        """Describe a generation; entering the returned scope submits it.

        Args:
            request_id: the caller's name for it, given back in each output; need not be unique.
            token_ids: the prompt, at least one id, each within the vocabulary.
            namespace: who may share KV with it, for example a tenant's salt.
            tenant, session_id: whose share it is counted in, and which of their conversations it goes on.

        Raises:
            RequestTooLong, EngineDraining: on entering the scope; nothing was queued.
        """
        return TokenStream(
            self,
            request_id,
            token_ids=token_ids,
            sampling=sampling,
            namespace=namespace,
            tenant=tenant,
            session_id=session_id,
        )

    async def embed(
        self, request_id: str, token_ids: Sequence[int], *, namespace: bytes = b""
    ) -> list[float]:
        """The mean of the model's final hidden states over all tokens. Cancelling it aborts.

        The same bits in any company and however the prompt is cut into steps.

        Args:
            token_ids, namespace: as for `generate`; nothing is taken from the prefix cache.

        Raises:
            RequestTooLong, EngineDraining: refused; nothing was queued.
            StepFailed: the request ended with an error, which the message tells.
        """
        num_tokens = len(token_ids)
        stream = TokenStream(
            self,
            request_id,
            token_ids=token_ids,
            sampling=SamplingParams(max_tokens=0, temperature=0.0),
            namespace=namespace,
            pools=True,
        )
        async with stream:
            output = await anext(stream)
        if output.error is not None:
            raise StepFailed(output.error)
        assert output.pooled, "a pooled request gives one output, the sum"
        return [value / num_tokens for value in memoryview(output.pooled).cast("d")]

    def submit(self, stream: TokenStream) -> None:
        """Queue a stream's request under an id of our own. Called by the stream."""
        if self._refusal is not None:
            kind, reason = self._refusal
            raise kind(reason)
        sampling = stream.sampling
        self._scheduler.check_admissible(len(stream.token_ids), sampling.max_tokens)
        token_ids = array("i", stream.token_ids)
        assert token_ids, "a request needs a prompt"
        assert are_below(token_ids, self.info.vocab_size), "not ids of this vocabulary"
        assert all(0 <= token_id < 1 << 31 for token_id in sampling.stop_token_ids)
        assert all(0 <= token_id < self.info.vocab_size for token_id, _ in sampling.logit_bias)
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed & ((1 << 63) - 1)
        request = Request(
            request_id=f"r{next(self._request_numbers)}",
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids),
            sampling=msgspec.structs.replace(sampling, seed=seed),
            namespace=cache_namespace(self.info.namespace, stream.namespace),
            tenant=stream.tenant,
            session_id=stream.session_id,
            pools=stream.pools,
        )
        now = monotonic()
        self._scheduler.advance(now)
        self._scheduler.add(request)
        self._live[request.request_id] = _Live(request, stream)
        stream.engine_id = request.request_id
        self._nobody_lives.clear()
        self._recorder.submitted(request, stream.request_id, at=now)
        self._wake.set()

    def abort(self, stream: TokenStream) -> None:
        """Drop a request, in a step or out of it; nothing happens if it has ended. Called by the stream."""
        if self._forget(stream.engine_id, FinishReason.ABORT):
            self._scheduler.abort(stream.engine_id)

    def finish(self, stream: TokenStream, num_tokens: int) -> None:
        """End a request with `stop` after `num_tokens` generated tokens. Called by the stream."""
        if self._forget(stream.engine_id, FinishReason.STOP):
            self._scheduler.finish(stream.engine_id, num_tokens)

    async def drain(self, deadline_s: float) -> None:
        """Refuse new requests, let running ones go on, and end with an error what is left at the deadline."""
        self._refuse("the engine is shutting down")
        with suppress(TimeoutError):
            await asyncio.wait_for(self._nobody_lives.wait(), deadline_s)
        self._end_all("the engine shut down before this request had ended")

    async def memory(self) -> WorkerMemory:
        """The worker's memory, read between two steps; zeros while there is no worker, or one is loading.

        A loading worker answers nobody: to ask it would be to wait with a step's deadline for a load.
        """
        if self._trouble is not None or self._executor.failure is not None:
            return WorkerMemory()
        self._asked_at = monotonic()
        try:
            return await self._executor.memory()
        except WorkerFailed:
            return WorkerMemory()
        finally:
            self._asked_at = None

    def health(self) -> EngineHealth:
        now = monotonic()
        reason = self._trouble or (None if self._executor.failure is None else str(self._executor.failure))
        if self._step_began_at is not None and now - self._step_began_at > self.config.step_deadline_s:
            reason = reason or f"a step has been running for {now - self._step_began_at:.1f} s"
        stats = self._scheduler.stats()
        return EngineHealth(
            alive=reason is None,
            reason=reason,
            stalled=self._stall(now),
            accepting=self._refusal is None,
            last_step_age_s=None if self._step_ended_at is None else now - self._step_ended_at,
            num_waiting=stats.num_waiting,
            num_running=stats.num_running,
            num_restarts=self._num_restarts,
        )

    def _stall(self, now: float) -> str | None:
        """Notice a frozen worker long before the deadline that ends it: by a step, or by its silence."""
        if self._step_began_at is not None:
            running_s = now - self._step_began_at
            # The first step has nothing to be compared with.
            usual_s = self._recorder.log.slowest_s or self.config.step_deadline_s
            if running_s > max(STALL_MIN_S, STALL_FACTOR * usual_s):
                return f"a step has been running for {running_s:.1f} s; {usual_s:.1f} s was the longest"
        elif self._asked_at is not None:
            silent_s = now - max(self._asked_at, self._step_ended_at or 0.0)
            if silent_s > STALL_MIN_S:
                return f"the idle worker has not answered for {silent_s:.1f} s"
        return None

    def stats(self) -> EngineStats:
        return self._recorder.snapshot(self._scheduler.stats(), num_restarts=self._num_restarts)

    def steps_after(self, step_id: int) -> tuple[StepStats, ...]:
        """The remembered steps with a higher id, oldest first: what a metrics page has not seen yet."""
        return self._recorder.log.after(step_id)

    def explain(self, request_id: str) -> tuple[Explanation, ...]:
        """Where the time of the requests with this name went, oldest first; 1,024 ended ones are kept.

        Args:
            request_id: the caller's name, as given to `generate`; what was never here gives nothing.
        """
        return self._recorder.explain(request_id, at=monotonic())

    def live_requests(self) -> tuple[Explanation, ...]:
        """The same of all unfinished requests, oldest first."""
        return self._recorder.live(at=monotonic())

    async def _run(self) -> None:
        """The loop. Its end, for whatever reason, ends every stream."""
        try:
            while self._executor.failure is None or await self._revive(self._executor.failure):
                began_at = monotonic()
                self._scheduler.advance(began_at)
                plan = self._scheduler.schedule()
                if plan is not None:
                    await self._step(plan, began_at=began_at)
                else:
                    self._recorder.idle()
                    await self._rest(self._scheduler.wakes_at)
            log.error("worker_given_up", error=self._trouble, num_restarts=self._num_restarts)
        finally:
            kind = EngineFailed if self._trouble else EngineDraining
            self._trouble = self._trouble or "the engine has ended"
            self._refuse(self._trouble, kind)
            self._end_all(self._trouble)

    async def _rest(self, wakes_at: float | None) -> None:
        """Wait for something to happen, or for the time at which the scheduler wants to be asked again."""
        self._wake.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(None if wakes_at is None else max(0.0, wakes_at - monotonic())):
                await self._wake.wait()

    async def _step(self, plan: StepPlan, *, began_at: float) -> None:
        """Have a plan computed, and deliver. A dead worker is left to the loop."""
        turn = self._recorder.begin(plan, began_at=began_at, scheduled_at=monotonic())
        for item in plan.items:
            self._live[item.request_id].stream.began()
        turn.submitted_at = self._step_began_at = monotonic()
        result: StepResult | None = None
        failure = ""
        try:
            result = await self._executor.execute(plan)
        except StepFailed as error:
            failure = str(error)
        except WorkerFailed:
            assert self._executor.failure is not None, "a failed executor says so"
            return
        finally:
            turn.computed_at = self._step_ended_at = monotonic()
            self._step_began_at = None
        self._scheduler.advance(turn.computed_at)
        if result is not None:
            took_s = turn.computed_at - turn.submitted_at
            outputs = self._scheduler.update(plan, result, took_s=took_s)
        else:
            log.error("step_failed", step_id=plan.step_id, num_requests=len(plan.items), error=failure)
            outputs = self._scheduler.fail(plan, failure)
        self._deliver(outputs)
        self._recorder.end(turn, result, outputs=outputs, scheduler=self._scheduler.stats(), at=monotonic())

    def _deliver(self, outputs: Iterable[TokenOutput]) -> None:
        """Give each stream its own. Outputs of requests that have left meanwhile are dropped."""
        for output in outputs:
            live = self._live.get(output.request_id)
            if live is None:
                continue
            live.stream.push(output)
            if output.finish_reason is not None:
                self._forget(output.request_id, output.finish_reason)

    def _forget(self, engine_id: str, reason: FinishReason) -> bool:
        """Take a request off the books; False if it was not on them."""
        if self._live.pop(engine_id, None) is None:
            return False
        self._recorder.ended(engine_id, reason, at=monotonic())
        if not self._live:
            self._nobody_lives.set()
        return True

    def _end_all(self, message: str) -> None:
        """End every stream with an error. The readers come first, should the scheduler be what broke."""
        ended = tuple(self._live)
        self._deliver(
            TokenOutput(
                request_id=engine_id,
                finish_reason=FinishReason.ERROR,
                num_cached_tokens=self._live[engine_id].request.num_cached_tokens or 0,
                error=message,
            )
            for engine_id in ended
        )
        for engine_id in ended:
            self._scheduler.abort(engine_id)

    def _refuse(self, reason: str, kind: type[EngineDraining] = EngineDraining) -> None:
        """Take no new requests from now on. The first reason stays."""
        self._refusal = self._refusal or (kind, reason)

    async def _revive(self, failure: WorkerFailed) -> bool:
        """Answer a worker's death: end who had KV in it, keep who had none, load it anew.

        Returns False if that was the last time.
        """
        self._trouble = str(failure)
        log.error("worker_failed", error=str(failure), num_restarts=self._num_restarts)
        unstarted = self._withdraw_unstarted()
        self._deliver(self._scheduler.fail_all(str(failure)))
        for request in unstarted:
            self._scheduler.add(request)
        if self._num_restarts == MAX_RESTARTS:
            return False
        self._num_restarts += 1
        try:
            info = await self._executor.restart()
        except EngineError as error:
            self._trouble = f"{error}, on the restart after: {failure}"
            return False
        assert (info.num_blocks, info.block_size) == (self.info.num_blocks, self.info.block_size)
        self.info = info
        self._trouble = None
        log.warning("worker_restarted", load_s=info.load_s)
        return True

    def _withdraw_unstarted(self) -> list[Request]:
        """Take out of the scheduler, as good as new, who was never admitted."""
        unstarted: list[Request] = []
        for live in self._live.values():
            request = live.request
            if request.status is RequestStatus.WAITING and request.num_preemptions == 0:
                self._scheduler.abort(request.request_id)
                live.request = replace(request, status=RequestStatus.WAITING, finish_reason=None)
                self._recorder.requeued(live.request)
                unstarted.append(live.request)
        return unstarted


def cache_namespace(worker: bytes, caller: bytes) -> bytes:
    """Who may share KV: worker's part (model, numerics) and caller's (tenant). No two pairs give the same."""
    return b"tidegate.kv.1" + struct.pack("<II", len(worker), len(caller)) + worker + caller
