"""`tidegate top`: one frame of a real server, and what is said when there is none."""

import asyncio
import re

import pytest
from aiohttp import web

from core import EngineConfig
from gateway.backends.local import open_local_backend
from gateway.backends.scripted import Script
from gateway.commands.request_table import request_table
from tests.gateway.commands.running import at_terminal, clean_environment, command, tidegate
from tests.gateway.serving import ask, chat_body, scripted, serving


async def top(*arguments: str, **environment: str) -> tuple[int | None, str, str]:
    """Run it beside the server, which lives in this process's loop."""
    process = await asyncio.create_subprocess_exec(
        *command("top", *arguments), env=clean_environment(environment), stdout=-1, stderr=-1
    )
    async with asyncio.timeout(60):
        out, said = await process.communicate()
    return process.returncode, out.decode(), said.decode()


@pytest.mark.slow
async def test_a_frame_shows_what_the_real_server_did(default_model_path, tmp_path):
    engine = EngineConfig(
        checkpoint=str(default_model_path), num_blocks=128, cache_dir=str(tmp_path), compile="off"
    )
    async with serving(open_local_backend, engine=engine, model_id="smollm2-135m") as server:
        for _ in range(2):  # the second finds the first one's prompt
            answer = await ask(server, chat_body(model="smollm2-135m", max_tokens=4, temperature=0))
            assert answer.status == 200
        code, out, said = await top("--once", "--every", "0.1", "--url", server.url)
    assert (code, said) == (0, "")
    rows = {line[:13].strip(): line[13:].strip() for line in out.splitlines()[1:]}
    assert out.startswith(f"tidegate {server.url}  ready smollm2-135m\n")
    assert rows["requests"] == "0 running, 0 waiting, 0 refused, 0 preemptions"
    assert " 0 held, " in rows["blocks"]
    assert " of 128; " in rows["blocks"]
    assert " 0 cached" not in rows["blocks"]
    hits = rows["prefix hits"].removeprefix("- now, ").removesuffix(" % since the start")
    assert 0 < int(hits) < 100
    assert rows["first token"].startswith("p50 ")
    assert rows["first token"].endswith("(since the start)")
    assert re.search(r"KV pool 45\.\d MiB$", rows["memory"])
    assert not rows["worker"].startswith("0 steps")


async def test_the_server_is_found_by_the_same_options_as_serve():
    async with scripted() as (server, _):
        code, out, _ = await top("--once", "--every", "0.05", TIDEGATE_PORT=str(server.port))
    assert code == 0
    assert out.startswith(f"tidegate {server.url}  ready scripted\n")


async def test_a_live_view_goes_on_until_ctrl_c():
    async with scripted(Script(deltas=("x",) * 5)) as (server, _):
        with at_terminal("top", "--every", "0.1", "--url", server.url) as terminal:
            await asyncio.to_thread(terminal.wait_for, "none yet")
            assert (await ask(server, chat_body())).status == 200
            await asyncio.to_thread(terminal.wait_for, "p50 ")
            assert await asyncio.to_thread(terminal.interrupt_until_it_ends) == 0


async def test_a_pipe_gets_one_frame_after_another():
    async with scripted() as (server, _):
        process = await asyncio.create_subprocess_exec(
            *command("top", "--every", "0.05", "--url", server.url), env=clean_environment({}), stdout=-1
        )
        assert process.stdout is not None
        num_frames = 0
        async with asyncio.timeout(60):
            while num_frames < 3:
                num_frames += (await process.stdout.readline()).startswith(b"tidegate http")
        process.terminate()
        await process.communicate()


def test_a_table_shows_so_many_and_no_control_characters() -> None:
    live = [{"request_id": f"{n:032x}", "session_id": "\x1b[2Jx", "queued_s": 1.25} for n in range(30)]
    table = request_table(live)
    assert table.row_count == 20
    assert table.caption == "and 10 more"
    assert "\x1b" not in "".join(str(cell) for column in table.columns for cell in column.cells)


@pytest.mark.parametrize(
    ("url", "line"),
    [
        ("http://127.0.0.1:9", "no server at http://127.0.0.1:9: Connection refused; is `tidegate serve`"),
        ("127.0.0.1:8000", "--url is '127.0.0.1:8000'; it must begin with http:// or https://"),
        ("file:///etc/passwd", "--url is 'file:///etc/passwd'; it must begin with http"),
        ("http://", "no server at http:"),
        ("http://127.0.0.1:99999", "no server at http://127.0.0.1:99999: "),
    ],
)
def test_without_a_server_one_line_says_so(url, line):
    result = tidegate("top", "--once", "--url", url)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith(f"tidegate: {line}")
    assert result.stderr.count("\n") == 1


async def test_a_server_with_keys_wants_one(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("secret-key-of-twenty-letters\n")
    keys.chmod(0o600)
    async with scripted(api_key_file=str(keys)) as (server, _):
        code, _, said = await top("--once", "--url", server.url)
        assert code == 1
        assert said.endswith("/metrics answers with status 401; give its key with --api-key\n")
        code, out, _ = await top(
            *("--once", "--every", "0.05", "--url", server.url),
            TIDEGATE_API_KEY="secret-key-of-twenty-letters",
        )
    assert code == 0
    assert "ready scripted" in out


async def test_a_server_that_is_not_ours_is_told_apart():
    async def somebody(_request: web.Request) -> web.Response:
        return web.Response(text="# TYPE up gauge\nup 1\n")

    app = web.Application()
    app.router.add_get("/metrics", somebody)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        code, _, said = await top("--once", "--url", f"http://127.0.0.1:{port}")
    finally:
        await runner.cleanup()
    assert code == 1
    assert said == f"tidegate: http://127.0.0.1:{port}/metrics is not what a Tidegate server says\n"
