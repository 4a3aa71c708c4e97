"""What the dialects ask, and how they read what servers are known to send."""

import msgspec
import pytest

from loadtest.dialects import Ask, Message, Reading, Usage, dialect_names, find_dialect
from loadtest.errors import PlanInvalid

ASK = Ask(model="m", messages=(Message("system", " a b"), Message("user", " c")), max_tokens=5, session="s1")


@pytest.mark.parametrize("name", dialect_names())
def test_every_dialect_asks_for_a_greedy_stream_of_a_fixed_length_with_usage(name):
    body = find_dialect(name).body(ASK)
    assert body["stream"] is True
    assert body["max_tokens"] == 5
    assert body["temperature"] == 0
    assert body["ignore_eos"] is True
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert body["prompt_cache_key"] == "s1"
    assert msgspec.json.decode(msgspec.json.encode(body)) == body


@pytest.mark.parametrize("name", dialect_names())
def test_every_dialect_reads_usage_errors_and_events_without_choices(name):
    read = find_dialect(name).read
    usage = read(
        b'{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3,'
        b'"prompt_tokens_details":{"cached_tokens":4}}}'
    )
    assert usage == Reading(usage=Usage(num_prompt_tokens=7, num_output_tokens=3, num_cached_tokens=4))
    assert read(b"{}") == Reading()
    assert read(b'{"error":{"message":"broken","code":500}}').error == "broken"
    assert read(b'{"error":"just text"}').error == "just text"
    assert read(b'{"error":{"code":1}}').error == '{"code":1}'


@pytest.mark.parametrize("name", dialect_names())
@pytest.mark.parametrize("data", [b"no json", b"[1]", b'{"choices":3}', b'"\xff"'])
def test_every_dialect_refuses_what_is_not_its_json(name, data):
    with pytest.raises(msgspec.DecodeError):
        find_dialect(name).read(data)


def test_what_a_server_does_not_tell_stays_unknown_and_is_not_zero():
    read = find_dialect("chat").read
    assert read(b'{"usage":null}').usage is None
    told = read(b'{"usage":{"prompt_tokens":7,"completion_tokens":0,"prompt_tokens_details":null}}').usage
    assert told == Usage(num_prompt_tokens=7, num_output_tokens=0, num_cached_tokens=None)


def test_cached_tokens_are_read_under_the_other_names_too():
    read = find_dialect("chat").read
    llama = read(b'{"usage":{"prompt_tokens":9,"completion_tokens":1},"timings":{"cache_n":6,"prompt_n":3}}')
    assert llama.usage == Usage(num_prompt_tokens=9, num_output_tokens=1, num_cached_tokens=6)
    assert read(b'{"timings":{"cache_n":6}}').usage == Usage(num_cached_tokens=6)
    deepseek = read(b'{"usage":{"prompt_tokens":9,"completion_tokens":1,"prompt_cache_hit_tokens":8}}')
    assert deepseek.usage is not None
    assert deepseek.usage.num_cached_tokens == 8


@pytest.mark.parametrize(
    ("delta", "reading"),
    [
        (b'{"role":"assistant","content":""}', Reading()),
        (b'{"role":"assistant","content":null}', Reading()),
        (b"{}", Reading()),
        (b'{"content":"a"}', Reading(text="a")),
        (b'{"refusal":"no"}', Reading(text="no")),
        (b'{"reasoning_content":"hm"}', Reading(reasoning="hm")),
        (b'{"reasoning":"hm","reasoning_content":"hm"}', Reading(reasoning="hm")),
        (
            b'{"tool_calls":[{"index":0,"id":"x","function":{"name":"f","arguments":"{}"}}]}',
            Reading(tool_text="f{}"),
        ),
    ],
)
def test_a_chat_delta_is_text_reasoning_or_a_tool_call(delta, reading):
    data = b'{"id":"x","choices":[{"index":0,"delta":%b,"finish_reason":null}]}' % delta
    assert find_dialect("chat").read(data) == reading


def test_a_completion_has_its_text_and_its_end():
    read = find_dialect("completions").read
    assert read(b'{"choices":[{"index":0,"text":" a","finish_reason":null}]}') == Reading(text=" a")
    assert read(b'{"choices":[{"text":"","finish_reason":"length"}]}') == Reading(finish_reason="length")


def test_a_completion_prompt_is_the_texts_one_after_another():
    assert find_dialect("completions").body(ASK)["prompt"] == " a b c"


def test_extra_fields_win_and_none_takes_a_field_away():
    ask = msgspec.structs.replace(ASK, extra={"ignore_eos": None, "temperature": 1, "top_k": 3})
    body = find_dialect("chat").body(ask)
    assert "ignore_eos" not in body
    assert (body["temperature"], body["top_k"]) == (1, 3)


def test_a_server_that_refuses_continuous_usage_is_asked_without():
    body = find_dialect("chat").body(msgspec.structs.replace(ASK, continuous_usage=False))
    assert body["stream_options"] == {"include_usage": True}


def test_an_unknown_dialect_is_refused_with_those_there_are():
    with pytest.raises(PlanInvalid, match="chat, completions"):
        find_dialect("gopher")
