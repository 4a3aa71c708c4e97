"""What a server costs while it does nothing: measured before and after, and compared."""

import asyncio
import gc
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from gateway.keys import METRICS
from tests.core.engine.leftovers import open_files
from tests.gateway.serving import Server
from tests.gateway.test_local_backend import Opened

SOAKING = os.environ.get("TIDEGATE_SOAK", "") not in ("", "0")
"""`make soak` sets it: longer runs, and figures on standard output."""

LIVE_GAUGES = (
    "tidegate_requests_running",
    "tidegate_requests_waiting",
    "tidegate_requests_admitted",
    'tidegate_kv_blocks{state="held"}',
)


@dataclass(frozen=True)
class Footprint:
    """Counts must come back to what they were; bytes may grow by what allocators keep."""

    num_tasks: int
    num_files: int
    num_threads: int
    num_series: int
    """Lines of `/metrics`, apart from the ways to end: a label of clients' words would add to them."""
    num_entries: int
    """What the engine and the scheduler keep of requests, finished ones too."""
    rss_bytes: int

    @property
    def counts(self) -> tuple[int, ...]:
        return self.num_tasks, self.num_files, self.num_series, self.num_entries


def footprint(server: Server, opened: Opened) -> Footprint:
    gc.collect()
    return Footprint(
        num_tasks=len(asyncio.all_tasks()),
        num_files=len(open_files()),
        num_threads=threading.active_count(),
        num_series=sum(b"{outcome=" not in line for line in server.app[METRICS].scrape().splitlines()),
        num_entries=_num_entries(opened),
        rss_bytes=int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
    )


def _num_entries(opened: Opened) -> int:
    """Items of every dict, list and set that engine and scheduler own directly, the cache's tree apart."""
    owners = (opened.engine, opened.engine._scheduler)
    kept = [value for owner in owners for value in vars(owner).values()]
    return sum(len(value) for value in kept if isinstance(value, dict | list | set))


async def settled(server: Server, opened: Opened, *, before: Footprint | None = None) -> Footprint:
    """Wait until connections, tasks and blocks are gone that are on their way out, then measure.

    With `before`, until the counts are what they were then; without, until they are the same for a
    while. Whoever compares fails if that never comes.
    """
    deadline = time.monotonic() + 20
    now, num_alike = footprint(server, opened), 0
    while time.monotonic() < deadline:
        last, now = now, footprint(server, opened)
        num_alike = num_alike + 1 if now.counts == last.counts else 0
        at_rest = opened.num_held_blocks() == 0
        if at_rest and (num_alike >= 10 if before is None else now.counts == before.counts):
            break
        await asyncio.sleep(0.02)
    return now


def live_gauges(server: Server) -> dict[str, float]:
    lines = (line.rpartition(" ") for line in server.app[METRICS].scrape().decode().splitlines())
    return {name: float(value) for name, _, value in lines if name in LIVE_GAUGES}


def report(what: str, **figures: object) -> None:
    """Say how it went, where somebody asked for a soak."""
    if SOAKING:
        print(f"\n{what}: " + ", ".join(f"{name} {value}" for name, value in figures.items()), flush=True)
