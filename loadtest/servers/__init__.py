"""What each server tells about itself. One file per server, with a `SERVER` that is the contract's.

What a server does not tell is None, "unknown" in every report, and never zero.
"""

import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec


class ServerState(msgspec.Struct, frozen=True, kw_only=True):
    """One look at a server. Counters only grow; the rest is of the moment."""

    num_query_tokens: int | None = None
    """Counter: prompt tokens looked up in the prefix cache."""
    num_hit_tokens: int | None = None
    """Counter: prompt tokens found there."""
    weights_bytes: int | None = None
    kv_pool_bytes: int | None = None
    kv_live_bytes: int | None = None
    """Allocated to requests being computed."""
    kv_cached_bytes: int | None = None
    """Held for reuse alone, and free to be evicted."""
    kv_live_token_bytes: int | None = None
    """Bytes that live requests' tokens fill, where a server counts tokens apart from what it allocates."""
    server_bytes: int | None = None
    """Memory of the whole server process, as it sees itself."""


class Answers(msgspec.Struct, frozen=True, kw_only=True):
    """What a server answered to plain GETs, by path: decoded JSON, or the numbers of a metrics page."""

    json: Mapping[str, Any] = {}
    metrics: Mapping[str, float] = {}
    """`name{labels}` as in the text format, to its value."""

    def owners(self) -> set[str]:
        """`owned_by` of each model in `/v1/models`."""
        models = _objects(self.json.get("/v1/models"), "data")
        return {str(model["owned_by"]) for model in models if "owned_by" in model}

    def metric(self, name: str) -> float | None:
        """The sum over all label sets of one metric, with or without the counters' `_total`."""
        names = (name, f"{name}_total")
        found = [value for key, value in self.metrics.items() if key.partition("{")[0] in names]
        return sum(found) if found else None

    def has_metrics_of(self, prefix: str) -> bool:
        return any(key.startswith(prefix) for key in self.metrics)

    def field(self, path: str, *names: str) -> Any:
        """A value inside a JSON answer; None where any step of the way is missing."""
        value = self.json.get(path)
        for name in names:
            value = value.get(name) if isinstance(value, dict) else None
        return value


class Server(Protocol):
    """How one server is recognised and read. Stateless."""

    name: str
    paths: tuple[str, ...]
    """JSON pages to ask for besides `/v1/models`, when finding out which server it is."""
    state_paths: tuple[str, ...]
    """Those of them that `state` reads, besides `/metrics`."""

    def recognises(self, answers: Answers) -> bool: ...

    def version(self, answers: Answers) -> str | None: ...

    def state(self, answers: Answers) -> ServerState: ...

    def tokenize_body(self, model: str, text: str) -> dict[str, Any] | None:
        """The body for POST `/tokenize`, without special tokens; None: this server has none."""
        ...


class UnknownServer:
    """Any server that speaks the dialect: everything else about it is unknown."""

    name = "unknown"
    paths: tuple[str, ...] = ()
    state_paths: tuple[str, ...] = ()

    def recognises(self, answers: Answers) -> bool:
        return True

    def version(self, answers: Answers) -> str | None:
        return None

    def state(self, answers: Answers) -> ServerState:
        return ServerState()

    def tokenize_body(self, model: str, text: str) -> dict[str, Any] | None:
        """The commonest shape; a server that lacks it answers 404 and is not asked again."""
        return {"model": model, "prompt": text, "add_special_tokens": False}


UNKNOWN: Server = UnknownServer()


def all_servers() -> list[Server]:
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return [importlib.import_module(f"{__name__}.{name}").SERVER for name in names]


def find_server(answers: Answers) -> Server:
    """The first that recognises itself, else the unknown one."""
    return next((server for server in all_servers() if server.recognises(answers)), UNKNOWN)


def parse_metrics(text: str) -> dict[str, float]:
    """The Prometheus text format: comments, odd lines and timestamps are left out."""
    found = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        key, closing, rest = line.rpartition("}")
        key, rest = (key + closing, rest) if closing else (line.split(None, 1)[0], line.partition(" ")[2])
        try:
            found[key.strip()] = float(rest.split()[0])
        except (ValueError, IndexError):
            continue
    return found


def label_of(key: str, label: str) -> str | None:
    """`label_of('x{state="held"}', "state")` is `held`."""
    _, found, rest = key.partition(f'{label}="')
    return rest.partition('"')[0] if found else None


def _objects(value: Any, name: str) -> list[dict[str, Any]]:
    inner = value.get(name) if isinstance(value, dict) else None
    return [item for item in inner if isinstance(item, dict)] if isinstance(inner, list) else []


def whole(value: float | None) -> int | None:
    """A metric's value as a count; NaN and infinity are unknown."""
    return int(value) if value is not None and abs(value) < float("inf") else None
