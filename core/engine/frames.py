"""What travels between the engine and a worker process: length-prefixed msgpack, never pickle.

    4 bytes   length of the rest, little-endian, at most MAX_FRAME_BYTES
    n bytes   one message below, a msgpack map whose "type" names it

The parent numbers its calls; the child answers them in order, one answer each.
"""

import struct

import msgspec

from core.config import EngineConfig
from core.errors import CheckpointError, ConfigError, EngineError, UnsupportedModel, WorkerFailed
from core.execution.worker_info import WorkerInfo, WorkerMemory
from core.scheduler.plan import StepPlan, StepResult

MAX_FRAME_BYTES = 64 << 20
"""A plan of 2^20 tokens, the most a config allows, takes about 5 MiB."""

_LENGTH = struct.Struct("<I")
_REFUSALS: dict[str, type[EngineError]] = {
    refusal.code: refusal for refusal in (CheckpointError, UnsupportedModel, ConfigError)
}
"""Bases before their subclasses."""


class Load(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Load the worker that the factory `worker` (`module:function`) makes."""

    call_id: int
    config: EngineConfig
    worker: str


class Execute(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    call_id: int
    plan: StepPlan


class QueryMemory(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    call_id: int


class Close(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Free the worker and exit. Has no answer: the exit is it."""


class Loaded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    call_id: int
    info: WorkerInfo


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Loading raised one of the worker's named refusals: its code and its constructor's arguments."""

    call_id: int
    code: str
    arguments: tuple[str, ...]


class Executed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    call_id: int
    result: StepResult


class StepRaised(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    call_id: int
    message: str


class MemoryRead(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    call_id: int
    memory: WorkerMemory


class Died(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The child's last words before an unexpected exception ends it. Answers nothing."""

    message: str


NumberedCall = Load | Execute | QueryMemory
Call = NumberedCall | Close
NumberedAnswer = Loaded | Refused | Executed | StepRaised | MemoryRead
Answer = NumberedAnswer | Died

_encoder = msgspec.msgpack.Encoder()
_call_decoder: msgspec.msgpack.Decoder[Call] = msgspec.msgpack.Decoder(Call)
_answer_decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def pack(message: Call | Answer) -> bytes:
    """One frame."""
    payload = _encoder.encode(message)
    assert len(payload) <= MAX_FRAME_BYTES, f"a message of {len(payload)} bytes; at most {MAX_FRAME_BYTES}"
    return _LENGTH.pack(len(payload)) + payload


class FrameSplitter:
    """Cuts a byte stream, fed in any pieces, into the payloads of its frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the payloads completed by `data`.

        Raises:
            WorkerFailed: a length above MAX_FRAME_BYTES; the stream cannot be trusted any more.
        """
        self._buffer += data
        payloads: list[bytes] = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            if length > MAX_FRAME_BYTES:
                raise WorkerFailed(f"a frame claims {length} bytes; at most {MAX_FRAME_BYTES} are allowed")
            end = start + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            payloads.append(bytes(self._buffer[start + _LENGTH.size : end]))
            start = end
        del self._buffer[:start]
        return payloads


def unpack_call(payload: bytes) -> Call:
    """The child's side. The parent is trusted; a bad frame is our own broken promise."""
    return _call_decoder.decode(payload)


def unpack_answer(payload: bytes) -> Answer:
    """The parent's side.

    Raises:
        WorkerFailed: the bytes are no answer of ours.
    """
    try:
        return _answer_decoder.decode(payload)
    except msgspec.DecodeError as error:
        raise WorkerFailed(f"the worker sent {len(payload)} bytes that are no answer: {error}") from error


def refused(call_id: int, error: CheckpointError | ConfigError) -> Refused:
    """A named refusal as a message. A class the table does not know travels as its nearest base."""
    code = next(code for code, refusal in reversed(_REFUSALS.items()) if isinstance(error, refusal))
    arguments = (error.path, error.problem) if isinstance(error, CheckpointError) else (str(error),)
    return Refused(call_id=call_id, code=code, arguments=arguments)


def refusal_of(answer: Refused) -> EngineError:
    """The exception that `refused` took apart, of the same class and with the same message."""
    refusal = _REFUSALS.get(answer.code)
    if refusal is None:
        return WorkerFailed(f"the worker refused with the unknown code {answer.code!r}: {answer.arguments}")
    return refusal(*answer.arguments)
