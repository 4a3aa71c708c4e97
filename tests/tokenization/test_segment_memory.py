"""What was encoded once is not encoded again, and nobody else can tell."""

import threading
from collections.abc import Iterator, Sequence

from hypothesis import given
from hypothesis import strategies as st

from tokenization.prompt import RenderedPrompt
from tokenization.segment_memory import MIN_CHARS, SegmentMemory

LONG = "a word and another " * 8


class Encoder:
    """Encodes characters to code points and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, segments: Sequence[str]) -> Iterator[list[int]]:
        self.asked += segments
        for segment in segments:
            yield [ord(character) for character in segment]


def encoded(memory: SegmentMemory, *segments: str, scope: str = "") -> list[list[int]]:
    return [list(ids) for ids in memory.encode_segments(segments, scope=scope)]


def test_a_long_segment_is_encoded_once() -> None:
    encoder = Encoder()
    memory = SegmentMemory(encoder)
    assert encoded(memory, LONG, "short", LONG + "x") == encoded(memory, LONG, "short", LONG + "x")
    assert encoder.asked == [LONG, "short", LONG + "x", "short"]


def test_a_scope_does_not_profit_from_anothers_text() -> None:
    encoder = Encoder()
    memory = SegmentMemory(encoder)
    encoded(memory, LONG, scope="alice")
    encoded(memory, LONG, scope="bob")
    assert encoder.asked == [LONG, LONG]


def test_the_least_recently_used_segments_are_forgotten_first() -> None:
    encoder = Encoder()
    probe = SegmentMemory(encoder)
    encoded(probe, LONG + "1")
    memory = SegmentMemory(encoder, max_bytes=2 * probe.num_bytes)
    encoded(memory, LONG + "1", LONG + "2")
    encoded(memory, LONG + "1")
    encoded(memory, LONG + "3")
    encoder.asked.clear()
    encoded(memory, LONG + "1", LONG + "3", LONG + "2")
    assert encoder.asked == [LONG + "2"]
    memory.check()


def test_what_is_larger_than_the_memory_is_not_remembered() -> None:
    memory = SegmentMemory(Encoder(), max_bytes=64)
    assert encoded(memory, LONG) == [[ord(character) for character in LONG]]
    assert memory.num_bytes == 0


@given(st.lists(st.lists(st.text(max_size=3 * MIN_CHARS), max_size=4), max_size=8), st.integers(0, 4000))
def test_remembering_changes_no_result(calls: list[list[str]], max_bytes: int) -> None:
    memory = SegmentMemory(Encoder(), max_bytes=max_bytes)
    for segments in calls:
        assert encoded(memory, *segments) == [[ord(c) for c in segment] for segment in segments]
        memory.check()


def test_many_threads_may_ask_at_once() -> None:
    memory = SegmentMemory(Encoder(), max_bytes=4000)
    wrong: list[str] = []

    def ask(number: int) -> None:
        for round_number in range(50):
            text = LONG + str((number + round_number) % 7)
            if encoded(memory, text) != [[ord(character) for character in text]]:
                wrong.append(text)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    memory.check()


def test_a_sessions_next_turn_encodes_its_new_text_alone(smollm) -> None:
    history = "".join(f"<|im_start|>user\n{LONG}{turn}<|im_end|>\n" for turn in range(50))
    smollm.encode_rendered(RenderedPrompt(history), scope="session")
    before = smollm.memory.num_encoded_chars
    turn = f"<|im_start|>user\nsomething new: {LONG}<|im_end|>\n"
    ids = smollm.encode_rendered(RenderedPrompt(history + turn), scope="session")
    assert ids == smollm.encode(history + turn, parse_special=True)
    assert smollm.memory.num_encoded_chars - before <= len(turn) + 2 * 50  # and the line ends between
