from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import pytest

from loadtest.call import Call
from loadtest.checks import ControlHit, Overhead, Questions, control_of_pass
from loadtest.client import Client, encode_body
from loadtest.dialects import find_dialect
from loadtest.errors import TargetUnusable
from loadtest.filler import MIN_WORDS, Filler
from loadtest.mock.script import MockOptions
from loadtest.mock.server import running_mock
from loadtest.record import Fault, RequestRecord
from loadtest.runner import RunOptions
from loadtest.words import WORDS
from tests.loadtest.plans import request
from tests.loadtest.record_factory import answered


def quick(**changes: Any) -> MockOptions:
    """A mock that answers at once."""
    return MockOptions(**{"ttft_s": 0.002, "itl_s": 0.001, **changes})


@asynccontextmanager
async def questions_to(options: MockOptions) -> AsyncIterator[Questions]:
    dialect = find_dialect("chat")
    async with running_mock(options) as mock:
        url = f"http://127.0.0.1:{mock.port}"
        async with Client(url, dialect) as client:
            encode = partial(encode_body, dialect)
            yield Questions(client, url=url, encode=encode, options=RunOptions(model="mock"))


class Template:
    """A server by arithmetic: 3 tokens before, 5 a message, and `num_cached` always found."""

    def __init__(self, *, num_cached: int | None = None, refuses: tuple[str, ...] = (), status: int = 400):
        self.asked: list[dict[str, object]] = []
        self._num_cached = num_cached
        self._refuses = refuses
        self._status = status

    async def send(self, call: Call) -> RequestRecord:
        body = msgspec.json.decode(call.body)
        self.asked.append(body)
        if any(body[name] for name in self._refuses):
            fault = Fault(kind="http", message=f"{self._refuses} not known", status=self._status)
            return RequestRecord(id=call.id, session="", turn=0, scheduled_at=0.0, ended_at=0.0, fault=fault)
        texts = [message["text"] for message in body["messages"]]
        num_tokens = 3 + sum(5 + len(text.split()) for text in texts)
        return answered(
            call.id, times=(1.0,), num_prompt_tokens=num_tokens, num_cached_tokens=self._num_cached
        )


def ask(sender: Template) -> Questions:
    options = RunOptions(model="m")
    return Questions(sender, url="http://x", encode=msgspec.json.encode, options=options)


async def test_the_templates_tokens_are_known_for_every_request():
    overhead = await ask(Template()).overhead(Filler(), with_system=True, with_turns=True)
    assert overhead == Overhead(first=8, system=13, turn=10)
    turns = (("s", 4, "system"), ("q0", 4), ("q1", 2), ("a0", 3, "assistant"), ("q2", 2))
    assert overhead.of(request("r", ("q", 4))) == 8
    assert overhead.of(request("r", *turns)) == 3 + 4 * 5
    assert overhead.of(request("r", *turns, ("a1", 3, "assistant"), ("a2", 1, "assistant"), ("q3", 2))) == 33


async def test_only_the_shapes_that_a_plan_has_are_asked_for():
    sender = Template()
    await ask(sender).overhead(Filler(), with_system=False, with_turns=False)
    assert len(sender.asked) == 1


async def test_token_length_drift_the_templates_tokens_are_unknown_without_usage():
    async with questions_to(quick(usage="never")) as questions:
        assert await questions.overhead(Filler(), with_system=True, with_turns=True) is None
        assert await questions.words_by_usage(WORDS) is None


async def test_a_cold_cache_passes_the_control():
    async with questions_to(quick()) as questions:
        overhead = await questions.overhead(Filler(), with_system=False, with_turns=False)
        control = await questions.control(Filler(nonce="n"), overhead=overhead)
    assert control.hit is not None
    assert control.hit < 0.01
    assert control.void_reasons() == ()


async def test_warm_cache_a_server_that_finds_what_nobody_asked_is_void():
    async with questions_to(quick(cached="warm")) as questions:
        control = await questions.control(Filler(nonce="n"), overhead=None)
    (reason,) = control.void_reasons()
    assert "the cache is warm or the server miscounts" in reason


async def test_warm_cache_the_same_text_again_is_noticed():
    async with questions_to(quick()) as questions:
        await questions.control(Filler(nonce="n"), overhead=None)
        again = await questions.control(Filler(nonce="n"), overhead=None)
        fresh = await questions.control(Filler(nonce="another"), overhead=None)
    assert again.void_reasons()
    assert not fresh.void_reasons()


async def test_what_the_template_shares_is_no_hit():
    control = await ask(Template(num_cached=8)).control(
        Filler(), overhead=Overhead(first=8, system=8, turn=0)
    )
    assert control.hit == 0.0


async def test_unknown_is_not_zero_a_server_that_tells_no_cached_tokens_is_not_cold():
    async with questions_to(quick(cached="silent")) as questions:
        control = await questions.control(Filler(nonce="n"), overhead=None)
    assert control == ControlHit(hit=None)


def test_a_pass_of_a_plan_without_sharing_is_a_control_too():
    records = [
        answered(f"r{i}", times=(1.0,), num_cached_tokens=20, num_planned_prompt_tokens=100) for i in range(3)
    ]
    assert control_of_pass(records, overhead_of=lambda _: 20).hit == 0.0
    assert control_of_pass(records, overhead_of=lambda _: 0).hit == pytest.approx(0.2)
    assert control_of_pass([], overhead_of=lambda _: 0).hit is None


async def test_words_are_checked_by_usage_where_nothing_else_tells():
    found = await ask(Template()).words_by_usage(WORDS)
    assert found is not None
    assert len(found) >= MIN_WORDS


@pytest.mark.parametrize(
    ("refuses", "ignore_eos", "continuous_usage"),
    [((), True, True), (("continuous_usage",), True, False), (("ignore_eos",), False, True)],
)
async def test_optional_fields_that_a_server_refuses_are_left_out(refuses, ignore_eos, continuous_usage):
    questions = ask(Template(refuses=refuses))
    notes = await questions.find_options(Filler())
    assert questions.options.ignore_eos == ignore_eos
    assert questions.options.continuous_usage == continuous_usage
    assert len(notes) == len(refuses)


async def test_a_server_that_refuses_everything_is_unusable_with_its_own_words():
    with pytest.raises(
        TargetUnusable, match=r"http://x failed a question before the run with HTTP 400: .*model"
    ):
        await ask(Template(refuses=("model",))).find_options(Filler())


async def test_a_wrong_key_is_not_asked_again_and_again():
    sender = Template(refuses=("model",), status=401)
    with pytest.raises(TargetUnusable, match="HTTP 401: give its key with --api-key"):
        await ask(sender).find_options(Filler())
    assert len(sender.asked) == 1


async def test_a_failure_before_the_run_names_the_server_and_the_fault():
    async with questions_to(quick(fail="cut")) as questions:
        with pytest.raises(TargetUnusable, match=r"failed a question before the run \(cut\)"):
            await questions.find_options(Filler())


@pytest.mark.parametrize("fail", ["cut", "status"])
async def test_failures_a_server_that_fails_now_and_then_is_measured_all_the_same(fail):
    async with questions_to(quick(fail=fail, fail_every=3)) as questions:
        await questions.find_options(Filler())
        assert await questions.overhead(Filler(), with_system=True, with_turns=True) is not None
        assert (await questions.control(Filler(nonce="cold"), overhead=None)).hit is not None
