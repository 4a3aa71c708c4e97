"""The compiling child as its parent sees it: started, looked at, and ended without waiting for it."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import msgspec

from core.compiled.job import CompileJob

LOG_NAME = "compile.log"
MOST_LOG_BYTES = 1 << 20


def find_compiler() -> str | None:
    """The C++ compiler that Inductor would use, or None where there is none."""
    return shutil.which(os.environ.get("CXX", "g++"))


class CompilingChild:
    """One run of the compiler. It lives at most as long as this process: its input ends with us.

    Raises:
        OSError: the machine refused another process, or the folder a log.
    """

    def __init__(self, job: CompileJob) -> None:
        path = Path(job.folder) / LOG_NAME
        mode = "wb" if path.exists() and path.stat().st_size > MOST_LOG_BYTES else "ab"
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path),
            "OMP_NUM_THREADS": "1",
            "AOT_INDUCTOR_ENABLE_LINE_TABLES": "0",  # a quarter of the size
        }
        with path.open(mode) as log:
            self._process = subprocess.Popen(
                (sys.executable, "-P", "-m", "core.compiled.compiler"),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,  # one kill reaches the compiler's processes too
            )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it ended at once; `is_running` will tell
            self._process.stdin.write(msgspec.json.encode(job) + b"\n")
            self._process.stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_running(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """End it now, with all that it has started. May be called again."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
