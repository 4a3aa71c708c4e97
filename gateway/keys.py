"""The typed places where the application and a request keep what they carry."""

from aiohttp import web

from gateway.admission import Admission
from gateway.api_keys import ApiKeys
from gateway.backends import Backends
from gateway.config import ServerConfig
from gateway.dialects import Dialect
from gateway.lifecycle import Lifecycle
from gateway.sse import EventStream, KeepAlive
from gateway.telemetry.known_requests import KnownRequests
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.request_record import RequestRecord

CONFIG = web.AppKey("config", ServerConfig)
ADMISSION = web.AppKey("admission", Admission)
BACKENDS = web.AppKey("backends", Backends)
LIFECYCLE = web.AppKey("lifecycle", Lifecycle)
METRICS = web.AppKey("metrics", Metrics)
API_KEYS: web.AppKey[ApiKeys | None] = web.AppKey("api_keys")
"""None: everybody may ask."""
KEEP_ALIVE = web.AppKey("keep_alive", KeepAlive)

KNOWN_REQUESTS = web.AppKey("known_requests", KnownRequests)

RECORD = web.RequestKey("record", RequestRecord)
DIALECT: web.RequestKey[Dialect] = web.RequestKey("dialect")
STREAM = web.RequestKey("stream", EventStream)
