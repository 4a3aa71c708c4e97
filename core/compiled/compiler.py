"""The compiling child: `python -m core.compiled.compiler`, started by `child.py` only.

Reads a `CompileJob` and compiles what is wanted and not there yet, one region after the other. One
child at a time works in a folder; the next one waits, and finds the files. It has the least usual
priority, and ends with its parent: whoever holds the other end of its input.
"""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn

from core.compiled.artifacts import (
    VARIANTS,
    ArtifactHeader,
    artifact_path,
    load_library,
    read_header,
    write_artifact,
)
from core.compiled.checks import find_problem, is_bit_equal
from core.compiled.dispatch import by_rows
from core.compiled.job import CompileJob
from core.compiled.keys import FREE_SIZES, file_stem, free_dims
from core.layers.region import Region

OPTIONS: dict[str, dict[str, object]] = {"few": {"cpp.threads": 1}, "many": {"cpp.dynamic_threads": True}}
"""What sets the variants apart. The second obeys `torch.set_num_threads`."""
COMMON_OPTIONS: dict[str, object] = {
    "aot_inductor.check_lowerbound": False,  # one row is a row
    "assert_indirect_indexing": False,  # places are made by us, and the checks would be in the inner loops
    "aot_inductor.package_constants_in_so": True,
}
CONTRACT = "cpp.enable_floating_point_contract_flag"
WORTH_HEADERS = 3
"""Regions from which on precompiled headers pay: 18 s once, 5 s less for each of a region's variants."""
BUILD_PREFIX = "building-"


def main() -> None:
    _step_back()
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=CompileJob)
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    folder = Path(job.folder)
    with (folder / "compiling.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # its holder alone has building folders here
        for left in folder.glob(BUILD_PREFIX + "*"):
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=BUILD_PREFIX) as build:
            # Inductor and its precompiled headers, 300 MB of them, go where they are cleared away.
            os.environ["TMPDIR"] = os.environ["TORCHINDUCTOR_CACHE_DIR"] = build
            tempfile.tempdir = None
            compile_wanted(job)


def compile_wanted(job: CompileJob) -> None:
    """Compile each wanted region of which a variant is missing, and say so on stdout."""
    folder = Path(job.folder)
    torch._inductor.config.aot_inductor.precompile_headers = len(job.wanted) >= WORTH_HEADERS  # noqa: SLF001
    for wanted in job.wanted:
        stem = file_stem(wanted.name, wanted.key)
        paths = {variant: artifact_path(folder, stem, variant) for variant in VARIANTS}
        if all(read_header(path, wanted.key) for path in paths.values()):
            continue
        started = time.monotonic()
        problem = compile_region(wanted.build(), wanted.key, paths)
        seconds = time.monotonic() - started
        sys.stdout.write(f"{wanted.name}: {problem or 'compiled'}, {seconds:.1f} s\n")
        sys.stdout.flush()


def compile_region(region: Region, key: str, paths: dict[str, Path]) -> str:
    """Write both variants' files, and return why there is no library in them, or nothing.

    They are tried out here, where a crash harms nobody, before they get their names.
    """
    libraries: dict[str, bytes] = {}
    problem, bit_equal, started = "", False, time.monotonic()
    try:
        for variant in VARIANTS:
            libraries[variant] = _library(region, OPTIONS[variant])
        problem, bit_equal = _checked(region, libraries, folder=paths["few"].parent)
    except OSError:
        raise
    except Exception as error:  # whatever a compiler has to say about one region: the others go on
        problem = f"{type(error).__name__}: {error}"[:500]
    seconds, compiler = time.monotonic() - started, _compiler_version()
    for variant, path in paths.items():
        library = b"" if problem else libraries[variant]
        header = ArtifactHeader(
            key=key,
            variant=variant,
            num_bytes=len(library),
            crc32=zlib.crc32(library),
            problem=problem,
            bit_equal=bit_equal,
            compiler=compiler,
            compile_s=seconds,
        )
        write_artifact(path, library, header)
    return problem


class _Module(nn.Module):
    """`torch.export` takes modules."""

    def __init__(self, region: Region) -> None:
        super().__init__()
        self.region = region

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.region.function(*tensors))


def _library(region: Region, options: dict[str, object]) -> bytes:
    """The shared library that Inductor makes of a region."""
    contraction = {CONTRACT: "fast" if region.fused_multiply_add else "off"}
    free = {size: torch.export.Dim(f"n{size}", min=1, max=1 << 24) for size in FREE_SIZES}
    shapes = tuple({dim: free[size] for dim, size in dims.items()} or None for dims in free_dims(region))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        program = torch.export.export(
            _Module(region), region.examples, dynamic_shapes=(shapes,), strict=False
        )
        with tempfile.TemporaryDirectory() as place:
            package = torch._inductor.aoti_compile_and_package(  # noqa: SLF001  -- it has no other name
                program,
                package_path=f"{place}/region.pt2",
                inductor_configs={**COMMON_OPTIONS, **options, **contraction},
            )
            with zipfile.ZipFile(package) as archive:
                (name,) = (name for name in archive.namelist() if name.endswith(".so"))
                return archive.read(name)


def _checked(region: Region, libraries: dict[str, bytes], *, folder: Path) -> tuple[str, bool]:
    """What is wrong with the libraries, and whether their bits are the eager function's.

    They are loaded from the folder they are for: it may not let libraries be loaded.
    """
    with tempfile.TemporaryDirectory(dir=folder, prefix=BUILD_PREFIX) as place, torch.no_grad():
        runs = []
        for variant in VARIANTS:
            path = Path(place) / f"{variant}.so"
            path.write_bytes(libraries[variant])
            runs.append(load_library(path))
        compiled = by_rows(region, few=runs[0], many=runs[1])
        problem = find_problem(region, compiled)
        return problem, not problem and is_bit_equal(region, compiled)


def _compiler_version() -> str:
    command: Sequence[str] = (os.environ.get("CXX", "g++"), "--version")
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603
    except (OSError, subprocess.CalledProcessError):
        return ""
    return said.partition("\n")[0]


def _step_back() -> None:
    """Leave the processor to whoever else wants it, nearly all of it."""
    os.nice(19)
    torch.set_num_threads(1)


def _end_with_the_parent() -> None:
    """Wait for the end of the input; then end this session at once, the compiler's processes included."""
    while sys.stdin.buffer.read(1):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
