"""How much memory there is for the KV pool, and how much this process uses."""

from collections.abc import Sequence

import torch

from core.execution.host_memory import (
    CGROUP_FILES,
    MEMINFO,
    cgroup_headroom_bytes,
    kilobyte_fields,
    read_host_memory,
)
from core.execution.worker_info import WorkerMemory

__all__ = [
    "cgroup_headroom_bytes",
    "default_pool_bytes",
    "free_pool_bytes",
    "kilobyte_fields",
    "process_memory",
]

GPU_POOL_SHARE = 0.85


def default_pool_bytes(
    device: torch.device, *, meminfo: str = MEMINFO, cgroup_files: Sequence[tuple[str, str]] = CGROUP_FILES
) -> int:
    """The lesser of 25 % of available memory and the cgroup's headroom; 1 GiB where neither can be read.

    On a GPU the weights are already there: most of what is still free.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * GPU_POOL_SHARE)
    return read_host_memory(meminfo=meminfo, cgroup_files=cgroup_files).default_kv_bytes


def free_pool_bytes(
    device: torch.device, *, meminfo: str = MEMINFO, cgroup_files: Sequence[tuple[str, str]] = CGROUP_FILES
) -> int | None:
    """The most that a pool could take now; None where it cannot be known."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    memory = read_host_memory(meminfo=meminfo, cgroup_files=cgroup_files)
    if memory.available_bytes is None and memory.cgroup_headroom_bytes is None:
        return None
    return memory.usable_bytes


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
