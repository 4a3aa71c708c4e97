"""Explanations, numbers and the trace of the default model, through a socket."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from core import EngineConfig
from gateway.backends.local import open_local_backend
from tests.core.engine.traces import check_trace, read_whole, states_of
from tests.gateway.commands.running import clean_environment, command
from tests.gateway.serving import CHAT, Server, chat_body, connected, get, http_request, metric, serving

pytestmark = pytest.mark.slow

LOG = "Day 1: wind from the west, all well. " * 6
KEYS = "harbour: key-of-the-harbour\nlighthouse: key-of-the-lighthouse\n"


@asynccontextmanager
async def served(model: Path, *, trace: str = "", **changes: Any) -> AsyncIterator[Server]:
    engine = EngineConfig(
        checkpoint=str(model),
        num_blocks=256,
        trace=trace,
        cache_dir=os.environ.get("TIDEGATE_CACHE_DIR", ""),
        compile="off",
    )
    async with serving(open_local_backend, engine=engine, model_id="smollm2-135m", **changes) as server:
        yield server
        server.check_nothing_is_held()


async def chat(server: Server, content: str, *, headers: str = "", **fields: Any) -> Any:
    messages = [{"role": "user", "content": content}]
    body = chat_body(model="smollm2-135m", messages=messages, **{"temperature": 0, "max_tokens": 4, **fields})
    async with connected(server) as connection, asyncio.timeout(60):
        connection.send(http_request(body, path=CHAT, headers=headers))
        response = await connection.response()
    assert response.status == 200, response.body
    return response


async def get_as(server: Server, path: str, key: str) -> Any:
    async with connected(server) as connection, asyncio.timeout(60):
        connection.send(http_request(b"", path=path, method="GET", headers=f"X-Api-Key: {key}\r\n"))
        return await connection.response()


async def explained(server: Server, name: str) -> dict[str, Any]:
    answer = await get(server, f"/v1/explain/{name}")
    assert answer.status == 200, answer.body
    (choice,) = answer.json["choices"]
    states = [choice[f"{state}_s"] for state in ("queued", "prefilling", "decoding", "stalled")]
    assert sum(states) == pytest.approx(choice["total_s"])
    return dict(choice)


async def live_requests(server: Server) -> list[dict[str, Any]]:
    return list((await get(server, "/v1/explain")).json["data"])


async def test_a_request_is_explained_to_its_client_and_at_which_token_it_diverged(
    default_model_path: Path, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.json"
    async with served(default_model_path, trace=str(trace)) as server:
        # Twenty tokens: the block in which the prompt ends is filled, and only full ones are cached.
        fills_it: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True}
        first = (await chat(server, LOG + "Who writes?", session_id="voyage", **fills_it)).json
        await chat(server, LOG + "Who writes?", headers="X-Request-Id: mine-1\r\n")
        other = (await chat(server, LOG + "What day is it?")).json
        of_first = await explained(server, first["id"])
        of_again = await explained(server, "mine-1")
        of_other = await explained(server, other["id"])
        scraped = (await get(server, "/metrics")).body

    num_prompt = first["usage"]["prompt_tokens"]
    assert (of_first["cache"], of_first["num_prefilled_tokens"]) == ("miss", num_prompt)
    assert (of_first["session_id"], of_first["nearest_request_id"]) == ("voyage", None)
    assert (of_first["status"], of_first["finish_reason"]) == ("finished", "length")
    assert of_first["prefilling_s"] > 0
    assert of_first["decoding_s"] > 0

    assert (of_again["cache"], of_again["diverged_at"]) == ("hit", num_prompt)
    assert of_again["nearest_session_id"] == "voyage"
    assert first["id"] == f"chatcmpl-{of_again['nearest_request_id']}"
    assert of_again["num_prefilled_tokens"] + of_again["num_cached_tokens"] == num_prompt

    assert of_other["cache"] == "hit"
    assert of_other["num_cached_tokens"] <= of_other["diverged_at"] < num_prompt
    assert of_other["diverged_at"] > 50

    kinds = {kind: metric(scraped, f'tidegate_step_tokens_total{{kind="{kind}"}}') for kind in KINDS}
    num_prefilled = sum(each["num_prefilled_tokens"] for each in (of_first, of_again, of_other))
    assert kinds == {"prefill": num_prefilled, "recomputed": 0, "decode": 25}
    parts = [metric(scraped, f'tidegate_step_part_seconds_total{{part="{part}"}}') for part in PARTS]
    assert all(seconds > 0 for seconds in parts)
    check_trace(events := read_whole(trace))
    assert states_of(events, of_first["engine_id"]) == ["queued", "prefill", "decode"]


KINDS = ("prefill", "recomputed", "decode")
PARTS = ("schedule", "build", "forward", "sample", "transfer", "deliver")


async def test_a_tenant_is_told_of_its_own_requests_only(default_model_path: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(KEYS)
    keys.chmod(0o600)
    async with served(default_model_path, api_key_file=str(keys)) as server:
        harbour = "X-Api-Key: key-of-the-harbour\r\n"
        response = await chat(server, LOG, headers=f"{harbour}X-Request-Id: mine\r\n")
        names = (response.json["id"], response.json["id"].removeprefix("chatcmpl-"), "mine")
        for name in names:
            assert (await get_as(server, f"/v1/explain/{name}", "key-of-the-harbour")).status == 200
            refused = await get_as(server, f"/v1/explain/{name}", "key-of-the-lighthouse")
            assert (refused.status, refused.error["code"]) == (404, "request_not_found")
        lighthouse = "X-Api-Key: key-of-the-lighthouse\r\n"
        answer = await chat(server, LOG, headers=lighthouse)
        own = await get_as(server, f"/v1/explain/{answer.json['id']}", "key-of-the-lighthouse")
        (choice,) = own.json["choices"]
        assert (choice["diverged_at"], choice["nearest_request_id"]) == (0, None), "not even that it is there"


async def test_live_requests_are_listed_and_stand_in_top(default_model_path: Path) -> None:
    async with served(default_model_path, send_timeout_s=600.0) as server, connected(server) as connection:
        body = chat_body(
            model="smollm2-135m", stream=True, max_tokens=3500, ignore_eos=True, session_id="long[voyage]"
        )
        connection.send(http_request(body))
        await connection.head()
        async with asyncio.timeout(60):
            while not (live := (await live_requests(server))[0])["num_output_tokens"]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)  # a count, not an event
        assert (live["status"], live["session_id"]) == ("running", "long[voyage]")
        assert live["num_output_tokens"] > 0
        process = await asyncio.create_subprocess_exec(
            *command("top", "--once", "--every", "0.1", "--url", server.url),
            env=clean_environment({}),
            stdout=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(60):
            out = (await process.communicate())[0].decode()
        connection.leave()
        row = next(line for line in out.splitlines() if line.startswith(live["request_id"][:12]))
        assert row.split()[1:3] == ["long[voyage]", "running"]
        assert row.split()[-1] == "0"
        async with asyncio.timeout(30):
            while await live_requests(server):  # noqa: ASYNC110 -- a list, not an event
                await asyncio.sleep(0.01)
        of_it = await explained(server, live["request_id"])
        assert of_it["finish_reason"] == "abort"
