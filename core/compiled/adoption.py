"""Which of a worker's regions run compiled: what is there at the start, and what arrives later.

Before the first step a region may change its bits: whatever passes the checks is adopted. From then on
the cache holds KV that eager functions computed, so an arrival is adopted only if its bits are equal;
others wait for the next start. Nothing is ever compiled in this process.
"""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from core.compiled.artifacts import VARIANTS, artifact_path, folder_problem, load_library, read_header
from core.compiled.checks import find_problem, is_bit_equal
from core.compiled.child import CompilingChild, find_compiler
from core.compiled.dispatch import by_rows
from core.compiled.job import CompileJob, WantedRegion, wanted_region
from core.compiled.keys import file_stem, region_key
from core.compiled.references import NoReference
from core.execution.worker_info import RegionStatus
from core.layers.region import Function, Region

LOOK_EVERY_S = 1.0
"""Between two looks for arrivals; each costs a `stat` per region that is missing."""

Say = Callable[[str], None]


def _say(message: str) -> None:
    sys.stderr.write(message + "\n")


class CompiledRegions:
    """Puts compiled functions into regions. Touched by the worker's thread alone.

    Invariant: a region that is not among the compiled ones runs its own eager function.

    Args:
        folder: of the compiled files; empty: nothing is loaded and nothing compiled.
        say: told what a person should know, once each.
    """

    def __init__(self, regions: Sequence[Region], *, folder: str, say: Say = _say) -> None:
        self._by_name: dict[str, list[Region]] = {}
        for region in regions:
            self._by_name.setdefault(region.name, []).append(region)
        self._keys = {name: region_key(same[0]) for name, same in self._by_name.items()}
        self._folder, self._say = Path(folder) if folder else None, say
        self._missing = set(self._by_name)
        self._compiled: set[str] = set()
        self._waiting: set[str] = set()
        self._refused: dict[str, str] = {}
        self._note = ""
        self._num_compilations = 0
        self._child: CompilingChild | None = None
        self._looked_at = 0.0

    def adopt_kept(self) -> None:
        """Adopt what is there. Before the first step."""
        if self._folder is None or not self._by_name:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self._note = f"{self._folder} cannot be made: {error.strerror}"
        if problem := self._note or folder_problem(self._folder):
            self._remark(f"{problem}: regions are not compiled")
            return
        for name in sorted(self._missing):
            self._take(name, serving=False)

    def compile_missing(self) -> None:
        """Have a child compile what was not there; from now on steps may be computed."""
        if self._folder is not None and self._missing and not self._note:
            self._start_child()

    def look(self) -> None:
        """Between two steps: adopt at most one arrival that may be. Quick where nothing has arrived."""
        now = time.monotonic()
        if self._child is None or now - self._looked_at < LOOK_EVERY_S:
            return
        self._looked_at = now
        ended = not self._child.is_running()  # first: what it wrote before its end is seen below
        arrived = next((name for name in sorted(self._missing) if self._has_arrived(name)), None)
        if arrived is not None:
            self._num_compilations += 1
            self._take(arrived, serving=True)
        elif ended:
            self._child.close()
            self._child = None
            if self._missing:
                self._remark(
                    f"{len(self._missing)} regions were not compiled; see {self._folder}/compile.log"
                )

    def status(self) -> RegionStatus:
        return RegionStatus(
            num_regions=len(self._by_name) if self._folder else 0,
            num_compiled=len(self._compiled),
            num_waiting=len(self._waiting),
            num_refused=len(self._refused),
            num_compilations=self._num_compilations,
            compiling=self._child is not None,
            note=self._note or next((f"{name}: {why}" for name, why in self._refused.items()), ""),
        )

    def close(self) -> None:
        """End the child, if one runs."""
        if self._child is not None:
            self._child.close()
            self._child = None

    def _take(self, name: str, *, serving: bool) -> None:
        """Load a region's files, if they are there, and put them to use, if they may be."""
        region, key = self._by_name[name][0], self._keys[name]
        paths = self._paths(name)
        headers = [read_header(path, key) for path in paths]
        whole = [header for header in headers if header is not None]
        if len(whole) < len(paths):
            return  # absent, or damaged: compiled again by the next child
        self._missing.discard(name)
        if problem := next((header.problem for header in whole if header.problem), ""):
            self._refused[name] = problem
            return
        try:
            few, many = (load_library(path) for path in paths)
        except RuntimeError as error:
            self._refused[name] = f"cannot be loaded: {error}"
            return
        compiled = by_rows(region, few=few, many=many)
        if serving and not all(header.bit_equal for header in whole):
            self._waiting.add(name)
            return
        with torch.inference_mode():
            if serving and not is_bit_equal(region, compiled, again=True):
                self._waiting.add(name)
            elif not serving and (problem := find_problem(region, compiled, again=True)):
                self._refused[name] = problem
            else:
                self._use(name, compiled)

    def _use(self, name: str, compiled: Function) -> None:
        for region in self._by_name[name]:
            region.run = compiled
        self._compiled.add(name)

    def _start_child(self) -> None:
        assert self._folder is not None
        if find_compiler() is None:
            self._remark("no C++ compiler is found: regions that are not compiled yet run eagerly")
            return
        wanted: list[WantedRegion] = []
        for name in self._by_name:  # in their order: what the model computes first comes first
            if name in self._missing:
                try:
                    wanted.append(wanted_region(self._by_name[name][0], self._keys[name]))
                except NoReference as error:
                    self._missing.discard(name)
                    self._refused[name] = str(error)
        try:
            self._child = CompilingChild(CompileJob(str(self._folder), wanted))
        except OSError as error:
            self._remark(f"the compiling process did not start ({error}): regions run eagerly")

    def _has_arrived(self, name: str) -> bool:
        return all(path.exists() for path in self._paths(name))

    def _paths(self, name: str) -> list[Path]:
        assert self._folder is not None
        stem = file_stem(name, self._keys[name])
        return [artifact_path(self._folder, stem, variant) for variant in VARIANTS]

    def _remark(self, note: str) -> None:
        self._note = note
        self._say(f"tidegate: {note}")
