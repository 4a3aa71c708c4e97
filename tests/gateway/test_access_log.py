"""The one line that says of each request who asked, what it cost and where its time went."""

import asyncio
from pathlib import Path
from typing import Any

from structlog.testing import capture_logs

from tests.core.engine.running import wait_for
from tests.gateway.serving import CHAT, ask
from tests.gateway.test_api_keys import KEY, key_file
from tests.gateway.test_local_backend import greedy, served


def lines_of(logs: list[Any]) -> list[dict[str, Any]]:
    return [line for line in logs if line["event"] == "request_ended"]


async def test_a_line_has_the_tenant_the_tokens_and_where_the_time_went(tmp_path: Path) -> None:
    headers = f"x-api-key: {KEY}\r\nX-Request-Id: mine\r\n"
    with capture_logs() as logs:
        async with served(",step_s=0.005", api_key_file=key_file(tmp_path, f"alice: {KEY}")) as (server, _):
            body = greedy("Hello", max_tokens=5, stream=False)
            assert (await ask(server, body, headers=headers)).status == 200
            answer = await ask(server, body, headers=headers)
    first, second = lines_of(logs)
    usage = answer.json["usage"]
    assert (
        second.items()
        >= {
            "tenant": "alice",
            "client_request_id": "mine",
            "method": "POST",
            "path": CHAT,
            "status": 200,
            "model": "scripted",
            "stream": False,
            "num_prompt_tokens": usage["prompt_tokens"],
            "num_cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "num_output_tokens": usage["completion_tokens"],
        }.items()
    )
    assert first["num_cached_tokens"] == 0 < second["num_cached_tokens"]
    assert 0 <= second["queue_s"] <= second["ttft_s"] <= second["duration_s"]
    assert second["outcome"] in ("stop", "length")
    assert KEY not in repr(logs)
    assert "Hello" not in repr(logs)


async def test_who_waits_for_another_to_end_has_that_wait_in_its_line() -> None:
    fields = {"max_running": 1}
    with capture_logs() as logs:
        async with (
            served(",step_s=0.005", engine_fields=fields) as (server, opened),
            asyncio.TaskGroup() as tasks,
        ):
            tasks.create_task(ask(server, greedy("A first story", max_tokens=40)))
            await wait_for(lambda: opened.engine.stats().scheduler.num_running == 1)
            tasks.create_task(ask(server, greedy("Another", max_tokens=2)))
    first, second = sorted(lines_of(logs), key=lambda line: float(line["queue_s"]))
    assert first["queue_s"] < 0.1
    assert second["queue_s"] > 10 * 0.005
    assert second["queue_s"] <= second["ttft_s"]
