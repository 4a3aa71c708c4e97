"""How long the loop spends on a step: python -m tests.benchmarks.bench_scheduler

Decoding only, over contexts of 1,000 tokens; and the tree on long prompts. Milliseconds of the loop's
own CPU time, so that what else the machine does is left out.
"""

import gc
import statistics
import time
from array import array

from core.cache.manager import KVCacheManager
from core.cache.radix_tree import RadixTree
from core.engine.recorder import Recorder
from core.request import Request, RequestStatus, SamplingParams
from core.scheduler.plan import PlannedTokens, SampledTokens, StepPlan, StepResult
from core.scheduler.scheduler import Scheduler
from core.scheduler.siblings import Siblings

BLOCK_SIZE = 16
CONTEXT_TOKENS = 1000
NUM_STEPS = 400


def main() -> None:
    for num_running in (16, 64, 256):
        median_ms, p99_ms = decode_step_ms(num_running)
        print(f"schedule + update, {num_running:3d} running: median {median_ms:.3f} ms, p99 {p99_ms:.3f} ms")
        print(f"recording it, {num_running:3d} running: median {recording_ms(num_running):.3f} ms")
    for num_tokens in (1000, 10_000, 100_000):
        print(f"match {num_tokens:6d} cached tokens: median {match_ms(num_tokens):.3f} ms")
    print(f"evict one of 10,000 leaves: median {evict_ms(10_000):.4f} ms")
    print(f"find the likest of 10,000 sisters: median {nearest_ms(10_000):.4f} ms")
    print(f"find a leader among 256 that begin alike: median {leader_ms(256):.3f} ms")


def decode_step_ms(num_running: int) -> tuple[float, float]:
    """Median and 99th percentile of schedule() + update() while everybody decodes."""
    num_blocks = num_running * (CONTEXT_TOKENS + NUM_STEPS + 200) // BLOCK_SIZE
    scheduler = Scheduler(
        KVCacheManager(num_blocks, BLOCK_SIZE),
        max_step_tokens=num_running * CONTEXT_TOKENS,
        max_prefill_tokens=CONTEXT_TOKENS,
        max_running=num_running,
        max_model_len=4096,
    )
    sampling = SamplingParams(max_tokens=NUM_STEPS + 100, seed=0, stop_token_ids=(1, 2))
    for n in range(num_running):
        # Prompt lengths differ, so that blocks fill up in different steps, as they do in service.
        prompt_ids = array("i", [n + 3] * (CONTEXT_TOKENS - n % BLOCK_SIZE))
        request = Request(
            request_id=f"request-{n}",
            token_ids=prompt_ids,
            num_prompt_tokens=len(prompt_ids),
            sampling=sampling,
        )
        scheduler.add(request)
    _step_s(scheduler)
    gc.collect()
    times_s = sorted(_step_s(scheduler) for _ in range(NUM_STEPS))
    return statistics.median(times_s) * 1e3, times_s[int(len(times_s) * 0.99)] * 1e3


def recording_ms(num_running: int) -> float:
    """What a step's numbers and its requests' times cost on top, without a trace."""
    recorder = Recorder(find_nearest=lambda _request: (0, None), block_size=BLOCK_SIZE)
    sampling = SamplingParams(max_tokens=NUM_STEPS, seed=0)
    block_table = array("i", range((CONTEXT_TOKENS + NUM_STEPS) // BLOCK_SIZE + 1))
    requests = [
        Request(
            request_id=f"r{n}",
            token_ids=array("i", [3] * CONTEXT_TOKENS),
            num_prompt_tokens=CONTEXT_TOKENS,
            sampling=sampling,
            block_table=block_table,
        )
        for n in range(num_running)
    ]
    for request in requests:
        recorder.submitted(request, request.request_id, at=0.0)
    numbers = Scheduler(
        KVCacheManager(8, BLOCK_SIZE),
        max_step_tokens=8,
        max_prefill_tokens=8,
        max_running=8,
        max_model_len=8,
    ).stats()
    times_s = []
    for step_id in range(1, NUM_STEPS):
        first = CONTEXT_TOKENS + step_id
        items = tuple(
            PlannedTokens(request_id=r.request_id, token_ids=(7,), first_position=first, block_table=b"")
            for r in requests
        )
        plan = StepPlan(step_id=step_id, items=items)
        result = StepResult(step_id=step_id, samples=())
        start_s = time.thread_time()
        turn = recorder.begin(plan, began_at=step_id, scheduled_at=step_id)
        recorder.end(turn, result, outputs=(), scheduler=numbers, at=step_id + 1.0)
        times_s.append(time.thread_time() - start_s)
    return statistics.median(times_s) * 1e3


def match_ms(num_tokens: int) -> float:
    tree = RadixTree(BLOCK_SIZE)
    token_ids = array("i", (n * 7919 % 50_000 for n in range(num_tokens)))
    num_blocks = num_tokens // BLOCK_SIZE
    tree.insert(b"", token_ids[: num_blocks * BLOCK_SIZE], range(num_blocks))
    times_s = []
    for _ in range(50):
        start_s = time.thread_time()
        tree.match(b"", token_ids)
        times_s.append(time.thread_time() - start_s)
    return statistics.median(times_s) * 1e3


def evict_ms(num_leaves: int) -> float:
    tree = RadixTree(BLOCK_SIZE)
    for n in range(num_leaves):
        tree.insert(b"", array("i", [n] * BLOCK_SIZE), [n])
    times_s = []
    for _ in range(num_leaves // 2):
        start_s = time.thread_time()
        tree.evict(1)
        times_s.append(time.thread_time() - start_s)
    return statistics.median(times_s) * 1e3


def nearest_ms(num_sisters: int) -> float:
    """Where a prompt parts from all that is cached inside a block: whom to copy from."""
    tree = RadixTree(BLOCK_SIZE)
    for n in range(num_sisters):
        tree.insert(b"", array("i", [1] * (BLOCK_SIZE - 2) + [n, n]), [n])
    times_s = []
    for n in range(200):
        wanted = array("i", [1] * (BLOCK_SIZE - 2) + [n * 37 % num_sisters, -1])
        node, _, _ = tree.match(b"", wanted)
        start_s = time.thread_time()
        _, num_common = tree.nearest(node, wanted)
        times_s.append(time.thread_time() - start_s)
        assert num_common == BLOCK_SIZE - 1
    return statistics.median(times_s) * 1e3


def leader_ms(num_leaders: int) -> float:
    """The head of the queue against all that compute the ends of prompts with the same 4,000 first tokens."""
    siblings = Siblings(BLOCK_SIZE)
    sampling = SamplingParams(max_tokens=1, seed=0)
    requests = [
        Request(
            request_id=str(n),
            token_ids=array("i", [1] * 4000 + [n] * 100),
            num_prompt_tokens=4100,
            sampling=sampling,
            num_computed_tokens=4000,
        )
        for n in range(num_leaders + 1)
    ]
    for request in requests[1:]:
        request.status = RequestStatus.RUNNING
        siblings.lead(request)
    times_s = []
    for _ in range(50):
        start_s = time.thread_time()
        siblings.find_leader(requests[0])
        times_s.append(time.thread_time() - start_s)
    return statistics.median(times_s) * 1e3


def _step_s(scheduler: Scheduler) -> float:
    """Seconds the loop spends on one step; the model's share is left out."""
    start_s = time.thread_time()
    plan = scheduler.schedule()
    scheduled_s = time.thread_time()
    assert plan is not None
    result = _result_of(plan)
    update_s = time.thread_time()
    scheduler.update(plan, result)
    return time.thread_time() - update_s + scheduled_s - start_s


def _result_of(plan: StepPlan) -> StepResult:
    samples = (SampledTokens(request_id=item.request_id, token_ids=(7,)) for item in plan.items)
    return StepResult(step_id=plan.step_id, samples=tuple(samples))


if __name__ == "__main__":
    main()
