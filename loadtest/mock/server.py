"""A server with exact timing for tests of the load tester, and to try it without a model.

Raw asyncio: every write happens at an absolute time of the script, so its lateness is known and told
(`GET /mock/stats`), and a client's error can be told from the server's.

    POST /v1/chat/completions   POST /v1/completions   POST /tokenize   GET /v1/models   GET /health
    GET /mock/stats             GET /mock/requests     POST /mock/forget
"""

import asyncio
import contextlib
import signal
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec

from loadtest.errors import PlanInvalid
from loadtest.mock.connection import Connection, HttpRequest, Reply
from loadtest.mock.memory import PrefixMemory
from loadtest.mock.script import MockOptions, Prompt, check_options
from loadtest.mock.stream import Seen, Stream
from loadtest.mock.ticker import Ticker

BACKLOG = 8192
MAX_SEEN = 100_000


class _Body(msgspec.Struct, kw_only=True):
    model: str
    messages: list[dict[str, Any]] | None = None
    prompt: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool = False
    stream_options: dict[str, bool] | None = None


_decode = msgspec.json.Decoder(_Body).decode


class MockServer:
    """Belongs to the loop it was made in."""

    def __init__(self, options: MockOptions) -> None:
        check_options(options)
        self.options = options
        self.ticker = Ticker()
        self.memory = PrefixMemory(options.cache_block_tokens)
        self.seen: deque[Seen] = deque(maxlen=MAX_SEEN)
        self.connections: set[Connection] = set()
        self.port = 0
        self._num_requests = 0
        self._num_events = 0
        self._first_at: float | None = None
        self._waiting: deque[Callable[[], None]] = deque()
        self._num_running = 0
        self._routes: dict[tuple[str, str], Callable[[HttpRequest], Reply]] = {
            ("GET", "/health"): lambda _: Reply(body={"status": "ok"}),
            ("GET", "/v1/models"): self._models,
            ("POST", "/tokenize"): self._tokenize,
            ("GET", "/mock/stats"): lambda _: Reply(body=self.stats()),
            ("GET", "/mock/requests"): lambda _: Reply(body=list(self.seen)),
            ("POST", "/mock/forget"): self._forget,
        }

    def answer(self, request: HttpRequest, connection: Connection) -> None:
        """Called by a connection once a request is whole."""
        if request.path in {"/v1/chat/completions", "/v1/completions"}:
            self._generate(request, connection)
            return
        route = self._routes.get((request.method, request.path))
        connection.reply(route(request) if route is not None else _refusal(404, f"no route {request.path}"))

    def stats(self) -> dict[str, object]:
        lateness = sorted(self.ticker.lateness_s)
        return {
            "num_requests": self._num_requests,
            "num_events": self._num_events,
            "num_running": self._num_running,
            "num_waiting": len(self._waiting),
            "num_connections": len(self.connections),
            "cpu_s": time.process_time(),
            "lateness_p50_s": _quantile(lateness, 0.5),
            "lateness_p99_s": _quantile(lateness, 0.99),
            "lateness_max_s": lateness[-1] if lateness else None,
        }

    def due_at(self, started_at: float, offset_s: float) -> float:
        """When a step is due: the whole server's stall shifts what it meets."""
        at = started_at + offset_s
        if self.options.stall_at_s is None or self._first_at is None:
            return at
        stall_at = self._first_at + self.options.stall_at_s
        resumes_at = stall_at + self.options.stall_s
        if at < stall_at or started_at >= resumes_at:
            return at
        return at + (resumes_at - max(started_at, stall_at))

    def count_event(self) -> None:
        self._num_events += 1

    def release_turn(self) -> None:
        """A running request is over; the next one's turn comes."""
        self._num_running -= 1
        assert self._num_running >= 0, "more turns given back than taken"
        if self._waiting:
            self._num_running += 1
            self._waiting.popleft()()

    def leave_queue(self, start: Callable[[], None]) -> None:
        with contextlib.suppress(ValueError):
            self._waiting.remove(start)

    def _generate(self, request: HttpRequest, connection: Connection) -> None:
        if self.options.api_key is not None and request.api_key != self.options.api_key:
            connection.reply(_refusal(401, "this mock wants its API key"))
            return
        prompt = self._read_prompt(request)
        if isinstance(prompt, Reply):
            connection.reply(prompt)
            return
        self._num_requests += 1
        if self._first_at is None:
            self._first_at = request.at
        seen = Seen(at=request.at, num_prompt_tokens=len(prompt.words))
        self.seen.append(seen)
        fails = self.options.fail != "none" and self._num_requests % self.options.fail_every == 0
        if fails and self.options.fail == "status":
            connection.reply(_refusal(self.options.fail_status, "the mock was told to fail"))
            return
        seen.is_queued = (
            self.options.max_running is not None and self._num_running >= self.options.max_running
        )
        stream = Stream(
            self, connection, prompt=prompt, seen=seen, fails=fails, request_id=f"mock-{self._num_requests}"
        )
        connection.begin(stream)
        if seen.is_queued:
            self._waiting.append(stream.start)
        else:
            self._num_running += 1
            stream.start()

    def _read_prompt(self, request: HttpRequest) -> Prompt | Reply:
        if request.method != "POST":
            return _refusal(405, f"{request.path} wants a POST")
        try:
            body = _decode(request.body)
        except (msgspec.DecodeError, RecursionError) as error:
            return _refusal(400, f"the body cannot be used: {error}")
        if body.model != self.options.model:
            return _refusal(404, f"the model {body.model!r} does not exist; there is {self.options.model!r}")
        is_chat = request.path == "/v1/chat/completions"
        if (body.messages if is_chat else body.prompt) is None:
            return _refusal(400, f"{'messages' if is_chat else 'prompt'} is missing")
        max_tokens = 16
        for given in (body.max_completion_tokens, body.max_tokens):
            max_tokens = max_tokens if given is None else given
        if max_tokens < 1:
            return _refusal(400, f"max_tokens is {max_tokens}; it must be at least 1")
        options = body.stream_options or {}
        return Prompt(
            is_chat=is_chat,
            words=_words(body.messages) if body.messages and is_chat else (body.prompt or "").split(),
            max_tokens=max_tokens,
            streams=body.stream,
            include_usage=options.get("include_usage", False),
            continuous_usage=options.get("continuous_usage_stats", False),
        )

    def _models(self, _: HttpRequest) -> Reply:
        model = {"id": self.options.model, "object": "model", "created": 0, "owned_by": "tidegate-mock"}
        return Reply(body={"object": "list", "data": [model]})

    def _tokenize(self, request: HttpRequest) -> Reply:
        try:
            body = msgspec.json.decode(request.body, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError) as error:
            return _refusal(400, f"the body cannot be used: {error}")
        messages = body.get("messages")
        words = _words(messages) if isinstance(messages, list) else str(body.get("prompt", "")).split()
        return Reply(body={"count": len(words), "tokens": [hash(word) & 0xFFFF for word in words]})

    def _forget(self, _: HttpRequest) -> Reply:
        self.memory.clear()
        self.seen.clear()
        self.ticker.lateness_s.clear()
        self._num_requests = self._num_events = 0
        self._first_at = None
        return Reply(body={"status": "ok"})


@contextlib.asynccontextmanager
async def running_mock(
    options: MockOptions, *, host: str = "127.0.0.1", port: int = 0
) -> AsyncIterator[MockServer]:
    """A mock in this event loop; `server.port` says where.

    Raises:
        PlanInvalid: an option out of its bounds, or an address that cannot be bound.
    """
    server = MockServer(options)
    loop = asyncio.get_running_loop()
    try:
        listener = await loop.create_server(lambda: Connection(server), host, port, backlog=BACKLOG)
    except OSError as error:
        raise PlanInvalid(f"the mock cannot listen on {host}:{port}: {error}") from error
    server.port = listener.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listener.close()
        for connection in tuple(server.connections):
            connection.abort()
        server.ticker.close()


async def serve_mock(options: MockOptions, *, host: str, port: int, on_ready: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM. `on_ready` is given the URL.

    Raises:
        PlanInvalid: see `running_mock`.
    """
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    async with running_mock(options, host=host, port=port) as server:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stopped.set)
        on_ready(f"http://{host}:{server.port}")
        await stopped.wait()


def _words(messages: list[Any]) -> list[str]:
    texts = (message.get("content") for message in messages if isinstance(message, dict))
    return [word for text in texts if isinstance(text, str) for word in text.split()]


def _refusal(status: int, message: str) -> Reply:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return Reply(
        status=status, body={"error": {"message": message, "type": kind, "param": None, "code": None}}
    )


def _quantile(ordered: list[float], share: float) -> float | None:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None
