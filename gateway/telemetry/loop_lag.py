"""Measures how late the event loop is, by a timer that knows when it should have fired."""

import asyncio
from collections.abc import Callable

EVERY_S = 0.1


async def sample_loop_lag(report: Callable[[float], None], *, every_s: float = EVERY_S) -> None:
    """Call `report` with each delay in seconds. Runs for ever."""
    now = asyncio.get_running_loop().time
    while True:
        due_s = now() + every_s
        await asyncio.sleep(every_s)
        report(max(0.0, now() - due_s))
