"""The next turn of a very long session: what holds up the event loop, and what grows with the history.

A tiny random model with the default model's tokenizer, so that the gateway's part is what is seen. The
client is a process of its own. The loop's lateness is sampled every millisecond while the next turn is
taken in: parsed, rendered, encoded, matched and answered.
"""

import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvloop

from core import EngineConfig, read_checkpoint_metadata
from gateway.backends.local import open_local_backend
from gateway.lifespan import SWITCH_INTERVAL_S
from gateway.telemetry.logging import configure_logging
from tests.benchmarks.claims.random_model import default_model, write_random_model
from tests.benchmarks.claims.row import Curve, Finding, Row
from tests.fakes.tiny_llama import TinyShape
from tests.gateway.serving import serving
from tokenization import ChatTemplate, tokenizer_from_gguf
from tokenization.tokenizer import SegmentedTokenizer

HISTORIES = (10_000, 100_000)
"""Tokens before the turn that is measured."""
NEW_WORDS = 300
REPEATS = 5
MOST_STALL_S = 0.005
SHAPE = TinyShape(num_layers=1, num_heads=1, num_kv_heads=1, context=1 << 18)
"""So small that the gateway's part is what is seen."""
WORDS = ("time", "day", "way", "work", "year", "part", "place", "case", "point", "group", "world", "water")


def measure() -> Finding:
    with tempfile.TemporaryDirectory() as folder:
        model = write_random_model(Path(folder) / "tiny.gguf", SHAPE)
        stalls = {tokens: uvloop.run(worst_stall(model, num_tokens=tokens)) for tokens in HISTORIES}
    costs = {tokens: turn_cost(tokens) for tokens in HISTORIES}
    longest, shortest = HISTORIES[-1], HISTORIES[0]
    rows = (
        Row(
            claim="the next turn of a long session does not stall the loop",
            condition=f"{longest} tokens of history, tiny model, median of {REPEATS} turns",
            unit="ms, longest stall",
            baseline=f"{shortest} tokens",
            baseline_value=stalls[shortest] * 1e3,
            ours=f"{longest} tokens",
            our_value=stalls[longest] * 1e3,
            goal="at most 5 ms",
            holds=stalls[longest] <= MOST_STALL_S,
        ),
        Row(
            claim="a turn is encoded by its new text, not its history",
            condition=f"{NEW_WORDS} new words after {longest} tokens",
            unit="characters encoded",
            baseline="whole prompt",
            baseline_value=costs[longest]["prompt_chars"],
            ours="encoded",
            our_value=costs[longest]["encoded_chars"],
            ratio=costs[longest]["prompt_chars"] / costs[longest]["encoded_chars"],
            goal="the same for every history",
            holds=costs[longest]["encoded_chars"] <= 1.2 * costs[shortest]["encoded_chars"],
        ),
    )
    curve = Curve(
        panel="the loop's longest stall in a turn",
        x_label="tokens of history",
        y_label="ms",
        label="parse, render, encode, match, answer",
        points=tuple((float(tokens), stall * 1e3) for tokens, stall in stalls.items()),
    )
    return Finding(rows=rows, curves=(curve,), figures={"stalls_s": stalls, "costs": costs})


def conversation(num_tokens: int) -> list[dict[str, str]]:
    """Alternating messages of some 500 words each, one token a word."""
    rng = random.Random(num_tokens)
    return [
        {"role": ("user", "assistant")[number % 2], "content": " ".join(rng.choices(WORDS, k=500))}
        for number in range(num_tokens // 500 | 1)
    ]


async def worst_stall(model: Path, *, num_tokens: int) -> float:
    """Median over some turns of the longest time the loop was late during one, in seconds."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)  # as the server does for itself
    configure_logging(level="error", log_format="json")
    config = EngineConfig(
        checkpoint=str(model), max_step_tokens=4096, max_prefill_tokens=4096, kv_bytes=256 << 20
    )
    turns = turn_bodies(num_tokens)
    stalls = []
    async with (
        serving(open_local_backend, engine=config, model_id="tiny", max_body_bytes=16 << 20) as server,
        client(server.url) as ask,
    ):
        await ask(turns[0])
        for body in turns[1:]:
            lateness: list[float] = []
            sampler = asyncio.create_task(sample(lateness))
            usage = await ask(body)
            sampler.cancel()
            stalls.append(max(lateness))
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            if cached < num_tokens * 0.9:
                raise SystemExit(f"a turn found only {cached} tokens of {num_tokens}")
    return statistics.median(stalls)


def turn_bodies(num_tokens: int) -> list[bytes]:
    """The request bodies of a session's first turn and those that are measured."""
    history = conversation(num_tokens)
    bodies = []
    for turn in range(REPEATS + 1):
        bodies.append(json.dumps({"model": "tiny", "messages": history, "max_tokens": 4}).encode())
        history += [
            {"role": "assistant", "content": f"answer {turn}"},
            {"role": "user", "content": " ".join(random.Random(turn).choices(WORDS, k=NEW_WORDS))},
        ]
    return bodies


async def sample(lateness: list[float]) -> None:
    while True:
        due = time.monotonic() + 0.001
        await asyncio.sleep(0.001)
        lateness.append(max(0.0, time.monotonic() - due))


@asynccontextmanager
async def client(url: str) -> AsyncIterator[Callable[[bytes], Awaitable[dict[str, Any]]]]:
    """A client process that lives as long as the scope; asking it gives the answer's usage."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", __name__, url,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert child.stdin is not None
    assert child.stdout is not None
    to_child, from_child = child.stdin, child.stdout

    async def ask(body: bytes) -> dict[str, Any]:
        to_child.write(body + b"\n")
        usage: dict[str, Any] = json.loads(await from_child.readline())
        return usage

    try:
        yield ask
    finally:
        to_child.close()
        await child.wait()


def post_each(url: str) -> None:
    """The client process: post each line of standard input, print the answers' usage."""
    for body in sys.stdin.buffer:
        request = urllib.request.Request(
            f"{url}/v1/chat/completions", data=body, headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=600) as answer:
            print(json.dumps(json.loads(answer.read())["usage"]), flush=True)


def turn_cost(num_tokens: int) -> dict[str, float]:
    """What one more turn costs in rendering and encoding, after the turn before it was encoded."""
    metadata = read_checkpoint_metadata(str(default_model()))
    tokenizer = tokenizer_from_gguf(metadata)
    assert isinstance(tokenizer, SegmentedTokenizer)
    template = ChatTemplate.from_gguf(metadata, tokenizer)
    history = conversation(num_tokens)
    tokenizer.encode_rendered(template.render(history), scope="t")
    before = tokenizer.memory.num_encoded_chars
    new = " ".join(random.Random(0).choices(WORDS, k=NEW_WORDS))
    history += [{"role": "assistant", "content": "an answer"}, {"role": "user", "content": new}]
    began = time.thread_time()
    rendered = template.render(history)
    rendered_at = time.thread_time()
    tokenizer.encode_rendered(rendered, scope="t")
    encoded_at = time.thread_time()
    return {
        "prompt_chars": len(rendered.text),
        "encoded_chars": tokenizer.memory.num_encoded_chars - before,
        "render_s": rendered_at - began,
        "encode_s": encoded_at - rendered_at,
    }


if __name__ == "__main__":
    post_each(sys.argv[1])
