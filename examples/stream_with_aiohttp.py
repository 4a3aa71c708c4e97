"""Stream a chat from a running server with plain HTTP: what server-sent events look like on the wire.

python examples/stream_with_aiohttp.py "Why is the sky blue?"
"""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from typing import Any

import aiohttp


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """Yield each event of the stream; lines that begin with a colon keep the connection alive."""
    async for raw in response.content:
        line = raw.decode().strip()
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


async def main() -> None:
    url = os.environ.get("TIDEGATE_URL", "http://127.0.0.1:8000")
    question = " ".join(sys.argv[1:]) or "Name three rivers of Europe."
    body = {
        "model": "smollm2-135m",
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 128,
        "temperature": 0,
        "stream": True,
    }
    async with (
        aiohttp.ClientSession(raise_for_status=True) as session,
        session.post(f"{url}/v1/chat/completions", json=body) as response,
    ):
        async for event in events(response):
            for choice in event["choices"]:
                print(choice["delta"].get("content") or "", end="", flush=True)
    print()


if __name__ == "__main__":
    asyncio.run(main())
