"""Frames survive any cut of the stream, and what is no frame is refused by name."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import core.engine
from core.config import EngineConfig
from core.engine import frames
from core.errors import CheckpointError, ConfigError, EngineError, UnsupportedModel, WorkerFailed
from core.execution.worker_info import WorkerInfo, WorkerMemory
from core.request import SamplingParams
from core.scheduler.plan import PlannedTokens, SampledTokens, StepPlan, StepResult

ITEM = PlannedTokens(
    request_id="r1",
    token_ids=(1, 2, 2**31 - 1),
    first_position=5,
    block_table=b"\x00\xff" * 8,
    num_samples=1,
    sampling=SamplingParams(max_tokens=3, seed=2**63 - 1, stop_token_ids=(7,)),
)
INFO = WorkerInfo(
    num_blocks=1,
    block_size=2,
    max_model_len=3,
    vocab_size=4,
    device="cpu",
    numerics="stable",
    architecture="llama",
    kernels={"int8": 7},
    namespace=b"\x00\x80",
)
CALLS: list[frames.Call] = [
    frames.Load(call_id=1, config=EngineConfig(checkpoint="model.gguf"), worker="module:function"),
    frames.Execute(call_id=2, plan=StepPlan(step_id=9, items=(ITEM, ITEM))),
    frames.QueryMemory(call_id=3),
    frames.Close(),
]
RESULT = StepResult(
    step_id=9,
    samples=(SampledTokens(request_id="r1", token_ids=(4, 5)), SampledTokens(request_id="r2", error="nan")),
    forward_s=0.5,
)
ANSWERS: list[frames.Answer] = [
    frames.Loaded(call_id=1, info=INFO),
    frames.Refused(call_id=1, code="bad_config", arguments=("no",)),
    frames.Executed(call_id=2, result=RESULT),
    frames.StepRaised(call_id=2, message="ValueError: é"),
    frames.MemoryRead(call_id=3, memory=WorkerMemory(rss_bytes=2**40)),
    frames.Died(message="SystemExit: 3"),
]


def test_every_message_arrives_as_it_was_sent() -> None:
    for call in CALLS:
        (payload,) = frames.FrameSplitter().feed(frames.pack(call))
        assert frames.unpack_call(payload) == call
    for answer in ANSWERS:
        (payload,) = frames.FrameSplitter().feed(frames.pack(answer))
        assert frames.unpack_answer(payload) == answer


@given(cuts=st.lists(st.integers(min_value=1, max_value=40)))
def test_a_stream_cut_anywhere_gives_the_same_messages(cuts: list[int]) -> None:
    stream = b"".join(frames.pack(answer) for answer in ANSWERS)
    splitter = frames.FrameSplitter()
    payloads: list[bytes] = []
    for size in cuts:
        payloads += splitter.feed(stream[:size])
        stream = stream[size:]
    payloads += splitter.feed(stream)
    assert [frames.unpack_answer(payload) for payload in payloads] == ANSWERS


def test_a_frame_that_claims_too_much_is_refused_before_it_is_read() -> None:
    with pytest.raises(WorkerFailed, match=f"{frames.MAX_FRAME_BYTES + 1} bytes"):
        frames.FrameSplitter().feed((frames.MAX_FRAME_BYTES + 1).to_bytes(4, "little"))


@given(payload=st.binary(max_size=64))
def test_bytes_that_are_no_answer_are_a_failed_worker(payload: bytes) -> None:
    try:
        frames.unpack_answer(payload)
    except WorkerFailed as error:
        assert str(len(payload)) in str(error)
    else:
        assert isinstance(msgspec.msgpack.decode(payload), dict)


@pytest.mark.parametrize(
    "error",
    [CheckpointError("a", "b"), UnsupportedModel("a", "c"), ConfigError("d")],
    ids=lambda error: type(error).__name__,
)
def test_a_refusal_is_put_together_again(error: CheckpointError | ConfigError) -> None:
    again: EngineError = frames.refusal_of(frames.refused(1, error))
    assert type(again) is type(error)
    assert str(again) == str(error)


def test_a_refusal_with_an_unknown_code_is_a_failed_worker() -> None:
    again = frames.refusal_of(frames.Refused(call_id=1, code="future", arguments=("x", "y", "z")))
    assert isinstance(again, WorkerFailed)
    assert "future" in str(again)


def test_nothing_in_the_engine_can_read_a_pickle() -> None:
    for source in Path(core.engine.__path__[0]).glob("*.py"):
        text = source.read_text()
        assert "import pickle" not in text
        assert "multiprocessing" not in text
