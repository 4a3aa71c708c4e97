"""What a compiled region depends on, as one digest: its name, its sources, torch and the processor."""

import hashlib
import platform
import re
import sys
from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from types import FunctionType, MethodType, ModuleType

import torch

from core.layers.region import Region

FORMAT = 3
"""Raised whenever regions are compiled, checked or stored differently."""
OWN_PACKAGES = ("core", "tests")
"""Whose sources count; torch has a version."""
FREE_SIZES = (Region.ROWS, Region.GROUPS, Region.POOL_ROWS)


def region_key(region: Region) -> str:
    """32 hex digits. Equal keys may share a compiled file, on any machine they are equal on."""
    parts = [
        str(FORMAT),
        region.name,
        f"{region.must_equal} {region.fused_multiply_add}",
        *(f"{example.dtype}{tuple(example.shape)}" for example in region.examples),
        _sources_digest(region),
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


def _first_modules(function: object) -> Iterator[str]:
    """Where a function and what is bound to it are from."""
    match function:
        case partial():
            yield from _first_modules(function.func)
            for argument in (*function.args, *function.keywords.values()):
                yield from _first_modules(argument)
        case MethodType():
            yield from _first_modules(function.__self__)
        case FunctionType():
            yield function.__module__
        case _:
            yield type(function).__module__


def _sources_digest(region: Region) -> str:
    """Of the modules of a region's functions and of all of our own that those use, however remotely."""
    digest = hashlib.sha256()
    found: set[str] = set()
    waiting = [*_first_modules(region.function), *_first_modules(region.eager)]
    while waiting:
        name = waiting.pop()
        if name not in found and name.partition(".")[0] in OWN_PACKAGES:
            found.add(name)
            waiting += _used_modules(name)
    for name in sorted(found):
        digest.update(name.encode() + b"\0" + _source(name))
    return digest.hexdigest()


@cache
def _used_modules(name: str) -> tuple[str, ...]:
    values = vars(sys.modules[name]).values()
    return tuple(
        {value.__name__ if isinstance(value, ModuleType) else _home(value) for value in values} - {name}
    )


def _home(value: object) -> str:
    """The module of a function, a class, or an object's class."""
    home = getattr(value, "__module__", None)
    return home if isinstance(home, str) else ""


@cache
def _source(name: str) -> bytes:
    file = getattr(sys.modules.get(name), "__file__", None)
    return Path(file).read_bytes() if file else b""


@cache
def _processor_flags() -> str:
    """The compiler uses all that this processor can do, which another of the same family may not."""
    try:
        with Path("/proc/cpuinfo").open() as lines:
            return next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        return platform.processor()
