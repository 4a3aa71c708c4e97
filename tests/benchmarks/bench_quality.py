"""How far the default kernels are from the reference: KL, same top token, perplexity.

    python -m tests.benchmarks.bench_quality [--model FILE] [--tokens 4000] [--cache-dir DIR]

Both read the same file; the reference widens the stored weights to float32. The text is the
project's licence followed by a module of Python's standard library, in windows of 500 tokens.
"""

import argparse
import argparse as text_module
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from core import EngineConfig, read_checkpoint_metadata
from core.execution.worker import ModelWorker, load_worker
from gateway.model_store import DEFAULT_MODEL, pull
from tests.fakes.plans import planned, step
from tokenization import tokenizer_from_gguf

WINDOW = 500


def real_text() -> str:
    licence = Path(__file__).parents[2] / "LICENSE"
    return licence.read_text() + Path(text_module.__file__).read_text()


def logits(worker: ModelWorker, token_ids: list[int]) -> torch.Tensor:
    plan = step(planned("a", token_ids, blocks=range(-(-len(token_ids) // 16)), num_samples=len(token_ids)))
    return worker.runner.logits(plan)


def compare(
    ours: torch.Tensor, reference: torch.Tensor, targets: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor]]:
    """Per position, in float64: KL(reference || ours), equal top token, and both surprisals (nats)."""
    p, q = reference.double().log_softmax(-1), ours.double().log_softmax(-1)
    yield "kl", (p.exp() * (p - q)).sum(-1)
    yield "same_top", (p.argmax(-1) == q.argmax(-1)).double()
    yield "surprisal", -q[:-1].gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    yield "reference_surprisal", -p[:-1].gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--cache-dir", default="", help="of packed weights; a new one unless given")
    arguments = parser.parse_args()
    path = arguments.model or str(pull(DEFAULT_MODEL, report=print))
    token_ids = tokenizer_from_gguf(read_checkpoint_metadata(path)).encode(real_text())[: arguments.tokens]
    with tempfile.TemporaryDirectory() as folder:  # a calibration needs one to be kept in
        cache_dir = arguments.cache_dir or folder
        workers = {
            numerics: load_worker(
                EngineConfig(checkpoint=path, numerics=numerics, num_blocks=40, cache_dir=cache_dir)
            )
            for numerics in ("stable", "reference")
        }
    found: dict[str, list[torch.Tensor]] = {}
    for first in range(0, len(token_ids), WINDOW):
        window = token_ids[first : first + WINDOW]
        ours, reference = (logits(workers[numerics], window) for numerics in ("stable", "reference"))
        for name, values in compare(ours, reference, torch.tensor(window[1:])):
            found.setdefault(name, []).append(values)
    mean = {name: torch.cat(values).mean().item() for name, values in found.items()}
    print(
        json.dumps(
            {
                "tokens": len(token_ids),
                "kernels": workers["stable"].info.kernels,
                "mean_kl": round(mean["kl"], 5),
                "same_top_token": round(mean["same_top"], 4),
                "perplexity": round(float(torch.tensor(mean["surprisal"]).exp()), 4),
                "reference_perplexity": round(float(torch.tensor(mean["reference_surprisal"]).exp()), 4),
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
