"""The application on one screen: routes, middleware, and what they share."""

from aiohttp import web

from gateway import status_routes
from gateway.admission import Admission
from gateway.backends import Backends
from gateway.config import ServerConfig
from gateway.dialects import find_dialects
from gateway.handler import generate_handler
from gateway.keys import ADMISSION, BACKENDS, CONFIG, KEEP_ALIVE, LIFECYCLE, METRICS
from gateway.lifecycle import Lifecycle
from gateway.middleware.access_log import access_log_middleware
from gateway.middleware.drain import drain_middleware
from gateway.middleware.errors import errors_middleware
from gateway.middleware.request_id import add_standard_headers, request_id_middleware
from gateway.sse import KeepAlive
from gateway.telemetry.metrics import Metrics


def build_app(config: ServerConfig) -> web.Application:
    """Return the application, with no backend yet: the lifespan adds it when it has loaded."""
    access_log = (access_log_middleware,) if config.access_log else ()
    app = web.Application(
        middlewares=(request_id_middleware, *access_log, drain_middleware, errors_middleware),
        client_max_size=config.max_body_bytes,
        handler_args={"auto_decompress": False},  # compressed bodies are refused, not unpacked
    )
    app[CONFIG] = config
    app[LIFECYCLE] = Lifecycle()
    app[ADMISSION] = Admission(max_admitted=config.engine.max_running + config.max_queued)
    app[BACKENDS] = Backends(aliases=config.aliases)
    app[METRICS] = Metrics(admission=app[ADMISSION], backends=app[BACKENDS])
    app[KEEP_ALIVE] = KeepAlive(every_s=config.keep_alive_s)
    app.on_response_prepare.append(add_standard_headers)

    for dialect in find_dialects():
        app.router.add_post(dialect.path, generate_handler(dialect))
    app.router.add_get("/v1/models", status_routes.list_models)
    app.router.add_get("/v1/models/{model_id:.+}", status_routes.show_model)
    app.router.add_get("/livez", status_routes.livez)
    app.router.add_get("/readyz", status_routes.readyz)
    app.router.add_get("/metrics", status_routes.metrics)
    return app
