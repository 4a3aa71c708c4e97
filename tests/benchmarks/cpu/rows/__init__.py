"""The rows of the table: a file for each kind of work, a function for each row."""

from collections.abc import Callable

from tests.benchmarks.cpu.contest import Options, Work
from tests.benchmarks.cpu.rows.agents import agents, chat, gaps, growth
from tests.benchmarks.cpu.rows.footprint import contention, gateway, memory, start
from tests.benchmarks.cpu.rows.speed import large, one, prefill, sixteen

ROWS: dict[str, Callable[[Options], list[Work]]] = {
    "prefill": prefill,
    "one": one,
    "sixteen": sixteen,
    "agents": agents,
    "chat": chat,
    "growth": growth,
    "gaps": gaps,
    "large": large,
    "memory": memory,
    "start": start,
    "contention": contention,
    "gateway": gateway,
}
