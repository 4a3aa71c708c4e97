"""What it costs to have it: memory, the start, a busy neighbour, and the gateway's own CPU time."""

import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

from loadtest.plan import Plan
from tests.benchmarks.claims.serving import Server
from tests.benchmarks.cpu.contest import Contest, Contestant, Figures, Options, Work, loaded
from tests.benchmarks.cpu.peers import has_llama
from tests.benchmarks.cpu.plans import one_after_another, side_by_side
from tests.benchmarks.cpu.rows.speed import ANSWER, SHORT, STREAMS, TEXT, answer_speed
from tests.benchmarks.cpu.servers import (
    KV_BYTES_PER_TOKEN,
    family,
    llama_server,
    model_bytes,
    pss_bytes,
    tidegate,
    wait_until_quiet,
)
from tests.benchmarks.cpu.verdict import Goal, Series

MEGABYTE = 1e6
POOL_TOKENS = 4096
"""So few that the load fills every block of the pool: what is subtracted was there."""
SPEED_AFTER_S = (0, 10, 30)


def memory(options: Options) -> list[Work]:
    """After 48 requests, 16 at once, with a pool that they filled."""
    plan = side_by_side(3 * STREAMS, prompt_tokens=SHORT, answer_tokens=ANSWER)
    opened: list[tuple[str, AbstractContextManager[Server], bool]] = [
        (options.numerics[0], tidegate(options.numerics[0], tokens=POOL_TOKENS), True)
    ]
    if has_llama():
        opened += [
            (f"llama.cpp {form}", llama_server(form, slots=8, context=POOL_TOKENS // 8), False)
            for form in options.forms("Q4_0", "Q8_0")
        ]
    players = [
        Contestant(who, partial(memory_figures, scope, plan, ours=ours), ours) for who, scope, ours in opened
    ]
    contest = Contest(players, options).play("memory", rounds=1, warm_up=False)
    return [
        contest.work(
            "memory: PSS less KV pool, less the smaller of model file and packed weights",
            "rest_mb",
            unit="MB",
            better="less",
            goals=(Goal(bound=450.0),),
        ),
        contest.work("memory: PSS in all", "pss_mb", unit="MB", better="less"),
    ]


def memory_figures(scope: AbstractContextManager[Server], plan: Plan, *, ours: bool) -> Figures:
    with scope as server:
        loaded(plan, server, *TEXT, "--concurrency", str(STREAMS))
        wait_until_quiet(server.pid)
        pss = pss_bytes(family(server.pid))
        weights, parts = model_bytes(), {}
        if ours:
            metrics = server.metrics()
            weights = min(weights, int(metrics["tidegate_packed_weight_bytes"]))
            parts = {
                f"process {number} MB": pss_bytes([process]) / MEGABYTE
                for number, process in enumerate(family(server.pid))
            }
    pool = POOL_TOKENS * KV_BYTES_PER_TOKEN
    return {"rest_mb": (pss - pool - weights) / MEGABYTE, "pss_mb": pss / MEGABYTE, **parts}


def start(options: Options) -> list[Work]:
    """From the command to the first token, the model cached; then what one stream gets as time goes on."""
    scopes: list[tuple[str, Callable[[], AbstractContextManager[Server]], bool]] = [
        (numerics, partial(tidegate, numerics, tokens=POOL_TOKENS), True) for numerics in options.numerics
    ]
    if has_llama():
        scopes += [
            (f"llama.cpp {form}", partial(llama_server, form, slots=8, context=1024), False)
            for form in options.forms("Q4_0", "Q8_0")
        ]
    players = [Contestant(who, partial(start_figures, scope), ours) for who, scope, ours in scopes]
    contest = Contest(players, options).play("start", rounds=options.rounds)
    name = "start to the first token"
    works = [contest.work(name, "first_token_s", unit="s", better="less", goals=(Goal(bound=3.0),))]
    with tidegate(options.numerics[0], tokens=POOL_TOKENS) as server:
        speeds = tuple(speed_after(server, SPEED_AFTER_S))
    told = ", ".join(f"{after} s: {speed:.1f}" for after, speed in zip(SPEED_AFTER_S, speeds, strict=True))
    options.say(f"tok/s of one stream after the start: {told}")
    rise = Series(name=options.numerics[0], values=speeds)
    note = f"in the order of the values, after {SPEED_AFTER_S} s"
    return [*works, Work("one stream's tok/s as the start passes", "tok/s", "more", (rise,), notes=(note,))]


def start_figures(scope: Callable[[], AbstractContextManager[Server]]) -> Figures:
    began_at = time.monotonic()
    with scope() as server:
        generate(server, prompt="Once upon a time", num_tokens=1)
        return {"first_token_s": time.monotonic() - began_at}


def speed_after(server: Server, moments_s: tuple[int, ...]) -> Iterator[float]:
    began_at = time.monotonic()
    for moment_s in moments_s:
        time.sleep(max(0.0, began_at + moment_s - time.monotonic()))
        sent_at = time.monotonic()
        generate(server, prompt=f"{moment_s} times upon a time", num_tokens=ANSWER)
        yield ANSWER / (time.monotonic() - sent_at)


def generate(server: Server, *, prompt: str, num_tokens: int) -> None:
    body = {"model": model_of(server), "prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True}
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.read()


def model_of(server: Server) -> str:
    with urllib.request.urlopen(f"{server.url}/v1/models", timeout=30) as answer:
        name: str = json.loads(answer.read())["data"][0]["id"]
    return name


def contention(options: Options) -> list[Work]:
    """One stream alone and beside a process that never sleeps, in turn; how many times slower."""
    plan = one_after_another(2, prompt_tokens=SHORT, answer_tokens=ANSWER)
    scopes: list[tuple[str, AbstractContextManager[Server], bool]] = [
        (options.numerics[0], tidegate(options.numerics[0], tokens=POOL_TOKENS), True)
    ]
    if has_llama():
        scopes += [
            (f"llama.cpp {form}", llama_server(form, slots=1, context=1024), False)
            for form in options.forms("Q4_0")
        ]

    def figures(server: Server) -> Figures:
        alone = answer_speed(loaded(plan, server, *TEXT))["tok/s"]
        with busy_process():
            beside = answer_speed(loaded(plan, server, *TEXT))["tok/s"]
        return {"slow_down": alone / beside, "alone_tok_s": alone, "beside_tok_s": beside}

    works = []
    for who, scope, ours in scopes:
        with scope as server:
            wait_until_quiet(server.pid)
            contest = Contest([Contestant(who, partial(figures, server), ours)], options)
            works.append(
                contest.play("contention", rounds=min(options.rounds, 2)).work(
                    "slow-down beside one busy process",
                    "slow_down",
                    unit="times",
                    better="less",
                    goals=(Goal(bound=2.5),),
                )
            )
    first, *others = works
    peers = tuple(series for work in others for series in work.peers)
    return [Work(first.name, first.unit, first.better, first.ours, peers, first.goals)]


@contextmanager
def busy_process() -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            yield
        finally:
            process.kill()


def gateway(options: Options) -> list[Work]:
    """The gateway alone, without a model; and its loop's lateness while the model answers 16 streams."""
    works = []
    for streams, tokens in ((256, 400), (2000, 60)):
        played = [gateway_cost_us(streams=streams, tokens=tokens) for _ in range(options.rounds)]
        options.say(f"gateway, {streams} streams: {played} us of CPU a token")
        series = Series(name="gateway", values=tuple(played))
        name = f"gateway CPU per streamed token, {streams} SSE streams"
        works.append(Work(name, "us", "less", (series,), goals=(Goal(bound=15.0),)))
    plan = side_by_side(2 * STREAMS, prompt_tokens=SHORT, answer_tokens=ANSWER)
    with tidegate(options.numerics[0], tokens=POOL_TOKENS) as server:
        before = server.metrics()
        loaded(plan, server, *TEXT, "--concurrency", str(STREAMS))
        lag_s = lag_p99_s(before, server.metrics())
    options.say(f"loop lag p99 while the model runs: at most {1e3 * lag_s:.3g} ms")
    lag = Series(name=options.numerics[0], values=(1e3 * lag_s,))
    note = "the upper bound of the histogram's bucket"
    return [
        *works,
        Work("loop lag p99, 16 streams", "ms", "less", (lag,), goals=(Goal(bound=5.0),), notes=(note,)),
    ]


def gateway_cost_us(*, streams: int, tokens: int) -> float:
    told = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.bench_gateway_cpu", "--streams", str(streams)]
        + ["--tokens", str(tokens)],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    found = re.search(r"([\d.]+) us of CPU per token", told.stdout)
    assert found, told.stdout
    return float(found[1])


def lag_p99_s(before: dict[str, float], after: dict[str, float]) -> float:
    """The smallest bound of the histogram that 99 % of the new samples lie under."""
    counts = {
        float(found[1].replace("+Inf", "inf")): value - before.get(name, 0.0)
        for name, value in after.items()
        if (found := re.fullmatch(r'tidegate_loop_lag_seconds_bucket\{le="(.+)"\}', name))
    }
    total = max(counts.values())
    return min(bound for bound, count in counts.items() if count >= 0.99 * total)
