"""What torch can do on this machine, asked of a child process. Torch-free.

So the asker neither imports torch nor dies of a broken one.
"""

import os
import subprocess
import sys
from pathlib import Path

import msgspec

from core.errors import WorkerFailed

PROBE_DEADLINE_S = 120.0


class KernelReport(msgspec.Struct, frozen=True, kw_only=True):
    """One linear kernel, tried out on random weights of one stored type."""

    name: str
    stored_types: tuple[str, ...]
    """Those it is offered for, most preferred first."""
    tried_with: str
    works: bool
    """There, and within its tolerance of float64."""
    row_multiple: int | None
    """The multiple of rows at which a row's result does not depend on the others; None: at none tried."""


class GPUReport(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    total_bytes: int
    free_bytes: int


class MachineReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a process that imports torch found."""

    torch_version: str
    cpu_capability: str
    """The instruction set that torch's kernels were picked for."""
    num_threads: int
    gpus: tuple[GPUReport, ...] = ()
    kernels: tuple[KernelReport, ...] = ()
    attention_rows: int | None = None
    """The multiple of rows that attention pads to under `stable`."""
    stable_problem: str = ""
    """Why `numerics=stable` cannot be kept here; empty: it can."""

    @classmethod
    def probe(cls, *, deadline_s: float = PROBE_DEADLINE_S) -> "MachineReport":
        """Try torch, its GPUs and every linear kernel out; takes seconds and waits for them.

        Raises:
            WorkerFailed: torch is missing or broken here; the message ends with what Python said.
        """
        path = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)
        try:
            # -P: as for a worker, a `core` that happens to lie in the folder must not be imported
            done = subprocess.run(  # our own interpreter and module
                [sys.executable, "-P", "-m", "core.execution.machine_probe"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=deadline_s,
                check=False,
                env={**os.environ, "PYTHONPATH": path},
            )
        except subprocess.TimeoutExpired:
            raise WorkerFailed(f"trying torch out took longer than {deadline_s:g} s") from None
        except OSError as error:
            raise WorkerFailed(f"Python could not be started: {error}") from error
        try:
            return msgspec.json.decode(done.stdout, type=cls)
        except msgspec.DecodeError:
            last_words = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            raise WorkerFailed(
                f"torch does not work here (exit code {done.returncode}): {last_words or 'it said nothing'}"
            ) from None
