"""How much memory this machine has to give, from /proc and the control group. Torch-free."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

POOL_SHARE = 0.25
"""Of the memory that is available at start."""
UNKNOWN_POOL_BYTES = 1 << 30
MEMINFO = "/proc/meminfo"
CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


class HostMemory(msgspec.Struct, frozen=True, kw_only=True):
    """A moment's memory in bytes; None: cannot be read here, or no limit is set."""

    total_bytes: int | None
    available_bytes: int | None
    cgroup_headroom_bytes: int | None
    default_kv_bytes: int
    """What the KV pool gets where nobody says otherwise."""

    @property
    def usable_bytes(self) -> int:
        """The most that a process could still take; the default pool where nothing can be read."""
        known = [n for n in (self.available_bytes, self.cgroup_headroom_bytes) if n is not None]
        return min(known, default=self.default_kv_bytes)


def read_host_memory(
    *, meminfo: str = MEMINFO, cgroup_files: Sequence[tuple[str, str]] = CGROUP_FILES
) -> HostMemory:
    """Look now. The default pool is the lesser of 25 % of available memory and the cgroup's headroom."""
    fields = kilobyte_fields(meminfo)
    available = fields.get("MemAvailable")
    headroom = cgroup_headroom_bytes(cgroup_files)
    share = int(available * POOL_SHARE) if available else UNKNOWN_POOL_BYTES
    return HostMemory(
        total_bytes=fields.get("MemTotal"),
        available_bytes=available,
        cgroup_headroom_bytes=headroom,
        default_kv_bytes=share if headroom is None else min(share, headroom),
    )


def kilobyte_fields(path: str) -> dict[str, int]:
    """Fields of a /proc file in bytes, e.g. `{"MemAvailable": ...}`; empty where there is no such file."""
    return dict(_kilobyte_lines(path))


def _kilobyte_lines(path: str) -> Iterator[tuple[str, int]]:
    try:
        text = Path(path).read_text()
    except OSError:
        return
    for line in text.splitlines():
        words = line.split()
        if len(words) == 3 and words[1].isdigit() and words[2] == "kB":
            yield words[0].removesuffix(":"), int(words[1]) * 1024


def cgroup_headroom_bytes(files: Sequence[tuple[str, str]] = CGROUP_FILES) -> int | None:
    """What the control group still lets us take, or None where it sets no limit.

    Its usage counts the page cache; what of that lies idle is given up before anything fails, so it
    counts as free (`memory.stat` beside the usage: `inactive_file`, in version 1 `total_inactive_file`).
    """
    for limit_path, used_path in files:
        try:
            limit, used = Path(limit_path).read_text().strip(), Path(used_path).read_text().strip()
        except OSError:
            continue
        if limit.isdigit() and used.isdigit() and int(limit) < 1 << 60:
            idle = _idle_page_cache_bytes(Path(used_path).with_name("memory.stat"))
            return max(0, int(limit) - max(0, int(used) - idle))
    return None


def _idle_page_cache_bytes(stat: Path) -> int:
    try:
        fields = dict(line.split(maxsplit=1) for line in stat.read_text().splitlines() if " " in line)
    except OSError:
        return 0
    value = fields.get("total_inactive_file", fields.get("inactive_file", "")).strip()
    return int(value) if value.isdigit() else 0
