"""Filler text: the same id is the same text everywhere, and no text that an earlier run has sent."""

import os
from pathlib import Path

import aiohttp
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core import EngineConfig
from gateway.backends.local import open_local_backend
from loadtest.dialects import Message
from loadtest.errors import PlanInvalid
from loadtest.filler import Filler, messages
from loadtest.plan import load_plan
from loadtest.words import WORDS
from tests.gateway.serving import serving
from tests.loadtest.plans import PLANS, request


@given(st.text(max_size=8), st.text(min_size=1, max_size=8), st.integers(1, 60), st.integers(0, 60))
def test_a_shorter_text_is_the_beginning_of_a_longer_one(
    nonce: str, name: str, short: int, more: int
) -> None:
    filler = Filler(nonce=nonce)
    text = filler.text(name, short)
    assert Filler(nonce=nonce).text(name, short + more).split(" ")[: short + 1] == text.split(" ")
    assert len(text.split()) == short
    assert set(text.split()) <= set(WORDS)


def test_other_segments_and_other_nonces_are_other_texts_from_the_first_words_on() -> None:
    texts = [Filler(nonce=nonce).text(f"s{n}", 8) for nonce in ("a", "b") for n in range(200)]
    assert len({tuple(text.split()[:3]) for text in texts}) == len(texts)


def test_nonce_and_segment_do_not_run_into_each_other() -> None:
    assert Filler(nonce="a").text(":b", 20) != Filler(nonce="a:").text("b", 20)


def test_all_words_are_used_about_equally() -> None:
    drawn = Filler().text("any", 64 * len(WORDS)).split()
    counts = [drawn.count(word) for word in WORDS]
    assert len(WORDS) == len(set(WORDS)) == 512
    assert min(counts) > 25
    assert max(counts) < 110


def test_what_is_kept_is_bounded_and_changes_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadtest.filler.MAX_KEPT", 500)
    small, names = Filler(nonce="n"), [f"s{n}" for n in range(20)]
    assert [small.text(name, 30) for name in names * 2] == [Filler(nonce="n").text(n, 30) for n in names * 2]
    assert sum(map(len, small._texts.values())) <= 500


def test_too_few_words_or_one_twice_are_refused() -> None:
    with pytest.raises(PlanInvalid, match="there are 63 different words; 64 or more"):
        Filler(WORDS[:63])
    with pytest.raises(PlanInvalid, match="none twice"):
        Filler([*WORDS, WORDS[0]])


def test_neighbours_of_one_role_are_one_message() -> None:
    filler = Filler(nonce="n")
    asked = request(
        "r",
        ("tools", 3, "system"),
        ("rules", 2, "system"),
        ("q", 4),
        ("a", 5, "assistant"),
        ("p", 1),
        ("o", 2),
    )
    text = filler.text
    assert messages(asked, filler) == (
        Message("system", text("tools", 3) + text("rules", 2)),
        Message("user", text("q", 4)),
        Message("assistant", text("a", 5)),
        Message("user", text("p", 1) + text("o", 2)),
    )


def test_a_later_turn_begins_with_the_messages_of_the_one_before() -> None:
    filler = Filler()
    first = request("r0", ("s", 3, "system"), ("q0", 4))
    later = request("r1", *map(msgspec.structs.astuple, first.segments), ("a0", 5, "assistant"), ("q1", 1))
    assert messages(later, filler)[:2] == messages(first, filler)


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.name)
def test_no_history_is_sent_twice_and_none_is_left_out(path: Path) -> None:
    filler = Filler()
    for asked in load_plan(path).requests:
        words = sum(len(message.text.split()) for message in messages(asked, filler))
        assert words == asked.num_prompt_tokens


def test_live_answers_stand_in_place_of_recorded_ones() -> None:
    asked = request("r", ("q0", 4), ("a0", 5, "assistant"), ("q1", 1), ("a1", 5, "assistant"), ("q2", 1))
    told = messages(asked, Filler(), {"a0": "Paris.", "q0": "never a user's"})
    assert told[1] == Message("assistant", "Paris.")
    assert told[0] == Message("user", Filler().text("q0", 4))
    assert told[3] == Message("assistant", Filler().text("a1", 5))


def test_an_empty_live_answer_leaves_no_empty_message() -> None:
    asked = request("r", ("q0", 4), ("a0", 5, "assistant"), ("q1", 1))
    (only,) = messages(asked, Filler(), {"a0": ""})
    assert only == Message("user", Filler().text("q0", 4) + Filler().text("q1", 1))


@pytest.mark.slow
async def test_each_word_is_one_token_for_the_real_tokenizer(default_model_path: Path) -> None:
    engine = EngineConfig(
        checkpoint=str(default_model_path),
        num_blocks=64,
        cache_dir=os.environ.get("TIDEGATE_CACHE_DIR", ""),
        compile="off",
    )
    async with (
        serving(open_local_backend, engine=engine, model_id="smollm2-135m") as server,
        aiohttp.ClientSession(server.url) as client,
    ):

        async def count(prompt: str) -> int:
            body = {"model": "smollm2-135m", "prompt": prompt, "add_special_tokens": False}
            async with client.post("/tokenize", json=body) as answer:
                assert answer.status == 200
                return int((await answer.json())["count"])

        # No word takes less than one, so none takes more.
        assert await count("".join(f" {word}" for word in WORDS)) == len(WORDS)
        for num_tokens in (1, 2, 16, 1_000):
            assert await count(Filler(nonce="x").text("any", num_tokens)) == num_tokens
