"""The trace file: what a real engine writes opens in a viewer, whole or cut off, and stays small enough."""

import asyncio
import io
import signal
import subprocess
import sys
from time import monotonic

import pytest

from core import ConfigError
from core.engine.trace import Trace
from tests.core.engine.running import assert_sound, collect, config, greedy, opened
from tests.core.engine.traces import check_trace, read_cut_off, read_whole, states_of


async def test_a_finished_engine_leaves_valid_json_with_nested_slices(tmp_path):
    path = tmp_path / "trace.json"
    async with opened(config(trace=str(path))) as engine:
        await asyncio.gather(*(collect(engine, range(n, n + 40), greedy(6)) for n in range(1, 4)))
        steps = engine.steps_after(0)
    events = read_whole(path)
    check_trace(events)
    assert {event["ph"] for event in events} == {"M", "X", "b", "e", "C", "i"}
    slices = [event for event in events if event["ph"] == "X"]
    assert [e["name"] for e in slices if "args" in e] == [f"step {step.step_id}" for step in steps]
    for name in ("schedule", "execute", "build", "forward", "sample", "deliver"):
        assert sum(e["name"] == name for e in slices) == len(steps)
    computed = [
        sum(e["args"][f"num_{kind}_tokens"] for kind in ("prefill", "recomputed", "decode"))
        for e in slices
        if "args" in e
    ]
    assert sum(computed) == 3 * 40 + 3 * 5
    ends = [e for e in events if e["ph"] == "e" and e["name"] == "request"]
    assert [e["args"]["output_tokens"] for e in ends] == [6, 6, 6]
    assert len([e for e in events if e["ph"] == "b"]) == len([e for e in events if e["ph"] == "e"])


async def test_a_track_shows_each_state_of_its_request(tmp_path):
    path = tmp_path / "trace.json"
    async with (
        opened(config(trace=str(path), max_prefill_tokens=8)) as engine,
        engine.generate("stream", (1, 2, 3), greedy(40)) as stream,
    ):
        await anext(stream)
        await collect(engine, range(1, 60), greedy(2))
    events = read_whole(path)
    check_trace(events)
    assert states_of(events, "r1")[:3] == ["queued", "prefill", "decode"]
    assert "stalled" in states_of(events, "r1"), "eight tokens of another's prompt beside its one"
    assert states_of(events, "r2") == ["queued", "prefill", "decode"]


async def test_preempted_requests_queue_again_on_their_track(tmp_path):
    path = tmp_path / "trace.json"
    async with opened(config(trace=str(path), num_blocks=24)) as engine:
        await asyncio.gather(*(collect(engine, range(n, n + 12), greedy(40)) for n in range(1, 9)))
        assert engine.stats().scheduler.num_preemptions > 0
    events = read_whole(path)
    check_trace(events)
    assert any(states_of(events, f"r{n}").count("queued") > 1 for n in range(1, 9))


KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from tests.core.engine.running import collect, config, greedy, opened, wait_for

async def main(path):
    async with opened(config(trace=str(path))) as engine:
        await collect(engine, range(1, 20), greedy(4))
        await wait_for(lambda: b"step 4" in path.read_bytes())
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main(Path(sys.argv[1])))
"""


def test_what_a_killed_process_leaves_opens_too(tmp_path):
    path = tmp_path / "trace.json"
    ended = subprocess.run([sys.executable, "-c", KILLED, path], check=False, timeout=60)
    assert ended.returncode == -signal.SIGKILL
    events = read_cut_off(path)
    check_trace(events)
    assert states_of(events, "r1") == ["queued", "prefill", "decode"]


def test_a_full_trace_says_so_and_stays_below_its_bound():
    file = io.BytesIO()
    kept = file.getvalue
    file.close = lambda: None  # type: ignore[method-assign]  # its bytes are looked at afterwards
    trace = Trace(file, epoch=monotonic(), max_bytes=2000)
    for n in range(1000):
        trace.count("blocks", monotonic(), values={"free": n})
    trace.close()
    assert trace.is_full
    assert 1800 < len(kept()) < 2300
    assert kept().endswith(b"\n]\n")
    assert b"the trace is full" in kept()


async def test_a_disk_that_is_full_ends_the_trace_and_not_the_service():
    async with opened(config(trace="/dev/full")) as engine:
        await assert_sound(engine)


async def test_a_file_that_cannot_be_written_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"^trace is '.*nowhere/t\.json'; it cannot be written: No such"):
        async with opened(config(trace=str(tmp_path / "nowhere" / "t.json"))):
            pass
