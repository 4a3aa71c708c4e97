"""Thread or process: event-loop lag and inter-token gaps of both executors under the same streams.

    python -m tests.benchmarks.bench_executors --model MODEL.gguf --streams 16 --max-tokens 64

Each run has a process of its own, so that neither inherits the other's torch, heap or threads; runs
alternate, and the table shows the median of each figure over the repeats. The lag is how late a
1 ms sleep wakes up on the engine's loop. `--loop-work-us` stands for what a gateway does with each
output (detokenise, encode, write): without it the loop would have nothing to be late for.
"""

import argparse
import asyncio
import json
import random
import resource
import statistics
import subprocess
import sys
from collections.abc import Sequence
from time import perf_counter
from typing import get_args

import uvloop

from core import Engine, EngineConfig, SamplingParams
from core.config import ExecutorKind
from core.engine.executor import DEFAULT_WORKER
from gateway.model_store import DEFAULT_MODEL, pull

TICK_S = 0.001
FIGURES = {
    "lag_p50_ms": "loop lag p50 (ms)",
    "lag_p99_ms": "loop lag p99 (ms)",
    "lag_max_ms": "loop lag max (ms)",
    "itl_p50_ms": "inter-token p50 (ms)",
    "itl_p99_ms": "inter-token p99 (ms)",
    "ttft_p50_ms": "first token p50 (ms)",
    "output_tok_s": "output tokens per second",
    "step_p50_ms": "decode step p50 (ms)",
    "own_p50_ms": "executor overhead p50 (ms a step)",
    "rss_mib": "gateway process peak RSS (MiB)",
}


def main() -> None:
    options = parse_options()
    if options.only:
        print(json.dumps(uvloop.run(measure(options, options.only))))
        return
    kinds: tuple[ExecutorKind, ...] = get_args(ExecutorKind)
    runs: dict[ExecutorKind, list[dict[str, float]]] = {kind: [] for kind in kinds}
    for number in range(options.repeats):
        for kind in kinds if number % 2 == 0 else reversed(kinds):
            runs[kind].append(measure_in_a_process(kind))
    print(
        f"{options.streams} streams, {options.prompt_tokens} prompt tokens, {options.max_tokens} out, ",
        end="",
    )
    print(f"{options.loop_work_us} us of loop work an output, median of {options.repeats} runs")
    print(f"{'':36}" + "".join(f"{kind:>12}" for kind in kinds) + f"{kinds[0] + '/' + kinds[1]:>16}")
    for figure, title in FIGURES.items():
        medians = [statistics.median(run[figure] for run in runs[kind]) for kind in kinds]
        ratio = f"{medians[0] / medians[1]:16.2f}" if medians[1] else f"{'-':>16}"
        print(f"{title:36}" + "".join(f"{median:12.2f}" for median in medians) + ratio)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--model", default="", help="path of a model file; the default model where none is named"
    )
    parser.add_argument("--worker", default=DEFAULT_WORKER, help="module:function of the worker's factory")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2, help="how often every stream asks")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--loop-work-us", type=int, default=50, help="busy time on the loop for each output")
    parser.add_argument(
        "--switch-interval-us", type=int, default=0, help="sys.setswitchinterval; 0: Python's own"
    )
    parser.add_argument("--num-threads", type=int, default=0, help="compute threads; 0: the engine decides")
    parser.add_argument("--only", choices=get_args(ExecutorKind), help="one run of one kind, printed as JSON")
    return parser.parse_args()


def measure_in_a_process(kind: ExecutorKind) -> dict[str, float]:
    command = [sys.executable, "-m", "tests.benchmarks.bench_executors", *sys.argv[1:], "--only", kind]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    figures: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    return figures


def silent(_doing: str, _done: int, _total: int) -> None:
    """The last line on stdout is the result."""


async def measure(options: argparse.Namespace, kind: ExecutorKind) -> dict[str, float]:
    """Run all streams on a warm engine and look at the loop meanwhile."""
    if options.switch_interval_us:
        sys.setswitchinterval(options.switch_interval_us / 1e6)
    config = EngineConfig(
        checkpoint=options.model or str(pull(DEFAULT_MODEL, report=silent)),
        executor=kind,
        num_threads=options.num_threads,
    )
    async with Engine.open(config, worker=options.worker) as engine:
        rng = random.Random(1)
        await stream_all(engine, options, rng, rounds=1)  # compiles and warms
        first_step, tokens_before = engine.steps_after(0)[-1].step_id, engine.stats().num_output_tokens
        lags: list[float] = []
        began_at = perf_counter()
        async with asyncio.TaskGroup() as tasks:
            ticker = tasks.create_task(watch_lag(lags))
            firsts, gaps = await stream_all(engine, options, rng, rounds=options.rounds)
            ticker.cancel()
        took_s = perf_counter() - began_at
        steps = engine.steps_after(first_step)
        decode_steps = [step for step in steps if not step.num_prefill_tokens]
        own = [step.execute_s - step.build_s - step.forward_s - step.sample_s for step in steps]
        return {
            "lag_p50_ms": percentile(lags, 50) * 1e3,
            "lag_p99_ms": percentile(lags, 99) * 1e3,
            "lag_max_ms": max(lags) * 1e3,
            "itl_p50_ms": percentile(gaps, 50) * 1e3,
            "itl_p99_ms": percentile(gaps, 99) * 1e3,
            "ttft_p50_ms": percentile(firsts, 50) * 1e3,
            "output_tok_s": (engine.stats().num_output_tokens - tokens_before) / took_s,
            "step_p50_ms": percentile([step.execute_s for step in decode_steps], 50) * 1e3,
            "own_p50_ms": percentile(own, 50) * 1e3,
            "rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }


async def stream_all(
    engine: Engine, options: argparse.Namespace, rng: random.Random, *, rounds: int
) -> tuple[list[float], list[float]]:
    """Every stream asks `rounds` times, one request after the other. Returns first-token times and gaps."""
    firsts: list[float] = []
    gaps: list[float] = []

    async def ask_again_and_again() -> None:
        for _ in range(rounds):
            prompt = [rng.randrange(engine.info.vocab_size) for _ in range(options.prompt_tokens)]
            sampling = SamplingParams(max_tokens=options.max_tokens, temperature=0.0)
            at = perf_counter()
            async with engine.generate("bench", prompt, sampling) as stream:
                is_first = True
                async for _output in stream:
                    now = perf_counter()
                    (firsts if is_first else gaps).append(now - at)
                    at, is_first = now, False
                    busy(options.loop_work_us / 1e6)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(options.streams):
            tasks.create_task(ask_again_and_again())
    return firsts, gaps


async def watch_lag(lags: list[float]) -> None:
    """Note how late each sleep of a tick wakes up, until cancelled."""
    while True:
        began_at = perf_counter()
        await asyncio.sleep(TICK_S)
        lags.append(perf_counter() - began_at - TICK_S)


def busy(seconds: float) -> None:
    """Hold the GIL in Python code, as a gateway's own work does."""
    until = perf_counter() + seconds
    while perf_counter() < until:
        pass


def percentile(values: Sequence[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1] if len(values) > 1 else 0.0


if __name__ == "__main__":
    main()
