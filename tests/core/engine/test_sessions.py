"""Tenants and sessions reach the engine's scheduler and cache: each test fails without what it names."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack

import pytest

from core import ConfigError, Engine, TokenOutput
from core.engine.client import TokenStream
from core.scheduler.sessions import MAX_IDLE_S
from tests.core.engine.loops import on_each_loop
from tests.core.engine.running import collect, config, greedy, ids, opened, wait_for
from tests.fakes.kv_worker import generate_alone

Asked = tuple[str, str, str, Sequence[int]]
"""Name, tenant, session, prompt."""

FLOOD: list[Asked] = [(f"flood{n}", "flood", "s", (n, 1, 2, 3, 4)) for n in range(4)]


async def order_of_ends(engine: Engine, asked: Sequence[Asked]) -> list[str]:
    """Submit all before the first step; who ended when. Each gets the tokens it would get alone."""
    ended: list[str] = []

    async def read(name: str, prompt: Sequence[int], stream: TokenStream) -> None:
        assert ids([output async for output in stream]) == generate_alone(prompt, greedy(3))
        ended.append(name)

    async with AsyncExitStack() as scopes, asyncio.TaskGroup() as tasks:
        streams = [
            await scopes.enter_async_context(
                engine.generate(name, prompt, greedy(3), tenant=tenant, session_id=session_id)
            )
            for name, tenant, session_id, prompt in asked
        ]
        for (name, _, _, prompt), stream in zip(asked, streams, strict=True):
            tasks.create_task(read(name, prompt, stream))
    return ended


@pytest.mark.parametrize(
    ("policy", "late", "place"),
    [
        ("first_come", ("late", "quiet", "t", (9, 9, 9)), 4),
        ("fair_tenants", ("late", "quiet", "s", (9, 9, 9)), 1),
        ("fair_tenants", ("late", "flood", "t", (9, 9, 9)), 4),
        ("least_attained", ("late", "flood", "t", (9, 9, 9)), 1),
        ("least_attained", ("late", "flood", "s", (9, 9, 9)), 4),
    ],
)
async def test_who_comes_late_goes_before_a_flood_where_the_policy_says_so(
    policy: str, late: Asked, place: int
) -> None:
    async with opened(config(policy=policy, max_running=1)) as engine:
        ended = await order_of_ends(engine, [*FLOOD, late])
    assert ended.index("late") == place, ended


@pytest.mark.parametrize(("policy", "place"), [("first_come", 2), ("longest_prefix", 0)])
async def test_a_warm_prompt_goes_before_cold_ones_with_longest_prefix(policy: str, place: int) -> None:
    warm = tuple(range(20, 40))
    async with opened(config(policy=policy, max_running=1)) as engine:
        await collect(engine, warm, greedy(1))
        asked: list[Asked] = [
            ("cold", "", "", (1, 2, 3)),
            ("cool", "", "", (4, 5, 6)),
            ("warm", "", "", warm),
        ]
        ended = await order_of_ends(engine, asked)
    assert ended.index("warm") == place


async def test_a_policy_that_does_not_exist_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(
        ConfigError, match=r"^policy is 'lottery'; it must be one of fair_tenants, first_come"
    ):
        async with opened(config("fake:no_such_option=1", policy="lottery")):
            raise AssertionError("it opened")


async def turn(engine: Engine, prompt: Sequence[int], session_id: str, *, max_tokens: int = 2) -> TokenOutput:
    """One turn of a session; its last output."""
    async with engine.generate("turn", prompt, greedy(max_tokens), session_id=session_id) as stream:
        outputs = [output async for output in stream]
    assert ids(outputs) == generate_alone(prompt, greedy(max_tokens))
    return outputs[-1]


@pytest.mark.parametrize(("goes_on_as", "stays"), [("s", True), ("another", False)])
async def test_what_a_session_left_behind_is_evicted_before_what_others_may_come_back_to(
    goes_on_as: str, stays: bool
) -> None:
    other = [2, *range(20, 50)]
    async with opened(config(num_blocks=22, block_size=4)) as engine:
        await turn(engine, other, "other")
        await turn(engine, [1, *range(60, 95)], "s")
        await turn(engine, [1, 61, 62, 63, 64, 65], goes_on_as)  # its history in short
        await turn(engine, [3, *range(50, 78)], "third")
        again = await turn(engine, other, "other")
    assert (again.num_cached_tokens >= len(other) - 4) == stays, again


@pytest.mark.parametrize("session_gate", [True, False])
async def test_agents_that_do_not_fit_find_their_prefixes_where_some_of_them_wait(session_gate: bool) -> None:
    """Eight agents of 40 tokens and more in a pool of 160, each asking again as soon as it is answered."""
    num_found = num_known = 0

    async def agent(engine: Engine, number: int) -> None:
        nonlocal num_found, num_known
        prompt = [number, *range(20 + number, 58 + number)]
        for turn_number in range(12):
            output = await turn(engine, prompt, f"agent-{number}")
            if turn_number:
                num_known += len(prompt) - 2
                num_found += output.num_cached_tokens
            prompt = [*prompt, 90 - turn_number, number]

    options = config(num_blocks=40, block_size=4, max_running=2, session_gate=session_gate)
    async with opened(options) as engine, asyncio.TaskGroup() as tasks:
        for number in range(8):
            tasks.create_task(agent(engine, number))
    found_share = num_found / num_known
    assert (found_share > 0.5) == session_gate, found_share


def holds_one_back(engine: Engine) -> bool:
    """Somebody waits although nobody runs."""
    stats = engine.stats().scheduler
    return stats.num_waiting == 1 and stats.num_running == 0


async def fill_with_two_sessions(engine: Engine) -> None:
    for number, name in enumerate("ab"):
        await turn(engine, [number, *range(20, 75)], name)


SLOW = "fake:step_s=0.3"
"""What a session would lose then takes long enough to compute that it is waited for."""


@on_each_loop
async def test_an_idle_engine_waits_for_sessions_and_goes_on_by_itself_when_none_comes() -> None:
    async with opened(config(SLOW, num_blocks=40, block_size=4)) as engine:
        await fill_with_two_sessions(engine)
        third = asyncio.create_task(turn(engine, [2, *range(20, 75)], "c"))
        await wait_for(lambda: holds_one_back(engine))
        async with asyncio.timeout(MAX_IDLE_S + 3):  # nothing else happens; its own steps take about one
            await third


async def test_a_session_that_comes_back_is_served_before_the_one_that_waits_for_its_seat() -> None:
    async with opened(config(SLOW, num_blocks=40, block_size=4)) as engine:
        await fill_with_two_sessions(engine)
        third = asyncio.create_task(turn(engine, [2, *range(20, 75)], "c"))
        await wait_for(lambda: holds_one_back(engine))
        again = await turn(engine, [0, *range(20, 75), 3, 4], "a")
        assert again.num_cached_tokens >= 52
        await third


async def test_a_held_request_whose_client_leaves_lets_the_engine_rest() -> None:
    async with opened(config(SLOW, num_blocks=40, block_size=4)) as engine:
        await fill_with_two_sessions(engine)
        third = asyncio.create_task(turn(engine, [2, *range(20, 75)], "c"))
        await wait_for(lambda: holds_one_back(engine))
        third.cancel()
        await wait_for(lambda: engine.stats().scheduler.num_waiting == 0)
        assert (await turn(engine, [0, *range(20, 75), 3, 4], "a")).num_cached_tokens >= 52
