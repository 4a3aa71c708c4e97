"""How far each contestant's form of the model is from the shipped weights in float32: mean KL, perplexity.

Ours is the arithmetic that answers; OpenVINO's too. Of llama.cpp's files the weights alone are judged, read
back into float32 and computed as the reference: its own rounding of activations comes on top of that.
"""

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import torch

from core import EngineConfig, read_checkpoint_metadata
from core.config import Numerics
from core.execution.worker import load_worker
from tests.benchmarks.bench_quality import WINDOW, compare, logits, real_text
from tests.benchmarks.claims.random_model import default_model
from tests.benchmarks.cpu.peers import BUILT, has_llama, has_openvino, llama_model, run
from tests.benchmarks.cpu.servers import openvino
from tokenization import tokenizer_from_gguf

NUM_TOKENS = 4000


class Quality(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    mean_kl: float
    same_top_token: float
    perplexity: float
    reference_perplexity: float
    what: str
    """`arithmetic` or `weights alone`."""


Logits = Callable[[list[int]], torch.Tensor]


def measure(numerics: Sequence[str], peers: Sequence[str], *, say: Callable[[str], None]) -> list[Quality]:
    """Every contestant's, against the same reference on the same windows."""
    text = tokenizer_from_gguf(read_checkpoint_metadata(str(default_model()))).encode(real_text())[
        :NUM_TOKENS
    ]
    windows = [text[first : first + WINDOW] for first in range(0, len(text), WINDOW)]
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "reference.npy"
        reference = keep(kept, map(engine(default_model(), "reference"), windows), num_rows=len(text))
        found = []
        for name, what, rows in everybody(numerics, peers, windows, folder=Path(folder)):
            found.append(judge(name, what, windows, rows, reference))
            say(f"quality of {name}: mean KL {found[-1].mean_kl:.5f}, perplexity {found[-1].perplexity:.3f}")
    return found


def everybody(
    numerics: Sequence[str], peers: Sequence[str], windows: list[list[int]], *, folder: Path
) -> Iterator[tuple[str, str, Iterator[torch.Tensor]]]:
    for kind in numerics:
        yield kind, "arithmetic", map(engine(default_model(), kind), windows)
    for form in (peer for peer in peers if peer not in {"openvino", "Q4_1"} and has_llama()):
        widened = folder / f"{form}.gguf"
        run(
            [str(BUILT / "llama-quantize"), "--allow-requantize", str(llama_model(form)), str(widened), "F32"]
        )
        yield f"llama.cpp {form}", "weights alone", map(engine(widened, "reference"), windows)
        widened.unlink()
    if "openvino" in peers and has_openvino():
        ids, out = folder / "ids.json", folder / "openvino.npy"
        ids.write_text(json.dumps(windows))
        with openvino() as peer:
            peer.tell({"logits": str(ids), "out": str(out)})
        rows = np.load(out, mmap_mode="r")
        bounds = np.cumsum([0, *map(len, windows)])
        yield (
            "OpenVINO int8, no HTTP",
            "arithmetic",
            (torch.from_numpy(rows[first:last].copy()) for first, last in pairwise(bounds)),
        )


def engine(path: Path, kind: str) -> Logits:
    worker = load_worker(
        EngineConfig(checkpoint=str(path), numerics=msgspec.convert(kind, Numerics), num_blocks=40)
    )
    return lambda window: logits(worker, window)


def keep(
    path: Path, found: Iterator[torch.Tensor], *, num_rows: int
) -> "np.memmap[tuple[int, int], np.dtype[np.float32]]":
    """Logits on disk: 4,000 rows of them are most of a gigabyte."""
    kept: np.memmap[tuple[int, int], np.dtype[np.float32]] | None = None
    first = 0
    for rows in found:
        if kept is None:
            kept = np.lib.format.open_memmap(
                path, mode="w+", dtype=np.float32, shape=(num_rows, rows.shape[1])
            )
        kept[first : first + len(rows)] = rows.numpy()
        first += len(rows)
    assert kept is not None
    return kept


def judge(
    name: str,
    what: str,
    windows: list[list[int]],
    found: Iterator[torch.Tensor],
    reference: "np.memmap[tuple[int, int], np.dtype[np.float32]]",
) -> Quality:
    values: dict[str, list[torch.Tensor]] = {}
    first = 0
    for window, rows in zip(windows, found, strict=True):
        kept = torch.from_numpy(np.array(reference[first : first + len(window)]))
        first += len(window)
        for figure, each in compare(rows, kept, torch.tensor(window[1:])):
            values.setdefault(figure, []).append(each)
    mean = {figure: torch.cat(each).mean().item() for figure, each in values.items()}
    return Quality(
        name=name,
        mean_kl=mean["kl"],
        same_top_token=mean["same_top"],
        perplexity=float(np.exp(mean["surprisal"])),
        reference_perplexity=float(np.exp(mean["reference_surprisal"])),
        what=what,
    )


def kl_by_contestant(found: Sequence[Quality]) -> Mapping[str, float]:
    """The shipped Q4_1 file is the original itself: its weights are off by nothing."""
    return {"llama.cpp Q4_1": 0.0, **{each.name: each.mean_kl for each in found}}
