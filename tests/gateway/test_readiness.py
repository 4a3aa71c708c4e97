"""What happens to the worker shows in the probes within seconds, and everybody who waits is told."""

import asyncio
import os
import signal
from collections.abc import Callable
from functools import partial

import pytest

from core.engine import engine as engine_module
from gateway.keys import METRICS
from tests.core.engine.leftovers import children
from tests.core.engine.running import wait_for
from tests.gateway.serving import Server, ask, connected, get, http_request, metric, sse_data
from tests.gateway.test_local_backend import Opened, greedy, served

STEP_S = ",step_s=0.01"
IN_A_PROCESS = {"executor": "process", "step_deadline_s": 1.0}


async def until(server: Server, path: str, status: int, *, within_s: float = 10.0) -> str:
    """Ask a probe until it says `status`; return what it says."""
    async with asyncio.timeout(within_s):
        while (response := await get(server, path)).status != status:  # noqa: ASYNC110  # as a prober does
            await asyncio.sleep(0.01)
    return str(response.json.get("detail", ""))


def the_worker() -> int:
    (pid,) = children()
    return pid


async def outcomes(server: Server, opened: Opened, *, then: Callable[[], None]) -> list[str]:
    """Have three clients wait, two of them streamed, do something, and return what each was told."""

    async def stream() -> str:
        async with connected(server) as connection:
            connection.send(http_request(greedy("A long story", max_tokens=900, stream=True)))
            last = sse_data((await connection.response()).body)[-1]
        return str(last if last == "[DONE]" else last["error"]["code"])

    async def whole() -> str:
        response = await ask(server, greedy("Another story", max_tokens=900))
        return "ok" if response.status == 200 else str(response.error["code"])

    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        waiting = [tasks.create_task(stream()), tasks.create_task(stream()), tasks.create_task(whole())]
        await wait_for(lambda: opened.engine.stats().scheduler.num_running == 3)
        then()
    return [task.result() for task in waiting]


async def test_a_killed_worker_fails_who_waited_and_the_next_one_serves() -> None:
    async with served(STEP_S, engine_fields=IN_A_PROCESS) as (server, opened):
        worker = the_worker()
        told = await outcomes(server, opened, then=partial(os.kill, worker, signal.SIGKILL))
        assert told == ["generation_failed"] * 3
        await until(server, "/readyz", 200)
        assert (await ask(server, greedy("Hello", max_tokens=3))).status == 200
        assert metric(server.app[METRICS].scrape(), "tidegate_worker_restarts_total") == 1
        assert metric(server.app[METRICS].scrape(), 'tidegate_kv_blocks{state="held"}') == 0


async def test_a_worker_killed_twice_turns_both_probes_red_for_good() -> None:
    async with served(STEP_S, engine_fields=IN_A_PROCESS) as (server, opened):
        for _ in range(2):
            worker = the_worker()
            told = await outcomes(server, opened, then=partial(os.kill, worker, signal.SIGKILL))
            assert told == ["generation_failed"] * 3
            await wait_for(lambda: opened.engine.health().alive or not opened.engine.health().accepting)
        assert "SIGKILL" in await until(server, "/readyz", 503)
        assert "SIGKILL" in await until(server, "/livez", 503)
        refused = await ask(server, greedy("Hello", max_tokens=3))
        assert (refused.status, refused.error["code"]) == (503, "engine_failed")
        assert "retry-after" not in refused.headers, "trying again helps nobody"
        assert b"SIGKILL" not in refused.body


async def test_a_frozen_worker_turns_readiness_red_before_its_deadline_and_fails_who_waited_at_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_module, "STALL_MIN_S", 0.2)
    fields = IN_A_PROCESS | {"step_deadline_s": 3.0}
    async with served(STEP_S, engine_fields=fields) as (server, opened), asyncio.TaskGroup() as tasks:
        await ask(server, greedy("Hello", max_tokens=3))  # so that there is a usual step to compare with
        worker = the_worker()
        loop = asyncio.get_running_loop()
        frozen_at = 0.0

        def freeze() -> None:
            nonlocal frozen_at
            frozen_at = loop.time()
            os.kill(worker, signal.SIGSTOP)

        told = tasks.create_task(outcomes(server, opened, then=freeze))
        await wait_for(lambda: frozen_at > 0)
        assert "a step has been running" in await until(server, "/readyz", 503)
        assert loop.time() - frozen_at < 2.5
        assert (await get(server, "/livez")).status == 200  # a restart of the server is not called for yet
        assert await told == ["generation_failed"] * 3
        await until(server, "/readyz", 200)
        assert (await ask(server, greedy("Hello", max_tokens=3))).status == 200


async def test_a_worker_frozen_while_idle_turns_readiness_red_without_anybody_asking(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_module, "STALL_MIN_S", 0.2)
    async with served(engine_fields=IN_A_PROCESS) as (server, opened), asyncio.TaskGroup() as tasks:
        os.kill(the_worker(), signal.SIGSTOP)
        watching = tasks.create_task(opened.engine.memory())  # what the backend does every few seconds
        assert "has not answered" in await until(server, "/readyz", 503)
        await watching  # it ends at its deadline, with the worker
        await until(server, "/readyz", 200)
        assert (await ask(server, greedy("Hello", max_tokens=3))).status == 200
