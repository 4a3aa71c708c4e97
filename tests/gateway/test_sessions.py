"""Tenants, sessions and salts from a socket to the cache: real scheduler and cache, a model without tensors.

Each test fails without what it names.
"""

import asyncio
import json
from typing import Any

import pytest

from core import SamplingParams
from tests.core.engine.running import wait_for
from tests.gateway.serving import Server, ask, chat_body
from tests.gateway.test_local_backend import Opened, served

COMPLETIONS = "/v1/completions"
KEYS = {"flood": "key-of-the-flood-tenant", "quiet": "key-of-the-quiet-tenant"}


@pytest.fixture
def key_file(tmp_path) -> str:
    file = tmp_path / "keys"
    file.write_text("".join(f"{tenant}: {key}\n" for tenant, key in KEYS.items()))
    file.chmod(0o600)
    return str(file)


def completion(prompt: str, **fields: Any) -> bytes:
    return json.dumps({"model": "scripted", "prompt": prompt, "max_tokens": 2, **fields}).encode()


async def num_cached(server: Server, body: bytes, path: str) -> int:
    answer = await ask(server, body, path=path)
    assert answer.status == 200, answer.body
    cached: int = answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


@pytest.mark.parametrize("path", ["/v1/chat/completions", COMPLETIONS])
async def test_a_salt_shares_with_itself_and_with_nobody_else(path: str) -> None:
    def body(salt: str) -> bytes:
        return (
            completion("wind from the west, all well", cache_salt=salt)
            if path == COMPLETIONS
            else chat_body(cache_salt=salt, max_tokens=2)
        )

    async with served() as (server, _):
        cached = [await num_cached(server, body(salt), path) for salt in ("a", "a", "b", "", "")]
    assert cached[0] == cached[2] == cached[3] == 0
    assert cached[1] == cached[4] > 20


async def order_of_ends(
    server: Server, opened: Opened, asked: list[tuple[str, str, dict[str, Any]]]
) -> list[str]:
    """Send (name, tenant, fields) one after the other while the engine is busy; who was answered when."""
    ended: list[str] = []

    async def send(name: str, tenant: str, fields: dict[str, Any]) -> None:
        body = completion(f"{name}: all well", **fields)
        answer = await ask(server, body, path=COMPLETIONS, headers=f"X-Api-Key: {KEYS[tenant]}\r\n")
        assert answer.status == 200, answer.body
        ended.append(name)

    def num_waiting() -> int:
        return opened.engine.stats().scheduler.num_waiting

    blocker = opened.engine.generate("blocker", (1,), SamplingParams(max_tokens=1000), tenant="blocker")
    async with asyncio.TaskGroup() as tasks, blocker:
        await anext(blocker)
        for count, (name, tenant, fields) in enumerate(asked, 1):
            tasks.create_task(send(name, tenant, fields))
            await wait_for(lambda expected=count: num_waiting() == expected)  # type: ignore[misc]
    return ended


FLOOD = [(f"flood{n}", "flood", {"session_id": "s"}) for n in range(4)]


@pytest.mark.parametrize(
    ("policy", "tenant", "fields", "place"),
    [
        ("first_come", "quiet", {"session_id": "t"}, 4),
        ("fair_tenants", "quiet", {"session_id": "s"}, 1),
        ("fair_tenants", "flood", {"session_id": "t"}, 4),
        ("least_attained", "flood", {"session_id": "t"}, 1),
        ("least_attained", "flood", {"prompt_cache_key": "t"}, 1),
        ("least_attained", "flood", {"metadata": {"user_id": "t"}}, 1),
        ("least_attained", "flood", {"conversation": "t"}, 1),
        ("least_attained", "flood", {"conversation": "s"}, 4),
    ],
)
async def test_who_comes_late_goes_before_a_flood_where_the_policy_says_so(
    key_file: str, policy: str, tenant: str, fields: dict[str, Any], place: int
) -> None:
    options = {"policy": policy, "max_running": 1}
    async with served(",step_s=0.01", engine_fields=options, api_key_file=key_file) as (server, opened):
        ended = await order_of_ends(server, opened, [*FLOOD, ("late", tenant, fields)])
    assert ended.index("late") == place, ended


async def test_a_warm_prompt_goes_before_cold_ones_with_longest_prefix(key_file: str) -> None:
    options = {"policy": "longest_prefix", "max_running": 1}
    async with served(",step_s=0.01", engine_fields=options, api_key_file=key_file) as (server, opened):
        await ask(
            server,
            completion("warm: all well"),
            path=COMPLETIONS,
            headers=f"X-Api-Key: {KEYS['quiet']}\r\n",
        )
        ended = await order_of_ends(
            server, opened, [("cold", "quiet", {}), ("cool", "quiet", {}), ("warm", "quiet", {})]
        )
    assert ended[0] == "warm", ended


@pytest.mark.parametrize(("goes_on_as", "stays"), [("s", True), ("another", False)])
async def test_what_a_session_left_behind_is_evicted_before_what_others_may_come_back_to(
    goes_on_as: str, stays: bool
) -> None:
    other = "another story " + "o" * 40
    async with served(engine_fields={"num_blocks": 38}) as (server, _):
        await num_cached(server, completion(other, session_id="other"), COMPLETIONS)
        await num_cached(server, completion("my story " + "x" * 50, session_id="s"), COMPLETIONS)
        await num_cached(server, completion("my story in short", session_id=goes_on_as), COMPLETIONS)
        await num_cached(server, completion("third story " + "t" * 40, session_id="third"), COMPLETIONS)
        cached = await num_cached(server, completion(other, session_id="other"), COMPLETIONS)
    assert (cached > 40) == stays, cached


@pytest.mark.parametrize("session_gate", [True, False])
async def test_a_session_that_does_not_fit_beside_others_waits_while_they_are_served(
    session_gate: bool,
) -> None:
    async def turn(server: Server, name: str, number: int) -> int:
        prompt = name * 400 + "." * number
        return await num_cached(server, completion(prompt, session_id=name), COMPLETIONS)

    options = {"num_blocks": 300, "max_running": 4, "session_gate": session_gate}
    async with served(",step_s=0.03", engine_fields=options) as (server, opened):
        busy = opened.engine.generate("busy", (1,), SamplingParams(max_tokens=600))
        async with asyncio.TaskGroup() as tasks, asyncio.timeout(60):
            async with busy:  # an idle engine would let anybody in
                await anext(busy)
                for name in "abcd":  # more than the pool holds
                    await turn(server, name, 0)
                await turn(server, "a", 1)  # all it had is gone
                late = tasks.create_task(turn(server, "d", 1))
                if session_gate:
                    await wait_for(lambda: opened.engine.stats().scheduler.num_waiting == 1)
                    assert await turn(server, "a", 2) > 350
                else:
                    await late
            await late
