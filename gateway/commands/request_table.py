"""The part of `tidegate top` that is about requests: a row for each that is in the server now."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

MOST_REQUESTS = 20
REQUEST_WIDTH = 12
SESSION_WIDTH = 24
STATES = ("queued", "prefilling", "decoding", "stalled")


def request_table(live: Sequence[Mapping[str, Any]]) -> Table:
    """Where the time of each request has gone so far, the oldest first. `live` is the server's own list."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("request", no_wrap=True)
    table.add_column("session", no_wrap=True, max_width=SESSION_WIDTH)
    for title in ("state", "prompt", "cached", "output", *STATES, "preempted"):
        table.add_column(title, justify="right", no_wrap=True)
    for each in live[:MOST_REQUESTS]:
        counts = (each.get(f"num_{kind}_tokens", 0) for kind in ("prompt", "cached", "output"))
        cells = (
            str(each.get("request_id", ""))[:REQUEST_WIDTH],
            str(each.get("session_id", "")),
            str(each.get("status", "")),
            *map(str, counts),
            *(_seconds(each.get(f"{state}_s", 0.0)) for state in STATES),
            str(each.get("num_preemptions", 0)),
        )
        table.add_row(*(escape(_printable(cell)) for cell in cells))
    if len(live) > MOST_REQUESTS:
        table.caption = f"and {len(live) - MOST_REQUESTS} more"
    return table


def _seconds(value: object) -> str:
    return f"{value:.2f} s" if isinstance(value, int | float) else "-"


def _printable(text: str) -> str:
    """Clients choose the names of sessions, and a terminal obeys control characters."""
    return "".join(c if c.isprintable() else "?" for c in text)
