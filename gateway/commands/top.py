"""`tidegate top`: a live view of a running server, from what it tells over HTTP."""

import http.client
import json
import math
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from gateway.commands import CommandFailed
from gateway.commands.inspect_file import size
from gateway.commands.metrics_text import Scrape, Window
from gateway.commands.request_table import STATES, request_table

TIMEOUT_S = 5.0
WINDOW_SCRAPES = 16
"""Rates and percentiles are over this many scrapes."""
MOST_BYTES = 8 << 20
BAR_WIDTH = 40


class Server:
    """A running server, as its clients see it."""

    def __init__(self, url: str, *, api_key: str | None) -> None:
        if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
            raise CommandFailed(f"--url is {url!r}; it must begin with http:// or https://")
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def scrape(self) -> Scrape:
        """Ask for the metrics.

        Raises:
            CommandFailed: nobody answers, or it is no Tidegate server.
        """
        body = self._get("/metrics")
        try:
            scrape = Scrape(body.decode(), at_s=time.monotonic())
        except ValueError:
            raise CommandFailed(f"{self.url}/metrics is not what a Tidegate server says") from None
        if not scrape.is_ours:
            raise CommandFailed(f"{self.url}/metrics is not what a Tidegate server says")
        return scrape

    def state(self) -> str:
        """`ready`, or what the server is instead, with its models."""
        try:
            answer = json.loads(self._get("/readyz", accept_errors=True))
            models = ", ".join(answer.get("models", ()))
            return f"{answer['status']} {models}".strip()
        except (ValueError, KeyError, AttributeError, TypeError):
            return "unknown"

    def live_requests(self) -> list[dict[str, Any]]:
        """Who is in the server now, as far as this key may see; nobody where the server does not tell."""
        try:
            answer = json.loads(self._get("/v1/explain", accept_errors=True))
            return [each for each in answer["data"] if isinstance(each, dict)]
        except (ValueError, KeyError, TypeError):
            return []

    def _get(self, path: str, *, accept_errors: bool = False) -> bytes:
        # S310: the scheme is http or https, which __init__ has checked
        request = urllib.request.Request(self.url + path, headers=self._headers)  # noqa: S310
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:  # noqa: S310
                body: bytes = response.read(MOST_BYTES)
                return body
        except urllib.error.HTTPError as error:
            with error:
                if accept_errors:
                    return error.read(MOST_BYTES)
            hint = "; give its key with --api-key" if error.code in (401, 403) else ""
            raise CommandFailed(f"{self.url}{path} answers with status {error.code}{hint}") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)
            reason = getattr(reason, "strerror", None) or reason or type(error).__name__
            raise CommandFailed(f"no server at {self.url}: {reason}; is `tidegate serve` running?") from None


def top(url: str, *, api_key: str | None, every_s: float, once: bool) -> None:
    """Show the server until Ctrl-C; with `once` print one frame, over one interval.

    Raises:
        CommandFailed: the server is not there, or went away.
    """
    server = Server(url, api_key=api_key)
    console = Console(highlight=False)
    frames = _frames(server, every_s=every_s)
    if once:
        next(frames)  # over no time yet
        console.print(next(frames))
    elif console.is_terminal:
        with suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False, screen=True) as live:
            for shown in frames:
                live.update(shown, refresh=True)
    else:  # a file or a pipe gets one frame after another
        with suppress(KeyboardInterrupt):
            for shown in frames:
                console.print(shown)
                console.file.flush()


def _frames(server: Server, *, every_s: float) -> Iterator[Group]:
    """What there is to see, every so often, for ever."""
    scrapes = deque([server.scrape()], maxlen=WINDOW_SCRAPES)
    while True:
        window = Window(scrapes[0], scrapes[-1])
        yield frame(window, url=server.url, state=server.state(), live=server.live_requests())
        time.sleep(every_s)
        scrapes.append(server.scrape())


def frame(window: Window, *, url: str, state: str, live: Sequence[Mapping[str, Any]] = ()) -> Group:
    """All there is to see of one moment."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for rows in (_queue_rows, _speed_rows, _time_rows, _memory_rows):
        for label, text in rows(window):
            table.add_row(label, escape(text))
    parts: list[RenderableType] = [Text(f"tidegate {url}  {state}", style="bold"), table]
    return Group(*parts, *((Text(""), request_table(live)) if live else ()))


def _time_rows(window: Window) -> list[tuple[str, str]]:
    """Where the time of the window's turns went, and that of the requests that ended in it."""
    parts = {
        part: window.growth("step_part_seconds_total", part=part)
        for part in ("schedule", "build", "forward", "sample", "transfer", "deliver")
    }
    states = {state: window.growth("request_state_seconds_total", state=state) for state in STATES}
    return [("step time", _shares(parts)), ("ended spent", _shares(states))]


def _shares(amounts: Mapping[str, float]) -> str:
    total = sum(amounts.values())
    if not total:
        return "none now"
    return ", ".join(f"{name} {_share(amount, total)}" for name, amount in amounts.items())


def _queue_rows(window: Window) -> list[tuple[str, str]]:
    now = window.newer
    free, held, evictable = (now.value("kv_blocks", state=s) for s in ("free", "held", "evictable"))
    total = free + held + evictable
    requests = {
        "running": now.value("requests_running"),
        "waiting": now.value("requests_waiting"),
        "refused": now.value("requests_refused_total"),
        "preemptions": now.value("preemptions_total"),
    }
    blocks = f"{free:.0f} free, {held:.0f} held, {evictable:.0f} evictable of {total:.0f}"
    return [
        ("requests", _counts(requests)),
        ("blocks", f"{blocks}; {now.value('kv_blocks_cached'):.0f} cached"),
        ("waste", f"{100 * now.value('kv_waste_ratio'):.1f} % of the slots in held blocks"),
        ("", _bar(held, evictable, total)),
    ]


def _speed_rows(window: Window) -> list[tuple[str, str]]:
    now = window.newer
    computed, generated, steps = (
        window.rate(f"{name}_total") for name in ("computed_tokens", "generated_tokens", "steps")
    )
    recent = _share(window.growth("prefix_hit_tokens_total"), window.growth("prefix_query_tokens_total"))
    always = _share(now.value("prefix_hit_tokens_total"), now.value("prefix_query_tokens_total"))
    return [
        ("computed", f"{computed:.1f} tokens/s in {steps:.1f} steps/s"),
        ("of which", _kinds(window)),
        ("generated", f"{generated:.1f} tokens/s"),
        ("prefix hits", f"{recent} now, {always} since the start"),
        ("first token", _latencies(window, "time_to_first_token_seconds")),
        ("inter-token", _latencies(window, "inter_token_seconds")),
    ]


def _kinds(window: Window) -> str:
    growth = {
        kind: window.growth("step_tokens_total", kind=kind) for kind in ("prefill", "recomputed", "decode")
    }
    batched, steps = window.growth("batched_requests_total"), window.growth("steps_total")
    return f"{_shares(growth)}; {batched / steps:.1f} requests a step" if steps else "none now"


def _memory_rows(window: Window) -> list[tuple[str, str]]:
    now = window.newer
    rss, anonymous = (size(now.value("worker_memory_bytes", kind=kind)) for kind in ("rss", "anonymous"))
    weights, pool = size(now.value("packed_weight_bytes")), size(now.value("kv_bytes"))
    steps = {
        "steps": now.value("steps_total"),
        "failed": now.value("failed_steps_total"),
        "restarts": now.value("worker_restarts_total"),
    }
    return [
        ("memory", f"worker {rss} ({anonymous} anonymous), weights {weights}, KV pool {pool}"),
        ("worker", _counts(steps)),
    ]


def _counts(numbers: Mapping[str, float]) -> str:
    return ", ".join(f"{number:.0f} {name}" for name, number in numbers.items())


def _latencies(window: Window, name: str) -> str:
    ranks = (0.5, 0.95, 0.99)
    values, is_recent = window.percentiles(name, ranks=ranks)
    if all(value is None for value in values):
        return "none yet"
    shown = ", ".join(
        f"p{rank * 100:.0f} {_seconds(value)}" for rank, value in zip(ranks, values, strict=True)
    )
    return shown if is_recent else f"{shown} (since the start)"


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return "beyond the scale" if math.isinf(value) else f"{value * 1000:.0f} ms"


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "-"


def _bar(held: float, evictable: float, total: float) -> str:
    """Held blocks as #, evictable ones as +, free ones as dots."""
    if not total:
        return ""
    num_held = math.ceil(BAR_WIDTH * held / total)
    num_evictable = min(BAR_WIDTH - num_held, math.ceil(BAR_WIDTH * evictable / total))
    return "#" * num_held + "+" * num_evictable + "." * (BAR_WIDTH - num_held - num_evictable)
