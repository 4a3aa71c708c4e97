import asyncio
import time

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.arrivals import schedule
from loadtest.dialects import Ask
from loadtest.errors import PlanInvalid
from loadtest.filler import Filler
from loadtest.plan import Plan, load_plan
from loadtest.runner import STOPPED, Pass, Progress, RunOptions, linked_sessions, run_once, turns_of
from tests.loadtest.plans import PLANS, plan, request
from tests.loadtest.raw_server import until
from tests.loadtest.senders import Answers


def encode(ask: Ask) -> bytes:
    return msgspec.json.encode(ask)


async def played(some: Plan, client: Answers, *, stop: asyncio.Event | None = None, **options) -> Pass:
    on_progress = options.pop("on_progress", None)
    result = await run_once(
        some,
        starts=schedule(some, rate=1000.0),
        client=client,
        filler=Filler(nonce="test"),
        encode=encode,
        options=RunOptions(model="m", **options),
        on_progress=on_progress,
        stop=stop,
    )
    assert [record.id for record in result.records] == [one.id for one in some.requests]
    return result


def by_id(result: Pass):
    return {record.id: record for record in result.records}


async def test_coordinated_omission_an_open_loop_sends_on_time_though_no_answer_comes():
    client = Answers(held=("r0", "r1", "r2"))
    some = plan(*(request(f"r{i}", session=f"s{i}", at_s=i * 0.01) for i in range(3)))
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(played(some, client))
        await until(lambda: client.num_live == 3)
        for name in client.ids:
            client.release(name)
    records = running.result().records
    assert client.max_live == 3
    starts = [record.scheduled_at - running.result().started_at for record in records]
    assert starts == pytest.approx([0.0, 0.01, 0.02])


async def test_nothing_is_sent_before_its_time():
    some = plan(*(request(f"r{i}", session=f"s{i}", at_s=i * 0.0137) for i in range(8)))
    result = await played(some, Answers())
    assert all((record.sent_at or 0.0) >= record.scheduled_at for record in result.records)


async def test_session_timing_think_time_counts_from_the_end_of_the_answer():
    some = plan(request("r0"), request("r1", after=("r0",), delay_s=0.05))
    records = by_id(await played(some, Answers(answer_s=0.1)))
    assert records["r1"].scheduled_at == records["r0"].ended_at + 0.05
    assert records["r1"].sent_at >= records["r1"].scheduled_at


async def test_a_join_waits_for_the_last_of_its_answers():
    some = plan(
        request("root"),
        request("a", after=("root",)),
        request("b", after=("root",)),
        request("join", after=("a", "b"), delay_s=0.01),
    )
    client = Answers(held=("a",))
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(played(some, client))
        await until(lambda: set(client.ids) == {"root", "a", "b"} and client.num_live == 1)
        assert "join" not in client.ids
        client.release("a")
    records = by_id(running.result())
    assert records["join"].scheduled_at == records["a"].ended_at + 0.01


async def test_failures_what_follows_a_failed_request_is_recorded_as_unsent_and_others_go_on():
    some = plan(
        request("a0", session="a"),
        request("a1", session="a", after=("a0",)),
        request("a2", session="a", after=("a1",)),
        request("b0", session="b"),
        request("b1", session="b", after=("b0",)),
    )
    client = Answers(failing=("a0",))
    records = by_id(await played(some, client))
    assert [records[name].fault.kind for name in ("a0", "a1", "a2")] == ["http", "unsent", "unsent"]
    assert "a0" in records["a1"].fault.message
    assert records["a1"].sent_at is None
    assert records["b1"].fault is None
    assert set(client.ids) == {"a0", "b0", "b1"}


async def test_a_closed_loop_keeps_so_many_sessions_live_and_starts_one_when_one_ends():
    some = plan(
        *(
            request(f"s{i}.{k}", session=f"s{i}", **({"after": (f"s{i}.{k - 1}",)} if k else {}))
            for i in range(6)
            for k in range(3)
        )
    )
    client = Answers(answer_s=0.002)
    result = await played(some, client, concurrency=2)
    assert client.max_live == 2
    assert all(record.fault is None for record in result.records)
    records = by_id(result)
    third = records["s2.0"].scheduled_at
    assert third >= min(records["s0.2"].ended_at, records["s1.2"].ended_at)


async def test_a_closed_loop_does_not_wait_for_ever_for_a_session_that_has_no_place():
    some = plan(
        request("a0", session="a"),
        request("a1", session="a", after=("b0",)),
        request("b0", session="b", after=("a0",)),
        request("c0", session="c"),
    )
    result = await played(some, Answers(), concurrency=1)
    assert all(record.fault is None for record in result.records)
    assert [len(group) for group in linked_sessions(some, schedule(some, rate=1.0))] == [3, 1]


async def test_history_drift_recorded_answers_are_sent_whatever_the_server_said():
    some = plan(
        request("r0", ("q0", 4)),
        request("r1", ("q0", 4), ("a0", 3, "assistant"), ("q1", 2), after=("r0",)),
    )
    client = Answers(texts={"r0": " something else"})
    await played(some, client)
    told = msgspec.json.encode(client.body("r1")["messages"]).decode()
    assert Filler(nonce="test").text("a0", 3) in told
    assert "something else" not in told


async def test_live_history_sends_the_servers_own_answer_back():
    some = plan(
        request("r0", ("q0", 4)),
        request("r1", ("q0", 4), ("a0", 3, "assistant"), ("q1", 2), after=("r0",)),
        request(
            "r2",
            ("q0", 4),
            ("a0", 3, "assistant"),
            ("q1", 2),
            ("a1", 3, "assistant"),
            ("q2", 2),
            after=("r1",),
        ),
    )
    client = Answers(texts={"r0": " first answer", "r1": " second answer"})
    await played(some, client, history="live")
    told = msgspec.json.encode(client.body("r2")["messages"]).decode()
    assert " first answer" in told
    assert " second answer" in told


async def test_live_history_is_refused_for_a_plan_that_marks_no_answers():
    some = plan(request("r0", ("q0", 4)), request("r1", ("q0", 4), ("q1", 2), after=("r0",)))
    with pytest.raises(PlanInvalid, match="--history recorded"):
        await played(some, Answers(), history="live")


async def test_double_history_a_turn_is_sent_as_the_plan_has_it_and_not_with_its_predecessors_again():
    some = plan(request("r0", ("q0", 4)), request("r1", ("q0", 4), ("q1", 2), after=("r0",)))
    client = Answers()
    await played(some, client)
    filler = Filler(nonce="test")
    told = filler.text("q0", 4) + filler.text("q1", 2)
    assert client.body("r1")["messages"] == [{"role": "user", "text": told}]


@pytest.mark.parametrize("prepared_bytes", [0, 1 << 20])
async def test_bodies_are_the_same_whether_made_before_the_run_or_during_it(prepared_bytes):
    some = plan(
        request("r0", ("q0", 4)),
        request("r1", ("q0", 4), ("q1", 2), after=("r0",)),
        request("x", ("other", 5), session="x", at_s=0.01),
    )
    client = Answers()
    await played(some, client, prepared_bytes=prepared_bytes)
    expected = Answers()
    await played(some, expected)
    assert {c.id: c.body for c in client.calls} == {c.id: c.body for c in expected.calls}


async def test_a_stopped_run_has_a_record_for_every_request_and_says_so():
    some = plan(
        request("done"),
        request("running", session="b"),
        request("waiting", session="b", after=("running",)),
        request("later", session="c", at_s=3600.0),
    )
    client, stop = Answers(held=("running",)), asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(played(some, client, stop=stop))
        await until(lambda: set(client.ids) == {"done", "running"} and client.num_live == 1)
        stop.set()
    result = running.result()
    records = by_id(result)
    assert result.interrupted
    assert records["done"].fault is None
    assert {records[name].fault.message for name in ("running", "waiting", "later")} == {STOPPED}


async def test_progress_ends_with_everything_ended():
    seen: list[Progress] = []
    some = plan(request("r0"), request("r1", after=("r0",)), request("x", session="x"))
    await played(some, Answers(failing=("r0",)), on_progress=seen.append)
    assert seen[-1] == Progress(num_planned=3, num_running=0, num_ended=3, num_failed=2)


def test_a_turn_is_the_place_in_the_session():
    some = plan(
        request("a0", session="a"),
        request("b0", session="b"),
        request("a1", session="a", after=("a0",)),
        request("b1", session="b", after=("b0",)),
    )
    assert turns_of(some) == {"a0": 0, "b0": 0, "a1": 1, "b1": 1}


@st.composite
def plans(draw):
    """Trees and joins over a few sessions, where some requests fail."""
    number = draw(st.integers(1, 12))
    requests = []
    for i in range(number):
        before = draw(st.lists(st.integers(0, i - 1), unique=True, max_size=3)) if i else []
        session = f"s{draw(st.integers(0, 3))}"
        when = {"after": tuple(f"r{k}" for k in before)} if before else {"at_s": 0.0}
        requests.append(request(f"r{i}", session=session, **when))
    failing = draw(st.sets(st.sampled_from([one.id for one in requests])))
    return plan(*requests), tuple(failing)


@settings(max_examples=20, deadline=None)
@given(plans(), st.one_of(st.none(), st.integers(1, 3)))
def test_every_planned_request_has_exactly_one_record_and_is_sent_unless_something_before_it_failed(
    made, concurrency
):
    some, failing = made
    client = Answers(failing=failing)
    records = by_id(asyncio.run(played(some, client, concurrency=concurrency)))
    for one in some.requests:
        blocked = any(records[name].fault is not None for name in one.after)
        assert (one.id not in client.ids) == blocked
        assert (records[one.id].fault is not None) == (blocked or one.id in failing)
    assert len(client.ids) == len(set(client.ids))


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.name.partition(".")[0])
async def test_the_published_profiles_are_played_to_their_end(path):
    hurried = [
        msgspec.structs.replace(one, delay_s=0.0, at_unit=None, at_s=None if one.after else 0.0)
        for one in load_plan(path).requests
    ]
    result = await played(plan(*hurried), Answers())
    assert all(record.fault is None for record in result.records)
    assert result.duration_s > 0
    assert result.health.duration_s >= result.duration_s - 1e-3
    assert result.started_at <= time.monotonic()
