"""What a compiled region depends on, as one digest: its name, its sources, torch and the processor."""

import hashlib
import platform
import re
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from core.layers.region import Region

FORMAT = 2
"""Raised whenever regions are compiled, checked or stored differently."""
SOURCE_PARTS = ("layers", "quantization", "attention", "models")
"""Where regions' functions come from, as folders of `core`."""
FREE_SIZES = (Region.ROWS, Region.GROUPS, Region.POOL_ROWS)


def region_key(region: Region) -> str:
    """32 hex digits. Equal keys may share a compiled file, on any machine they are equal on."""
    parts = [
        str(FORMAT),
        region.name,
        f"{region.must_equal} {region.fused_multiply_add}",
        *(f"{example.dtype}{tuple(example.shape)}" for example in region.examples),
        _sources_digest(_source_file(region)),
        torch.__version__,
        torch.backends.cpu.get_cpu_capability(),
        platform.machine(),
        _processor_flags(),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def file_stem(name: str, key: str) -> str:
    return f"{re.sub(r'[^A-Za-z0-9._-]', '_', name)[:100]}-{key}"


def row_dims(tensors: Sequence[torch.Tensor]) -> list[int | None]:
    """For each tensor of `Region.ROWS` rows the dimension that they are, else None."""
    dims: list[int | None] = []
    for tensor in tensors:
        found = [dim for dim, size in enumerate(tensor.shape) if size == Region.ROWS]
        assert len(found) <= 1, f"{tuple(tensor.shape)}: only one dimension may be {Region.ROWS}"
        dims.append(found[0] if found else None)
    return dims


def free_dims(region: Region) -> list[dict[int, int]]:
    """For each example its dimensions of free size, and the size that stands for it."""
    return [
        {dim: size for dim, size in enumerate(example.shape) if size in FREE_SIZES}
        for example in region.examples
    ]


def _source_file(region: Region) -> str:
    """Of the module that defined the function; functions of our own packages are covered anyway."""
    module = sys.modules.get(getattr(region.function, "__module__", ""))
    return getattr(module, "__file__", None) or ""


@cache
def _sources_digest(file: str) -> str:
    """Of a file and of all sources in `SOURCE_PARTS`: a region may be put together from several."""
    digest = hashlib.sha256()
    core = Path(__file__).parents[1]
    paths = [path for part in SOURCE_PARTS for path in sorted((core / part).rglob("*.py"))]
    for path in [*paths, *([Path(file)] if file else [])]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


@cache
def _processor_flags() -> str:
    """The compiler uses all that this processor can do, which another of the same family may not."""
    try:
        with Path("/proc/cpuinfo").open() as lines:
            return next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        return platform.processor()
