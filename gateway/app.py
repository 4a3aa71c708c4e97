"""The application on one screen: routes, middleware, and what they share."""

import structlog
from aiohttp import web

from gateway import explain_routes, status_routes, text_routes
from gateway.admission import Admission
from gateway.api_keys import ApiKeys, read_key_file
from gateway.backends import Backends
from gateway.config import ServerConfig
from gateway.dialects import find_dialects
from gateway.handler import generate_handler
from gateway.keys import (
    ADMISSION,
    API_KEYS,
    BACKENDS,
    CONFIG,
    KEEP_ALIVE,
    KNOWN_REQUESTS,
    LIFECYCLE,
    METRICS,
)
from gateway.lifecycle import Lifecycle
from gateway.middleware.access_log import access_log_middleware
from gateway.middleware.api_key import api_key_middleware
from gateway.middleware.cors import add_cors_headers, cors_middleware
from gateway.middleware.drain import drain_middleware
from gateway.middleware.errors import errors_middleware
from gateway.middleware.request_id import add_standard_headers, request_id_middleware
from gateway.sse import KeepAlive
from gateway.telemetry.known_requests import KnownRequests
from gateway.telemetry.metrics import Metrics

_log = structlog.get_logger("gateway.app")


def build_app(config: ServerConfig) -> web.Application:
    """Return the application, with no backend yet: the lifespan adds it when it has loaded.

    Raises:
        ConfigError: the key file cannot be used.
    """
    access_log = (access_log_middleware,) if config.access_log else ()
    app = web.Application(
        middlewares=(
            request_id_middleware,
            *access_log,
            cors_middleware,
            drain_middleware,
            errors_middleware,
            api_key_middleware,
        ),
        client_max_size=config.max_body_bytes,
    )
    app[CONFIG] = config
    app[LIFECYCLE] = Lifecycle()
    app[API_KEYS] = _api_keys(config)
    app[ADMISSION] = Admission(max_running=config.engine.max_running, max_queued=config.max_queued)
    app[BACKENDS] = Backends(aliases=config.aliases)
    app[METRICS] = Metrics(admission=app[ADMISSION], backends=app[BACKENDS])
    app[KNOWN_REQUESTS] = KnownRequests()
    app[KEEP_ALIVE] = KeepAlive(every_s=config.keep_alive_s)
    app.on_response_prepare.extend((add_standard_headers, add_cors_headers))

    for dialect in find_dialects():
        app.router.add_post(dialect.path, generate_handler(dialect))
    for path, handler in text_routes.ROUTES.items():
        app.router.add_post(path, handler)
    app.router.add_get("/v1/models", status_routes.list_models)
    app.router.add_get("/v1/models/{model_id:.+}", status_routes.show_model)
    app.router.add_get("/v1/explain", explain_routes.list_live)
    app.router.add_get("/v1/explain/{request_id}", explain_routes.explain)
    app.router.add_get("/livez", status_routes.livez)
    app.router.add_get("/readyz", status_routes.readyz)
    app.router.add_get("/health", status_routes.readyz)
    app.router.add_get("/metrics", status_routes.metrics)
    return app


def _api_keys(config: ServerConfig) -> ApiKeys | None:
    if not config.api_key_file:
        return None
    file = read_key_file(config.api_key_file)
    if file.warning:
        _log.warning("key_file_exposed", problem=file.warning)
    return file.keys
