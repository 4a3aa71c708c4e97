"""Clients that leave at any moment, in any way."""

import asyncio
import random
from contextlib import suppress

from tests.gateway.serving import Server, chat_body, connected, http_request

WAYS = (
    "before a byte",
    "in the headers",
    "in the body",
    "after sending",
    "after some turns of the loop",
    "after the status line",
    "after some events",
    "with half a connection",
    "never",
)


async def visit(server: Server, rng: random.Random, *, max_tokens: int, words: str) -> str:
    """Ask something nobody has asked before and leave in a way that chance decides. Returns the way."""
    way = rng.choice(WAYS)
    stream = rng.random() < 0.7
    content = f"{words} {rng.getrandbits(64):x} " + "word " * rng.choice((0, 3, 30, 80))
    body = chat_body(
        messages=[{"role": "user", "content": content}],
        stream=stream,
        max_tokens=rng.randint(1, max_tokens),
        temperature=rng.choice((0, 1)),
        model=rng.choice(("scripted", "scripted", "scripted", f"m{rng.getrandbits(32)}")),
    )
    raw = http_request(body, headers=f"X-Request-Id: r{rng.getrandbits(32)}\r\n")
    # A server that refuses hangs up, possibly before we do.
    with suppress(ConnectionError, asyncio.IncompleteReadError):
        async with connected(server) as connection:
            connection.send(_sent(raw, way, rng))
            if way == "after some turns of the loop":
                for _ in range(rng.randint(0, 60)):
                    await asyncio.sleep(0)
            elif way == "with half a connection":
                connection.writer.write_eof()
                await connection.reader.read()
            elif way == "never":
                await connection.response()
            elif way in ("after the status line", "after some events"):
                _, headers = await connection.head()
                if way == "after some events" and headers.get("transfer-encoding") == "chunked":
                    for _ in range(rng.randint(1, 12)):
                        if not await connection.chunk():
                            break
            connection.leave()
    return way


def _sent(raw: bytes, way: str, rng: random.Random) -> bytes:
    head = raw.index(b"\r\n\r\n")
    match way:
        case "before a byte":
            return b""
        case "in the headers":
            return raw[: rng.randint(1, head)]
        case "in the body":
            return raw[: rng.randint(head + 4, len(raw) - 1)]
        case _:
            return raw


async def crowd(
    server: Server, *, num_visits: int, at_once: int, seed: int, max_tokens: int, words: str = "Tell me"
) -> dict[str, int]:
    """So many visits, some at once. Returns how often each way was taken."""
    rng = random.Random(seed)
    ways = dict.fromkeys(WAYS, 0)
    left = iter(range(num_visits))

    async def visitor() -> None:
        for _ in left:
            ways[await visit(server, rng, max_tokens=max_tokens, words=words)] += 1

    async with asyncio.TaskGroup() as tasks:
        for _ in range(at_once):
            tasks.create_task(visitor())
    return ways
