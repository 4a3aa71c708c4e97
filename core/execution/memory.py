"""How much memory there is for the KV pool, and how much this process uses."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from core.execution.worker_info import WorkerMemory

POOL_SHARE = 0.25
"""Of the memory that is available at start."""
GPU_POOL_SHARE = 0.85
MEMINFO = "/proc/meminfo"
CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
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
    """What the control group still lets us take, or None where it sets no limit."""
    for limit_path, used_path in files:
        try:
            limit, used = Path(limit_path).read_text().strip(), Path(used_path).read_text().strip()
        except OSError:
            continue
        if limit.isdigit() and used.isdigit() and int(limit) < 1 << 60:
            return max(0, int(limit) - int(used))
    return None


def default_pool_bytes(
    device: torch.device, *, meminfo: str = MEMINFO, cgroup_files: Sequence[tuple[str, str]] = CGROUP_FILES
) -> int:
    """The lesser of 25 % of available memory and the cgroup's headroom; 1 GiB where neither can be read.

    On a GPU the weights are already there: most of what is still free.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * GPU_POOL_SHARE)
    available = kilobyte_fields(meminfo).get("MemAvailable")
    share = int(available * POOL_SHARE) if available else 1 << 30
    headroom = cgroup_headroom_bytes(cgroup_files)
    return share if headroom is None else min(share, headroom)


def process_memory() -> WorkerMemory:
    """This process's memory from smaps_rollup; zeros where it cannot be read."""
    fields = kilobyte_fields("/proc/self/smaps_rollup")
    rss, anonymous = fields.get("Rss", 0), fields.get("Anonymous", 0)
    return WorkerMemory(
        rss_bytes=rss,
        pss_bytes=fields.get("Pss", 0),
        anonymous_bytes=anonymous,
        file_bytes=max(0, rss - anonymous),
    )
