"""How long a long prompt takes to encode, and how long the event loop stands still meanwhile.

    python -m tests.benchmarks.bench_tokenization MODEL.gguf [--tokens 127000]

The last line is the figure to keep: `encode` in a thread, as the gateway calls it. The line above it
is the same text through the library's single-text call, which holds the GIL.
"""

import argparse
import asyncio
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RustTokenizer
from tokenizers.models import BPE

from tests.tokenization.gguf_metadata import read_metadata
from tokenization import Detokenizer, StopMatcher, tokenizer_from_gguf
from tokenization.pre_tokenizers import PRE_TOKENIZATIONS

TICK_S = 0.001


async def largest_loop_lag(work: Callable[[], object]) -> tuple[float, float]:
    """Run `work` in a thread; returns its seconds and the longest the loop was late for a tick."""
    task = asyncio.create_task(asyncio.to_thread(work))
    worst, started = 0.0, time.perf_counter()
    while not task.done():
        before = time.perf_counter()
        await asyncio.sleep(TICK_S)
        worst = max(worst, time.perf_counter() - before - TICK_S)
    await task
    return time.perf_counter() - started, worst


def source_text(num_tokens: int, encode: Callable[[str], list[int]]) -> str:
    """Python source, which is what agents send, repeated to about `num_tokens`."""
    files = sorted(Path(asyncio.__file__).parent.glob("*.py"))
    text = "\n".join(path.read_text() for path in files)
    per_char = len(encode(text)) / len(text)
    num_chars = int(num_tokens / per_char)
    return (text * (num_chars // len(text) + 1))[:num_chars]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=127_000)
    options = parser.parse_args()
    metadata = read_metadata(options.model)
    started = time.perf_counter()
    tokenizer = tokenizer_from_gguf(metadata)
    print(f"build tokeniser             {time.perf_counter() - started:8.3f} s")
    text = source_text(options.tokens, tokenizer.encode)
    ids = tokenizer.encode(text)

    started = time.perf_counter()
    detokenizer, matcher = Detokenizer(tokenizer), StopMatcher(["\nUser:", "<|never|>"])
    for token_id in ids:
        matcher.push(detokenizer.push([token_id]))
    print(f"detokenise and match stops  {(time.perf_counter() - started) / len(ids) * 1e6:8.2f} us per token")

    rust = library_tokenizer(metadata)
    ways: dict[str, Callable[[str], object]] = {
        "library encode, one text": lambda text: rust.encode(text, add_special_tokens=False).ids,
        "Tokenizer.encode": tokenizer.encode,
    }
    for name, encode in ways.items():
        wall_s, lag_s = asyncio.run(largest_loop_lag(partial(encode, text)))
        print(f"{name:27} {wall_s:8.3f} s for {len(ids)} tokens; largest loop lag {lag_s * 1e3:7.1f} ms")


def library_tokenizer(metadata: dict[str, Any]) -> RustTokenizer:
    """The library's own tokeniser of the same vocabulary, for comparison."""
    vocab = {token: token_id for token_id, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(line.split(" ")) for line in metadata["tokenizer.ggml.merges"]]
    rust = RustTokenizer(BPE(vocab, merges))
    rust.pre_tokenizer = PRE_TOKENIZATIONS[metadata["tokenizer.ggml.pre"]].pre_tokenizer()
    return rust


if __name__ == "__main__":
    main()
