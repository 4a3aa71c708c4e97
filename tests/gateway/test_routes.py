"""Everything that is not a generation: models, probes, metrics, unknown paths, limits, request ids."""

import asyncio
import json
import re

import pytest
from structlog.testing import capture_logs

from gateway.backends.scripted import Script
from tests.gateway.serving import ask, chat_body, connected, get, http_request, metric, scripted


async def test_models_are_listed_and_shown() -> None:
    async with scripted() as (server, _):
        listed = (await get(server, "/v1/models")).json
        assert [model["id"] for model in listed["data"]] == ["scripted"]
        assert (await get(server, "/v1/models/scripted")).json == listed["data"][0]


async def test_an_unknown_model_gets_404_naming_what_is_served() -> None:
    async with scripted() as (server, _):
        for response in (await get(server, "/v1/models/gpt-9"), await ask(server, chat_body(model="gpt-9"))):
            assert response.status == 404
            assert response.error["code"] == "model_not_found"
            assert response.error["param"] == "model"
            assert "served: scripted; `tidegate serve --alias NAME`" in response.error["message"]


async def test_aliases_are_listed_beside_the_model_they_stand_for() -> None:
    async with scripted(aliases=("gpt-9", "*", "gpt-9", "scripted")) as (server, _):
        listed = (await get(server, "/v1/models")).json["data"]
        assert [(model["id"], model["root"]) for model in listed] == [
            ("scripted", "scripted"),
            ("gpt-9", "scripted"),
        ]
    async with scripted(aliases=("gpt-9",)) as (server, _):
        refused = await ask(server, chat_body(model="gpt-8"))
        assert "served: scripted, also as gpt-9; " in refused.error["message"]


async def test_health_is_another_name_of_readyz() -> None:
    async with scripted() as (server, backend):
        for alive, status in ((True, 200), (False, 503)):
            backend.alive = alive
            health, ready = await get(server, "/health"), await get(server, "/readyz")
            assert (health.status, ready.status) == (status, status)
            assert health.json == ready.json
        backend.alive = True


@pytest.mark.parametrize("path", ["/", "/v2/chat", "/v1/responses2"])
async def test_a_path_that_is_no_route_says_where_the_routes_are(path: str) -> None:
    async with scripted() as (server, _):
        error = (await get(server, path)).error
    assert error["code"] == "route_not_found"
    assert all(known in error["message"] for known in ("/v1/models", "/livez", "/readyz"))


@pytest.mark.parametrize("aliases", [("gpt-9", "other/name"), ("*",)])
async def test_an_alias_is_served_under_the_models_own_name(aliases: tuple[str, ...]) -> None:
    async with scripted(aliases=aliases) as (server, _):
        for name in ("gpt-9", "other/name", "scripted"):
            assert (await ask(server, chat_body(model=name))).json["model"] == "scripted"
            assert (await get(server, f"/v1/models/{name}")).json["id"] == "scripted"


async def test_unknown_routes_and_methods_answer_in_json() -> None:
    async with scripted() as (server, _):
        nowhere = await ask(server, chat_body(), path="/v1/nowhere")
        wrong = await get(server, "/v1/chat/completions")
    assert (nowhere.status, nowhere.error["code"]) == (404, "route_not_found")
    assert (wrong.status, wrong.error["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"


async def test_livez_turns_red_when_a_backend_is_dead() -> None:
    async with scripted() as (server, backend):
        assert (await get(server, "/livez")).status == 200
        assert (await get(server, "/readyz")).json == {"status": "ready", "models": ["scripted"]}
        backend.alive = False
        assert (await get(server, "/livez")).status == 503
        assert (await get(server, "/readyz")).status == 503
        backend.alive = True


async def test_metrics_count_what_happened() -> None:
    async with scripted(Script(deltas=("a", "b", "c"))) as (server, _):
        await ask(server, chat_body(stream=True))
        await ask(server, chat_body(max_tokens=1))
        response = await get(server, "/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    text = response.body
    assert metric(text, 'tidegate_requests_total{outcome="stop"}') == 1
    assert metric(text, 'tidegate_requests_total{outcome="length"}') == 1
    assert metric(text, 'tidegate_tokens_total{kind="prompt"}') == 14
    assert metric(text, 'tidegate_tokens_total{kind="cached"}') == 6
    assert metric(text, 'tidegate_tokens_total{kind="output"}') == 4
    assert metric(text, "tidegate_time_to_first_token_seconds_count") == 2
    assert metric(text, "tidegate_inter_token_seconds_count") == 2
    assert metric(text, "tidegate_request_seconds_count") == 2
    assert metric(text, "tidegate_requests_running") == 0


async def test_more_requests_than_the_queue_holds_get_429_and_a_time_to_come_back() -> None:
    script = Script(deltas=("x",) * 1_000_000, every_s=0.01)
    async with scripted(script, max_queued=0, engine=None) as (server, backend), asyncio.timeout(20):
        limit = 64  # EngineConfig.max_running
        async with asyncio.TaskGroup() as tasks:
            leave = asyncio.Event()

            async def hold() -> None:
                async with connected(server) as connection:
                    connection.send(http_request(chat_body(stream=True)))
                    await connection.head()
                    await leave.wait()
                    connection.leave()

            for _ in range(limit):
                tasks.create_task(hold())
            await backend.until_running(limit)
            refused = await ask(server, chat_body())
            leave.set()
        assert refused.status == 429
        assert refused.error["code"] == "overloaded"
        assert refused.error["type"] == "rate_limit_error"
        assert refused.headers["retry-after"] == "1"
        await backend.until_running(0)
        backend.script = Script()
        assert (await ask(server, chat_body())).status == 200


async def test_connections_above_the_limit_are_refused_in_words() -> None:
    async with scripted(max_connections=2) as (server, _), asyncio.timeout(10):
        async with connected(server) as first, connected(server) as second:
            for connection in (first, second):
                connection.send(http_request(b"", path="/livez", method="GET"))
                assert (await connection.response()).status == 200
            async with connected(server) as third:
                refused = await third.response()
        assert refused.status == 503
        assert refused.error["code"] == "too_many_connections"


async def test_every_response_has_an_id_of_ours_unless_the_clients_is_harmless() -> None:
    async with scripted() as (server, _):
        ours = (await ask(server, chat_body(stream=True))).headers["x-request-id"]
        theirs = await ask(server, chat_body(), headers="X-Request-Id: trace-1:a.b_C\r\n")
        assert re.fullmatch("[0-9a-f]{32}", ours)
        assert theirs.headers["server"] == "tidegate"
        assert theirs.headers["x-request-id"] == "trace-1:a.b_C"
        assert "trace" not in theirs.json["id"]
        for bad in ("x" * 129, "a b", "<script>", "\u00e9"):
            response = await ask(server, chat_body(), headers=f"X-Request-Id: {bad}\r\n")
            assert re.fullmatch("[0-9a-f]{32}", response.headers["x-request-id"]), bad


async def test_two_requests_with_one_id_get_their_own_answers() -> None:
    script = Script(deltas=("x",) * 20, every_s=0.005)
    async with scripted(script) as (server, _):
        twins = [ask(server, chat_body(stream=True), headers="X-Request-Id: same\r\n") for _ in range(2)]
        first, second = await asyncio.gather(*twins)
    assert first.body.count(b'"content":"x"') == second.body.count(b'"content":"x"') == 20
    assert first.body != second.body  # their ids differ


async def test_the_access_log_has_one_line_per_request() -> None:
    with capture_logs() as logs:
        async with scripted() as (server, _):
            await ask(server, chat_body(stream=True), headers="X-Request-Id: mine\r\n")
            await ask(server, b"{", headers="")
    lines = [line for line in logs if line["event"] == "request_ended"]
    assert [line["status"] for line in lines] == [200, 400]
    assert lines[0].items() >= {"log_level": "info", "client_request_id": "mine", "outcome": "stop"}.items()
    assert lines[0]["num_output_tokens"] == 3
    assert lines[0]["ttft_s"] <= lines[0]["duration_s"]


async def test_the_access_log_can_be_off() -> None:
    with capture_logs() as logs:
        async with scripted(access_log=False) as (server, _):
            assert (await ask(server, chat_body())).status == 200
    assert not [line for line in logs if line["event"] == "request_ended"]


async def test_a_connection_serves_one_request_after_another() -> None:
    async with scripted() as (server, _), connected(server) as connection, asyncio.timeout(10):
        for stream in (False, True, False):
            connection.send(http_request(chat_body(stream=stream)))
            assert (await connection.response()).status == 200
        connection.send(http_request(json.dumps({"model": 1}).encode()))
        assert (await connection.response()).status == 400
        connection.send(http_request(chat_body()))
        assert (await connection.response()).status == 200
