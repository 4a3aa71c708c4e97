"""What a server on this machine used: CPU time and memory of a process and its children, and energy.

Needs `--server-pid`; a server elsewhere is "unknown". Energy is the whole machine's packages, from
RAPL, where the kernel lets us read it: meaningful only where nothing else runs.
"""

from pathlib import Path

import msgspec
import psutil

from loadtest.errors import PlanInvalid

POWERCAP = Path("/sys/class/powercap")
PROC = Path("/proc")


class Resources(msgspec.Struct, frozen=True, kw_only=True):
    """Of a server over one pass. None is unknown."""

    cpu_s: float | None = None
    """User and system, children included."""
    rss_bytes: int | None = None
    """At the end of the pass; memory that processes share counts once in each."""
    pss_bytes: int | None = None
    """At the end of the pass; shared memory counts once."""
    peak_rss_bytes: int | None = None
    """Since each process began, summed: an upper bound of the peak."""
    joules: float | None = None
    """Of the machine's processor packages."""


class ResourceMeter:
    """Reads at the start and at the end of a pass, never between: reading page tables takes milliseconds."""

    def __init__(self, pid: int | None, *, proc: Path = PROC, powercap: Path = POWERCAP) -> None:
        self._pid = pid
        self._proc = proc
        self._powercap = powercap
        self._cpu_at_start: dict[tuple[int, float], float] = {}
        self._energy_at_start: dict[Path, int] = {}

    def start(self) -> None:
        """
        Raises:
            PlanInvalid: there is no such process, or it may not be looked at.
        """
        if self._pid is not None:
            try:
                self._cpu_at_start = {_identity(p): _cpu_s(p) for p in _family(self._pid)}
            except (psutil.NoSuchProcess, ProcessLookupError):
                raise PlanInvalid(f"--server-pid is {self._pid}: there is no such process") from None
            except psutil.AccessDenied:
                raise PlanInvalid(f"--server-pid is {self._pid}: that process may not be read") from None
        self._energy_at_start = _energies(self._powercap)

    def stop(self) -> Resources:
        """A server that died meanwhile is unknown, not zero."""
        joules = self._joules()
        if self._pid is None:
            return Resources(joules=joules)
        try:
            family = _family(self._pid)
            cpu_s = sum(_cpu_s(p) - self._cpu_at_start.get(_identity(p), 0.0) for p in family)
            rss = sum(p.memory_info().rss for p in family)
        except psutil.Error:
            return Resources(joules=joules)
        pids = [p.pid for p in family]
        return Resources(
            cpu_s=cpu_s,
            rss_bytes=rss,
            pss_bytes=_sum_of(self._proc, pids, "smaps_rollup", field="Pss:"),
            peak_rss_bytes=_sum_of(self._proc, pids, "status", field="VmHWM:"),
            joules=joules,
        )

    def _joules(self) -> float | None:
        now = _energies(self._powercap)
        used = [
            _spent(zone, self._energy_at_start[zone], now[zone])
            for zone in self._energy_at_start
            if zone in now
        ]
        known = [joules for joules in used if joules is not None]
        return sum(known) if known and len(known) == len(used) else None


def _family(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def _identity(process: psutil.Process) -> tuple[int, float]:
    """A pid can be given to another process; its start time tells them apart."""
    return process.pid, process.create_time()


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _sum_of(proc: Path, pids: list[int], file: str, *, field: str) -> int | None:
    """The sum over processes of a `Field:  123 kB` line, in bytes; None where one cannot be read."""
    total = 0
    for pid in pids:
        try:
            text = (proc / str(pid) / file).read_text()
        except OSError:
            return None
        values = [line.split()[1] for line in text.splitlines() if line.startswith(field)]
        if not values:
            return None
        total += int(values[0]) * 1024
    return total


def _energies(powercap: Path) -> dict[Path, int]:
    """Microjoules of each processor package; its parts, `intel-rapl:0:1`, are in it already."""
    found = {}
    for zone in sorted(powercap.glob("intel-rapl:*")):
        if zone.name.count(":") != 1:
            continue
        try:
            if (zone / "name").read_text().startswith("package"):
                found[zone] = int((zone / "energy_uj").read_text())
        except (OSError, ValueError):
            continue
    return found


def _spent(zone: Path, before: int, after: int) -> float | None:
    """In joules; the counter may have wrapped once, which takes a package some forty minutes at least."""
    if after >= before:
        return (after - before) / 1e6
    try:
        return (after - before + int((zone / "max_energy_range_uj").read_text())) / 1e6
    except (OSError, ValueError):
        return None
