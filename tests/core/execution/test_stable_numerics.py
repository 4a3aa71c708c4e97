"""The promise of `numerics=stable`: a request's logits are the same bits alone and in any company.

Random requests are computed alone, each in one piece, and then all together: cut into random
chunks, over scattered blocks, sharing their common prefix's blocks, and started again from nothing
in the middle (as after preemption).
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest
import torch

from core.config import EngineConfig
from core.execution.worker import ModelWorker, load_worker
from core.layers import Decoder
from core.scheduler.plan import PlannedTokens
from tests.fakes.hub_folders import tiny_model, write_folder
from tests.fakes.plans import planned, step
from tests.fakes.tiny_llama import TinyShape, write_tiny_llama

SHAPES = {
    "q4_1": TinyShape(linear_type="Q4_1", embedding_type="Q8_0", num_heads=6, head_dim=32),
    "q4_0 tied": TinyShape(linear_type="Q4_0", embedding_type="Q4_0"),
    "float": TinyShape(linear_type="F16", embedding_type="F32", num_heads=4, num_kv_heads=4),
    "narrow": TinyShape(linear_type="Q8_0", embedding_type="F16", width=96, hidden_width=160, num_heads=6),
    # No vector length divides its hidden rows.
    "odd": TinyShape(linear_type="F16", embedding_type="F16", hidden_width=101),
}
KINDS = ("qwen2", "qwen3")
BLOCK_SIZE = 16


@dataclass
class Walk:
    """One request on its way through random steps."""

    name: str
    token_ids: list[int]
    blocks: list[int]
    cuts: list[int] = field(default_factory=list)
    position: int = 0
    logits: list[torch.Tensor] = field(default_factory=list)


def logits_alone(worker: ModelWorker, token_ids: list[int], samples: int) -> torch.Tensor:
    """The last `samples` positions' logits, computed in one piece from empty blocks."""
    blocks = range(-(-len(token_ids) // BLOCK_SIZE))
    return worker.runner.logits(step(planned("alone", token_ids, blocks=blocks, num_samples=samples)))


def random_requests(rng: random.Random, *, vocab_size: int, longest: int, count: int) -> list[list[int]]:
    shared = [rng.randrange(vocab_size) for _ in range(BLOCK_SIZE * rng.randint(1, 4))]
    requests = []
    for _ in range(count):
        own = [rng.randrange(vocab_size) for _ in range(rng.randint(1, longest))]
        requests.append((shared if rng.random() < 0.6 else []) + own)
    return requests


def place(rng: random.Random, requests: list[list[int]], num_blocks: int) -> list[Walk]:
    """Give each request scattered blocks; requests that begin alike share the blocks of what they share."""
    free = rng.sample(range(num_blocks), num_blocks)
    by_prefix: dict[tuple[int, ...], int] = {}
    walks = []
    for index, token_ids in enumerate(requests):
        blocks = []
        cached = 0
        for end in range(BLOCK_SIZE, len(token_ids) + BLOCK_SIZE, BLOCK_SIZE):
            prefix = tuple(token_ids[:end])
            full = end <= len(token_ids)
            if full and prefix in by_prefix and end < len(token_ids):
                blocks.append(by_prefix[prefix])
                cached = end
            else:
                blocks.append(free.pop())
                if full:
                    by_prefix[prefix] = blocks[-1]
        walks.append(Walk(str(index), token_ids, blocks, position=cached))
    return walks


def chunks(rng: random.Random, walk: Walk, samples: int) -> Iterator[int]:
    """How many tokens the next step computes; the sampled tail goes one by one, as in decoding."""
    prompt = len(walk.token_ids) - samples + 1
    while walk.position < len(walk.token_ids):
        left = prompt - walk.position
        yield 1 if left <= 1 else rng.randint(1, left)


def run_together(worker: ModelWorker, walks: list[Walk], rng: random.Random, *, samples: int) -> None:
    """Compute all walks, step by step, until each has its logits. Later ones wait for a shared prefix."""
    started = [False] * len(walks)
    pending = {walk.name: chunks(rng, walk, samples) for walk in walks}
    while any(walk.position < len(walk.token_ids) for walk in walks):
        items: list[PlannedTokens] = []
        moved: list[tuple[Walk, int, bool]] = []
        for index, walk in enumerate(walks):
            waits = any(
                walks[i].position < len(walks[i].token_ids) for i in range(index) if not started[index]
            ) and (walk.position > 0 and not started[index])
            if walk.position >= len(walk.token_ids) or waits or (rng.random() < 0.3 and items):
                continue
            started[index] = True
            num_tokens = next(pending[walk.name])
            end = walk.position + num_tokens
            sampled = end > len(walk.token_ids) - samples
            new = walk.token_ids[walk.position : end]
            items.append(
                planned(
                    walk.name, new, first_position=walk.position, blocks=walk.blocks, num_samples=int(sampled)
                )
            )
            moved.append((walk, end, sampled))
        logits = worker.runner.logits(step(*items))
        row = 0
        for walk, end, sampled in moved:
            walk.position = end
            if sampled:
                walk.logits.append(logits[row])
                row += 1


def write_model(folder: Path, name: str) -> Path:
    if name in SHAPES:
        return write_tiny_llama(folder / "tiny.gguf", SHAPES[name])
    return write_folder(folder, tiny_model(name).bfloat16())


@pytest.mark.parametrize("name", [*SHAPES, *KINDS])
@pytest.mark.parametrize("seed", range(6))
def test_logits_alone_and_in_company_are_the_same_bits(
    name: str, seed: int, tmp_path: Path, search_factor: int
) -> None:
    worker = load_worker(EngineConfig(checkpoint=str(write_model(tmp_path, name)), num_blocks=400))
    vocab_size = worker.info.vocab_size
    for round_number in range(2 * search_factor):
        rng = random.Random(f"{seed}/{round_number}")
        samples = rng.randint(1, 6)
        longest = 700 if rng.random() < 0.3 else 90
        requests = [
            ids + [rng.randrange(vocab_size) for _ in range(samples)]
            for ids in random_requests(rng, vocab_size=vocab_size, longest=longest, count=rng.randint(1, 7))
        ]
        walks = place(rng, requests, 400)
        run_together(worker, walks, rng, samples=samples)
        for walk in walks:
            alone = logits_alone(worker, walk.token_ids, samples)
            assert torch.equal(torch.stack(walk.logits), alone), (
                f"{name}: request {walk.name} of {len(walks)}"
            )


def test_the_default_model_keeps_the_promise_on_its_real_weights(
    default_model_path: Path, search_factor: int
) -> None:
    worker = load_worker(EngineConfig(checkpoint=str(default_model_path), num_blocks=300))
    for round_number in range(2 * search_factor):
        rng = random.Random(round_number)
        requests = random_requests(rng, vocab_size=worker.info.vocab_size, longest=330, count=4)
        requests = [ids + [rng.randrange(1000) for _ in range(3)] for ids in requests]
        walks = place(rng, requests, 300)
        run_together(worker, walks, rng, samples=3)
        for walk in walks:
            assert torch.equal(torch.stack(walk.logits), logits_alone(worker, walk.token_ids, 3))


def test_a_context_of_many_waves_is_the_same_in_one_piece_and_token_by_token(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf", TinyShape(linear_type="Q4_1", context=8192))
    worker = load_worker(EngineConfig(checkpoint=str(path), num_blocks=512))
    rng = random.Random(5)
    token_ids = [rng.randrange(320) for _ in range(4700)]
    whole = logits_alone(worker, token_ids, 4)
    blocks = rng.sample(range(512), 294)
    position, rows = 0, []
    for size in (1, 2047, 2, 1000, 600, 1046, 1, 1, 1, 1):
        new = token_ids[position : position + size]
        logits = worker.runner.logits(step(planned("a", new, first_position=position, blocks=blocks)))
        rows.append(logits[0])
        position += size
    assert position == len(token_ids)
    assert torch.equal(torch.stack(rows[-4:]), whole)


def test_a_number_that_is_not_finite_stays_with_its_own_request(tmp_path: Path) -> None:
    """A broken request's stored keys must not reach whoever gets its blocks next."""
    path = write_tiny_llama(tmp_path / "tiny.gguf", TinyShape(linear_type="F16"))
    worker = load_worker(EngineConfig(checkpoint=str(path), num_blocks=4))
    expected = logits_alone(worker, [5, 6, 7], 1)
    embedding = cast(Decoder, worker.runner._model).embed_tokens
    spoil = embedding.register_forward_hook(lambda *call: call[-1] * float("nan"))
    broken = worker.execute(step(planned("broken", [1] * 64, blocks=range(4))))
    spoil.remove()
    assert broken.samples[0].error == "the model gave no finite logit"
    assert torch.equal(logits_alone(worker, [5, 6, 7], 1), expected)
