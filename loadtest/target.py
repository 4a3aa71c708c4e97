"""The server under test, before any load: is it there, does it let us in, what is it, which model has it.

Everything that is wrong here is somebody's to put right before a run, so it ends in one clear line.
"""

from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus
from typing import Any, Literal, Self
from urllib.parse import urlsplit

import aiohttp
import msgspec

from loadtest.errors import PlanInvalid, TargetUnusable
from loadtest.servers import UNKNOWN, Answers, Server, ServerState, all_servers, find_server, parse_metrics

MAX_ANSWER_BYTES = 16 << 20
MIN_WORDS = 32
_MODELS = "/v1/models"
_METRICS = "/metrics"

WordSource = Literal["/tokenize", "usage", "unchecked"]
"""How the filler's words were found to be one token each."""
Count = Callable[[Sequence[str]], Awaitable[int | None]]
"""How many tokens these words, each behind a space, add to a text; None where the server does not tell."""


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A server that answered."""

    url: str
    """Without the dialect's path."""
    model: str
    models: tuple[str, ...]
    server: str
    version: str | None
    notes: tuple[str, ...] = ()


class Words(msgspec.Struct, frozen=True, kw_only=True):
    words: tuple[str, ...]
    source: WordSource


def base_url(url: str) -> str:
    """`http://host:8000/v1/` as `http://host:8000`: dialects add their own path.

    Raises:
        PlanInvalid: no http or https URL.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise PlanInvalid(f"--target is {url!r}: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise PlanInvalid(f"--target is {url!r}; it must be a URL such as http://127.0.0.1:8000")
    if parts.query or parts.fragment:
        raise PlanInvalid(f"--target is {url!r}; it must end with the path, without query or fragment")
    return url.strip().rstrip("/").removesuffix("/v1").rstrip("/")


class Looker:
    """Plain GETs and POSTs beside the load, for the length of an `async with` scope."""

    def __init__(self, url: str, *, api_key: str | None = None, deadline_s: float = 10.0) -> None:
        self.url = base_url(url)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._deadline_s = deadline_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            headers=self._headers, timeout=aiohttp.ClientTimeout(total=self._deadline_s)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def ask(self, path: str, *, json: Any = None) -> tuple[int, bytes]:
        """Status and body of a GET, or of a POST where `json` is given.

        Raises:
            TargetUnusable: no connection, no HTTP, or no whole answer within the deadline.
        """
        assert self._session is not None, "the looker's scope is not entered"
        method = "GET" if json is None else "POST"
        try:
            async with self._session.request(method, self.url + path, json=json) as response:
                body = b""
                async for part in response.content.iter_any():
                    body += part
                    if len(body) > MAX_ANSWER_BYTES:
                        raise TargetUnusable(
                            f"{method} {path} of {self.url} is above {MAX_ANSWER_BYTES} bytes"
                        )
                return response.status, body
        except TimeoutError:
            raise TargetUnusable(
                f"{self.url} did not answer {method} {path} within {self._deadline_s:g} s"
            ) from None
        except aiohttp.ClientConnectorError as error:
            raise TargetUnusable(
                f"no connection to {self.url} ({_reason(error)}): is the server up?"
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            raise TargetUnusable(
                f"{self.url} does not answer {method} {path} as HTTP should ({_reason(error)})"
            ) from None

    async def json_of(self, path: str) -> Any:
        """A page's JSON; None where there is no such page, or it is none."""
        status, body = await self.ask(path)
        return _decoded(body) if status == HTTPStatus.OK else None

    async def metrics(self) -> dict[str, float]:
        """The numbers of `/metrics`; empty where there is none."""
        status, body = await self.ask(_METRICS)
        return parse_metrics(body.decode(errors="replace")) if status == HTTPStatus.OK else {}

    async def state(self, server: Server) -> ServerState:
        """What the server tells of itself now; all unknown where it does not answer in time."""
        if server is UNKNOWN:
            return ServerState()
        try:
            metrics = await self.metrics()
            pages = {path: await self.json_of(path) for path in server.state_paths}
        except TargetUnusable:
            return ServerState()
        return server.state(Answers(json=pages, metrics=metrics))


async def probe(looker: Looker, *, model: str | None = None) -> tuple[Target, Server]:
    """Find the server and the model to ask for.

    Raises:
        TargetUnusable: dead, refusing, no HTTP, still loading, or without a list of models and none named.
    """
    status, body = await looker.ask(_MODELS)
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        raise TargetUnusable(f"{looker.url} refuses us with HTTP {status}: give its key with --api-key")
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        raise TargetUnusable(f"{looker.url} answers {_MODELS} with HTTP {status}: {_short(body)}")
    listed = _decoded(body) if status == HTTPStatus.OK else None
    models = _model_ids(listed)
    if model is None and not models:
        raise TargetUnusable(_no_models(looker.url, status=status, listed=listed))
    notes = []
    if model is None and len(models) > 1:
        notes.append(f"{len(models)} models are served; the first was asked, {models[0]}")
    if model is not None and models and model not in models:
        notes.append(f"{model} is not in the server's list: {', '.join(models)}")
    server, answers = await _recognise(looker, listed)
    target = Target(
        url=looker.url,
        model=model or models[0],
        models=models,
        server=server.name,
        version=server.version(answers),
        notes=tuple(notes),
    )
    return target, server


async def _recognise(looker: Looker, listed: Any) -> tuple[Server, Answers]:
    paths = sorted({path for server in all_servers() for path in server.paths})
    pages: dict[str, Any] = {_MODELS: listed}
    metrics: dict[str, float] = {}
    try:
        metrics = await looker.metrics()
        for path in paths:
            pages[path] = await looker.json_of(path)
    except TargetUnusable:
        pass  # it serves models, which is all that a run needs; what is left stays unknown
    answers = Answers(json=pages, metrics=metrics)
    return find_server(answers), answers


def _no_models(url: str, *, status: int, listed: Any) -> str:
    if status == HTTPStatus.NOT_FOUND:
        return f"{url} has no {_MODELS}: name the model with --model, or is the URL's path wrong?"
    if status != HTTPStatus.OK:
        return f"{url} answers {_MODELS} with HTTP {status}: name the model with --model"
    if listed is None:
        return f"{url} answers {_MODELS} with something that is not JSON: is it an inference server?"
    return f"{url} lists no model: it may be loading still, or name one with --model"


def _model_ids(listed: Any) -> tuple[str, ...]:
    data = listed.get("data") if isinstance(listed, dict) else None
    items = data if isinstance(data, list) else []
    return tuple(item["id"] for item in items if isinstance(item, dict) and isinstance(item.get("id"), str))


async def words_by_tokenize(
    looker: Looker, server: Server, *, model: str, words: Sequence[str]
) -> tuple[str, ...] | None:
    """Those of `words` that are one token behind a space; None where the server has no `/tokenize`."""
    # A text begins with something, so that what a tokenizer does to a text's beginning cancels out.
    empty = await _num_tokens(looker, server, model=model, text="a")
    if empty is None:
        return None

    async def count(some: Sequence[str]) -> int | None:
        found = await _num_tokens(
            looker, server, model=model, text="a" + "".join(f" {word}" for word in some)
        )
        return None if found is None else found - empty

    return await single_token_words(words, count)


async def _num_tokens(looker: Looker, server: Server, *, model: str, text: str) -> int | None:
    body = server.tokenize_body(model, text)
    if body is None:
        return None
    try:
        status, answer = await looker.ask("/tokenize", json=body)
    except TargetUnusable:
        return None
    found = _decoded(answer) if status == HTTPStatus.OK else None
    tokens = found.get("tokens") if isinstance(found, dict) else None
    return len(tokens) if isinstance(tokens, list) else None


async def single_token_words(
    words: Sequence[str], count: Count, *, enough: int | None = None, max_counts: int = 200
) -> tuple[str, ...] | None:
    """Keep the words that add one token each, by halving what does not add up.

    Args:
        enough: stop as soon as so many are found.
        max_counts: how often the server is asked at most; what is not decided by then is left out.
    Returns None as soon as the server does not tell.
    """
    good: set[str] = set()
    undecided = [tuple(words)]
    for _ in range(max_counts):
        if not undecided or (enough is not None and len(good) >= enough):
            break
        some = undecided.pop(0)
        num_tokens = await count(some)
        if num_tokens is None:
            return None
        if num_tokens == len(some):
            good.update(some)
        elif len(some) > 1:
            middle = len(some) // 2
            undecided += [some[:middle], some[middle:]]
    return tuple(word for word in words if word in good)


def _decoded(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError:
        return None


def _short(body: bytes, limit: int = 200) -> str:
    text = " ".join(body.decode(errors="replace").split())
    return text if len(text) <= limit else text[:limit] + "..."


def _reason(error: BaseException) -> str:
    inner = getattr(error, "os_error", None)
    return str(inner or error) or type(error).__name__
