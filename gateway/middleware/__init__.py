"""What surrounds every handler, one small file each. Pass-through only: none of them wraps a stream.

The order is the application's: request_id, access_log, cors, drain, errors, api_key.
"""

from collections.abc import Awaitable, Callable

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
