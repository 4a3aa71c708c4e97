"""The one HTTP handler. Every dialect and every route that generates text goes through it."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial

import msgspec
from aiohttp import web

from gateway.body import parsed, read_body
from gateway.dialects import AnswerWriter, Dialect
from gateway.errors import GenerationFailed, SlowReader, describe
from gateway.events import Event, Failed
from gateway.keys import (
    ADMISSION,
    BACKENDS,
    CONFIG,
    DIALECT,
    KEEP_ALIVE,
    KNOWN_REQUESTS,
    METRICS,
    RECORD,
    STREAM,
)
from gateway.sse import EventStream

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def generate_handler(dialect: Dialect) -> Handler:
    """Build the aiohttp handler that serves generation requests written in `dialect`."""

    async def handle(http: web.Request) -> web.StreamResponse:
        """Parse, admit, generate, answer.

        However this ends (finished, failed, client gone, server draining), leaving the scopes aborts
        an unfinished generation and returns the permit.

        Raises:
            GatewayError, EngineError: before the first byte; the error middleware answers.
        """
        http[DIALECT] = dialect
        app, record = http.app, http[RECORD]
        app[ADMISSION].refuse_if_closed()
        with app[ADMISSION].reading() as reading:
            body = await read_body(http, reading)
            parse = partial(dialect.parse, max_depth=app[CONFIG].max_json_depth)
            request = await parsed(body, parse)
        request = msgspec.structs.replace(request, tenant=record.tenant)
        backend, model = app[BACKENDS].find(request.model)
        record.fields |= {"model": model, "stream": request.stream}
        answer = dialect.writer(
            request,
            request_id=record.request_id,
            created=int(time.time()),
            model=model,
            fingerprint=backend.fingerprint,
        )
        with app[ADMISSION].permit(request.num_choices), _counted(http):
            app[KNOWN_REQUESTS].remember(record, num_live=app[ADMISSION].num_admitted)
            async with backend.open(request, request_id=record.request_id) as events:
                if request.stream:
                    return await _stream(http, events, answer=answer)
                whole = await _collect(http, events, answer=answer)
        return await send_whole(http, whole)

    return handle


async def _stream(
    http: web.Request, events: AsyncIterator[Event], *, answer: AnswerWriter
) -> web.StreamResponse:
    """Send events as they come. The status line waits for the first one: until then an error is a status."""
    config, metrics, record = http.app[CONFIG], http.app[METRICS], http[RECORD]
    stream = http[STREAM] = EventStream(
        http, answer=answer, send_timeout_s=config.send_timeout_s, buffer_bytes=config.send_buffer_bytes
    )
    with http.app[KEEP_ALIVE].watching(stream):
        async for event in events:
            record.saw(event, metrics)
            if isinstance(event, Failed):
                raise GenerationFailed(event)
            if not stream.started:
                await stream.start()
            await stream.send(event)
    await stream.finish()
    return stream.response


async def _collect(http: web.Request, events: AsyncIterator[Event], *, answer: AnswerWriter) -> bytes:
    metrics, record = http.app[METRICS], http[RECORD]
    collected: list[Event] = []
    async for event in events:
        record.saw(event, metrics)
        if isinstance(event, Failed):
            raise GenerationFailed(event)
        collected.append(event)
    return answer.whole(collected)


async def send_whole(http: web.Request, body: bytes) -> web.StreamResponse:
    """Send a complete answer under the same deadline as a streamed one, but holding nothing meanwhile."""
    response = web.Response(body=body, content_type="application/json")
    try:
        async with asyncio.timeout(http.app[CONFIG].send_timeout_s):
            await response.prepare(http)
            await response.write_eof()
    except TimeoutError:
        http[RECORD].fields["outcome"] = SlowReader.code
        if http.transport is not None:
            http.transport.abort()
    return response


@contextmanager
def _counted(http: web.Request) -> Iterator[None]:
    """Count how the generation ended, once, whatever ended it."""
    record = http[RECORD]
    try:
        yield
    except BaseException as error:
        gone = isinstance(error, asyncio.CancelledError | ConnectionError)
        record.fields["outcome"] = (
            "client_gone" if gone or not isinstance(error, Exception) else describe(error).code
        )
        raise
    finally:
        http.app[METRICS].saw_end(str(record.fields.get("outcome", "unknown")), request_s=record.age_s)
