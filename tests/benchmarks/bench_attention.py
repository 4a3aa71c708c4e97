"""One layer's attention beside torch's own on keys and values that already lie in order, in float32.

    python -m tests.benchmarks.bench_attention --threads 1 2 --compiled ~/.cache/tidegate/compiled

Each figure is the least of several rounds in which ours and torch's take turns; the ratio is what to
look at, for machines are shared. torch's need not gather, widen or promise bits, so it is a mark to aim
at and not a contestant. `plan` is one step's planning, done once for all layers.
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from core.attention import AttentionPlan, KVStorage, Span
from core.attention.tiled import TILE_TOKENS, TiledAttention
from core.compiled.adoption import CompiledRegions
from core.execution.probe import attention_row_rule

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Shape:
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Case:
    """Requests that each compute `num_tokens` from `first_position` on."""

    num_requests: int
    first_position: int
    num_tokens: int = 1

    def __str__(self) -> str:
        if self.num_tokens > 1:
            return f"chunk of {self.num_tokens} at {self.first_position}"
        return f"{self.num_requests} x 1 row at {self.first_position + 1}"


SHAPES = {"135M": Shape(9, 3, 64), "1.1B": Shape(32, 4, 64)}
CASES = (
    Case(1, 255),
    Case(1, 4095),
    Case(1, 32767),
    Case(16, 255),
    Case(16, 2047),
    Case(1, 0, 512),
    Case(1, 8192, 512),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--shapes", nargs="+", default=["135M"], choices=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--compiled", default="", help="folder of compiled regions to use where they fit")
    options = parser.parse_args()
    print(f"{'shape':6}{'threads':>8}  {'case':26}{'plan us':>10}{'ours us':>10}{'torch us':>10}{'ratio':>8}")
    for name in options.shapes:
        for num_threads in options.threads:
            torch.set_num_threads(num_threads)
            for case in CASES:
                plan_us, ours_us, torch_us = measure(
                    SHAPES[name], case, rounds=options.rounds, compiled=options.compiled
                )
                print(
                    f"{name:6}{num_threads:>8}  {case!s:26}{plan_us:>10.0f}{ours_us:>10.0f}{torch_us:>10.0f}"
                    f"{ours_us / torch_us:>8.2f}"
                )


@torch.inference_mode()
def measure(shape: Shape, case: Case, *, rounds: int, compiled: str) -> tuple[float, float, float]:
    """Microseconds to plan, of ours, and of torch's."""
    storage, spans = stored(shape, case)
    backend = TiledAttention(
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        row_rule=attention_row_rule(shape.head_dim, TILE_TOKENS, num_rows=256),
    )
    CompiledRegions(backend.regions(BLOCK_SIZE, storage.dtype), folder=compiled).adopt_kept()
    num_rows = case.num_requests * case.num_tokens

    def plan() -> AttentionPlan:
        return backend.plan(spans, storage, num_tokens=num_rows, device=torch.device("cpu"))

    q_THD = torch.randn(num_rows, shape.num_heads, shape.head_dim)
    planned, original = plan(), original_attention(shape, case)
    times = [(_time(plan), _time(lambda: planned.attend(0, q_THD)), _time(original)) for _ in range(rounds)]
    plan_us, ours_us, torch_us = (min(column) * 1e6 for column in zip(*times, strict=True))
    return plan_us, ours_us, torch_us


def stored(shape: Shape, case: Case) -> tuple[KVStorage, list[Span]]:
    """Requests whose blocks lie scattered over a pool of random keys and values."""
    last = case.first_position + case.num_tokens
    blocks_each = -(-last // BLOCK_SIZE)
    storage = KVStorage(
        case.num_requests * blocks_each,
        BLOCK_SIZE,
        num_layers=1,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=torch.float16,
        device=torch.device("cpu"),
    )
    tables = torch.randperm(storage.num_blocks).view(case.num_requests, -1)
    offsets = torch.arange(storage.num_blocks * BLOCK_SIZE)
    for first in range(0, len(offsets), 4096):
        slots = offsets[first : first + 4096]
        k, v = (torch.randn(len(slots), shape.num_kv_heads, shape.head_dim) for _ in range(2))
        rows = storage.token_rows(slots // BLOCK_SIZE, slots % BLOCK_SIZE)
        storage.write(0, rows, k.to(storage.dtype), v.to(storage.dtype))
    spans = [
        Span(index * case.num_tokens, case.num_tokens, case.first_position, table)
        for index, table in enumerate(tables)
    ]
    return storage, spans


def original_attention(shape: Shape, case: Case) -> Callable[[], Tensor]:
    """torch's attention for the same work, for all requests at once."""
    length = case.first_position + case.num_tokens
    q = torch.randn(case.num_requests, shape.num_heads, case.num_tokens, shape.head_dim)
    k, v = (torch.randn(case.num_requests, shape.num_kv_heads, length, shape.head_dim) for _ in range(2))
    if case.num_tokens == 1:
        q = q.view(case.num_requests, shape.num_kv_heads, -1, shape.head_dim)
        return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v)
    per_kv = shape.num_heads // shape.num_kv_heads
    k, v = k.repeat_interleave(per_kv, 1), v.repeat_interleave(per_kv, 1)
    if case.first_position == 0:
        return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    seen = torch.arange(length) <= (case.first_position + torch.arange(case.num_tokens)).unsqueeze(1)
    return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def _time(function: Callable[[], object]) -> float:
    """Seconds of one call: the least of a few, more of them where they are short."""
    started = perf_counter()
    function()
    calls = max(1, min(50, int(0.004 / max(perf_counter() - started, 1e-7))))
    times = []
    for _ in range(3):
        started = perf_counter()
        for _ in range(calls):
            function()
        times.append((perf_counter() - started) / calls)
    return statistics.fmean(sorted(times)[:1])


if __name__ == "__main__":
    main()
