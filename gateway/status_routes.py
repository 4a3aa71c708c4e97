"""The routes that generate nothing: what is served, how the server is, and its metrics."""

import time
from http import HTTPStatus

import msgspec
from aiohttp import web

from gateway.keys import BACKENDS, LIFECYCLE, METRICS
from gateway.lifecycle import Phase
from gateway.telemetry.metrics import CONTENT_TYPE

_SERVER_STARTED = int(time.time())


def _json(value: object, *, status: int = HTTPStatus.OK) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json", status=status)


def _model(model_id: str, *, root: str | None = None) -> dict[str, object]:
    """`root` is the model that an alias stands for."""
    return {
        "id": model_id,
        "object": "model",
        "created": _SERVER_STARTED,
        "owned_by": "tidegate",
        "root": root or model_id,
    }


async def list_models(http: web.Request) -> web.Response:
    """Models, then their aliases. Empty while the model loads."""
    backends = http.app[BACKENDS]
    models = [_model(model_id) for model_id in backends.models()]
    aliases = [_model(alias, root=model_id) for alias, model_id in backends.aliases()]
    return _json({"object": "list", "data": models + aliases})


async def show_model(http: web.Request) -> web.Response:
    """Aliases are found, and answer with the name of what they stand for."""
    _, model_id = http.app[BACKENDS].find(http.match_info["model_id"])
    return _json(_model(model_id))


async def livez(http: web.Request) -> web.Response:
    """Red when a restart of the process would help: a backend is dead for good."""
    dead = [health.detail for b in http.app[BACKENDS].all() if not (health := b.health()).alive]
    if dead:
        return _json({"status": "dead", "detail": "; ".join(dead)}, status=HTTPStatus.SERVICE_UNAVAILABLE)
    return _json({"status": "alive"})


async def readyz(http: web.Request) -> web.Response:
    """Green when a generation sent now would be taken."""
    phase = http.app[LIFECYCLE].phase
    backends = http.app[BACKENDS].all()
    if phase is not Phase.READY:
        return _json({"status": phase.value}, status=HTTPStatus.SERVICE_UNAVAILABLE)
    unready = [health.detail for b in backends if not (health := b.health()).ready]
    if unready:
        return _json(
            {"status": "unready", "detail": "; ".join(unready)}, status=HTTPStatus.SERVICE_UNAVAILABLE
        )
    answer: dict[str, object] = {"status": "ready", "models": list(http.app[BACKENDS].models())}
    if detail := "; ".join(health.detail for b in backends if (health := b.health()).detail):
        answer["detail"] = detail
    return _json(answer)


async def metrics(http: web.Request) -> web.Response:
    return web.Response(body=http.app[METRICS].scrape(), headers={"Content-Type": CONTENT_TYPE})
