"""Short words for engine tests: open one over a fake worker, generate, look whether all blocks are back."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from core import Engine, EngineConfig, FinishReason, SamplingParams, TokenOutput
from core.config import ExecutorKind
from tests.fakes.kv_worker import generate_alone

FAKE = "tests.fakes.kv_worker:load_worker"


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0)


def config(
    checkpoint: str = "fake:", *, executor: ExecutorKind = "thread", **options: float | str
) -> EngineConfig:
    sizes = {
        "block_size": 4,
        "num_blocks": 64,
        "max_step_tokens": 64,
        "max_prefill_tokens": 32,
        "max_running": 8,
    }
    return EngineConfig(checkpoint=checkpoint, executor=executor, **{**sizes, **options})  # type: ignore[arg-type]


@asynccontextmanager
async def opened(options: EngineConfig, *, worker: str = FAKE) -> AsyncIterator[Engine]:
    """An engine whose books are checked whenever the test is through with it."""
    async with Engine.open(options, worker=worker) as engine:
        yield engine
        engine._scheduler.check()


async def collect(
    engine: Engine,
    prompt: Sequence[int],
    sampling: SamplingParams,
    *,
    request_id: str = "same name",
    namespace: bytes = b"",
) -> list[TokenOutput]:
    async with engine.generate(request_id, prompt, sampling, namespace=namespace) as stream:
        return [output async for output in stream]


def ids(outputs: Sequence[TokenOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


async def assert_sound(engine: Engine) -> None:
    """The next request gets the right answer, and afterwards nobody holds a block."""
    outputs = await collect(engine, (9, 8, 7), greedy(3))
    assert ids(outputs) == generate_alone((9, 8, 7), greedy(3))
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    engine._scheduler.check()
    stats = engine._scheduler.stats()
    assert (stats.num_waiting, stats.num_running, stats.num_held_blocks) == (0, 0, 0)


async def wait_for(condition: Callable[[], bool], *, deadline_s: float = 20.0) -> None:
    """Let the loop run until something is so; fail if it is not so in time."""
    async with asyncio.timeout(deadline_s):
        while not condition():  # noqa: ASYNC110  (whatever changes it knows of no event)
            await asyncio.sleep(0.005)
