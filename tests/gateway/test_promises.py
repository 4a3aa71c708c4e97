"""Random clients against one server: each gets one end, and afterwards nothing is held."""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.backends.scripted import Script
from gateway.errors import GenerationFailed
from gateway.keys import METRICS
from tests.gateway.serving import (
    Response,
    Server,
    chat_body,
    connected,
    http_request,
    metric,
    scripted,
    sse_data,
)

actions = st.lists(
    st.tuples(
        st.sampled_from(["stay", "leave", "leave at once", "whole", "leave whole", "malformed"]),
        st.integers(0, 6),
    ),
    min_size=1,
    max_size=12,
)
scripts = st.builds(
    Script,
    deltas=st.lists(st.text(min_size=1, max_size=3), max_size=8).map(tuple),
    every_s=st.sampled_from([0.0, 0.001]),
    fails_with=st.none() | st.just((GenerationFailed.code, "it broke")),
    raises=st.none() | st.just(ZeroDivisionError()),
)


async def act(server: Server, action: str, *, num_chunks: int) -> None:
    async with connected(server) as connection:
        body = b"{" if action == "malformed" else chat_body(stream="whole" not in action)
        connection.send(http_request(body))
        if action == "leave at once":
            connection.leave()
        elif action == "leave whole":
            for _ in range(num_chunks):
                await asyncio.sleep(0)
            connection.leave()
        elif action == "leave":
            await connection.head()
            for _ in range(num_chunks):
                if not await connection.chunk():
                    break
            connection.leave()
        else:
            check_end(await connection.response(), action=action)


def check_end(response: Response, *, action: str) -> None:
    """Exactly one end: a status, `[DONE]`, or an error as the last event."""
    if action == "malformed":
        assert response.status == 400
    elif action == "whole":
        assert response.status in (200, 500)
    else:
        assert response.status == 200
        events = sse_data(response.body)
        ends = [event for event in events if event == "[DONE]" or "error" in event]
        assert len(ends) == 1
        assert events[-1] is ends[0]


@settings(max_examples=40)
@given(script=scripts, actions=actions)
async def test_whatever_clients_do_everyone_gets_one_end_and_nothing_is_held(
    script: Script, actions: list[tuple[str, int]]
) -> None:
    async with scripted(script, access_log=False) as (server, backend), asyncio.timeout(20):
        async with asyncio.TaskGroup() as tasks:
            for action, num_chunks in actions:
                tasks.create_task(act(server, action, num_chunks=num_chunks))
        await backend.until_running(0)
        outcomes = [
            float(line.rpartition(" ")[2])
            for line in server.app[METRICS].scrape().decode().splitlines()
            if line.startswith("tidegate_requests_total{")
        ]
        assert sum(outcomes) == backend.num_opened
        assert metric(server.app[METRICS].scrape(), "tidegate_requests_running") == 0
