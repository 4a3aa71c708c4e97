"""Where the time and memory of one agent session go while it grows past 32,000 tokens.

Random weights with the default model's widths and four of its thirty layers, so that the whole growth
takes a minute; the shares of attention and KV are those of a model so deep.
"""

import json
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from tests.benchmarks.claims.loop_stalls import conversation
from tests.benchmarks.claims.random_model import write_random_model
from tests.benchmarks.claims.row import Curve, Finding, Row
from tests.benchmarks.claims.serving import Server, serving
from tests.fakes.tiny_llama import TinyShape

SHAPE = TinyShape(
    width=576, hidden_width=1536, num_layers=4, num_heads=9, num_kv_heads=3, head_dim=64, context=1 << 16,
    linear_type="Q4_1", embedding_type="Q8_0",
)  # fmt: skip
TURN_TOKENS = 4096
NUM_TURNS = 9
ANSWER_TOKENS = 16
BYTES_PER_TOKEN = 2 * SHAPE.num_layers * SHAPE.num_kv_heads * SHAPE.head_dim * 4
PARTS = ("schedule", "build", "forward", "sample", "transfer", "deliver")


def measure() -> Finding:
    with tempfile.TemporaryDirectory() as folder:
        model = write_random_model(Path(folder) / "growing.gguf", SHAPE)
        kv_bytes = BYTES_PER_TOKEN * (NUM_TURNS + 2) * TURN_TOKENS
        with serving("--kv-bytes", str(kv_bytes), "--model-id", "growing", model=str(model)) as server:
            turns = grow(server)
            memory = {
                name.partition('"')[2].rpartition('"')[0]: value
                for name, value in server.metrics().items()
                if name.startswith("tidegate_worker_memory_bytes")
            }
            weights = server.metrics()["tidegate_packed_weight_bytes"]
    first, last = turns[0], turns[-1]
    condition = f"turns of {TURN_TOKENS} tokens; {SHAPE.num_layers} random layers of the default's widths"
    rows = [
        row(condition, "forward", "ms per new token", first, last),
        row(condition, "schedule", "ms a turn on the loop", first, last),
        row(condition, "gateway", "ms a turn: network, JSON, render, encode, detokenise", first, last),
        Row(
            claim="where a growing session's memory goes",
            condition=condition,
            unit="MB",
            baseline="weights",
            baseline_value=weights / 1e6,
            ours=f"KV of {last['tokens']:.0f} tokens",
            our_value=last["kv_bytes"] / 1e6,
        ),
    ]
    curves = [
        Curve(
            panel="a session's turn as it grows",
            x_label="tokens in the session",
            y_label="s a turn",
            label=part,
            points=tuple((turn["tokens"], turn[part]) for turn in turns),
        )
        for part in ("forward", "gateway", "schedule")
    ]
    return Finding(rows=tuple(rows), curves=tuple(curves), figures={"turns": turns, "worker_memory": memory})


def row(condition: str, part: str, unit: str, first: dict[str, float], last: dict[str, float]) -> Row:
    divisor = TURN_TOKENS / 1e3 if part == "forward" else 1e-3
    return Row(
        claim=f"where a growing session's time goes: {part}",
        condition=condition,
        unit=unit,
        baseline=f"turn 1, {first['tokens']:.0f} tokens",
        baseline_value=first[part] / divisor,
        ours=f"turn {NUM_TURNS}, {last['tokens']:.0f} tokens",
        our_value=last[part] / divisor,
    )


def grow(server: Server) -> list[dict[str, float]]:
    """One session, turn after turn; where the time of each went."""
    history: list[dict[str, str]] = []
    words = conversation(NUM_TURNS * TURN_TOKENS)
    per_turn = TURN_TOKENS // 500
    turns = []
    for number in range(NUM_TURNS):
        text = " ".join(message["content"] for message in words[number * per_turn : (number + 1) * per_turn])
        history.append({"role": "user", "content": text})
        before = parts(server)
        began_at = time.monotonic()
        answer = ask(server, history)
        e2e_s = time.monotonic() - began_at
        spent = {part: value - before[part] for part, value in parts(server).items()}
        usage = answer["usage"]
        history.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        metrics = server.metrics()
        block_bytes = metrics["tidegate_kv_bytes"] / sum(
            value for name, value in metrics.items() if name.startswith("tidegate_kv_blocks{")
        )
        turns.append(
            {
                "tokens": float(usage["prompt_tokens"]),
                "cached": float(usage["prompt_tokens_details"]["cached_tokens"]),
                "e2e": e2e_s,
                **spent,
                "gateway": e2e_s - sum(spent.values()),
                "kv_bytes": metrics["tidegate_kv_blocks_cached"] * block_bytes,
            }
        )
    return turns


def parts(server: Server) -> dict[str, float]:
    metrics = server.metrics()
    return {part: metrics[f'tidegate_step_part_seconds_total{{part="{part}"}}'] for part in PARTS}


def ask(server: Server, messages: list[dict[str, str]]) -> dict[str, Any]:
    body = {
        "model": "growing",
        "messages": messages,
        "max_tokens": ANSWER_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
    }
    request = urllib.request.Request(
        f"{server.url}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=900) as answer:
        decoded: dict[str, Any] = json.loads(answer.read())
    return decoded
