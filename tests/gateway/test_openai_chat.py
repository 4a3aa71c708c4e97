"""Which fields of OpenAI's Chat API are honoured, accepted, or refused by name."""

import json
import typing
from typing import Any

import pytest
from openai.types.chat import completion_create_params

from gateway.dialects.openai_chat import DIALECT
from gateway.errors import InvalidRequest
from gateway.request import GenerateRequest, Message

MESSAGES = [{"role": "user", "content": "Hi"}]


def parse(**fields: Any) -> GenerateRequest:
    body = {"model": "m", "messages": MESSAGES} | fields
    return DIALECT.parse(json.dumps(body).encode(), max_depth=64)


def refusal(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse(**fields)
    return caught.value


def refusal_of(body: bytes) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        DIALECT.parse(body, max_depth=64)
    return caught.value


def test_defaults_are_openais() -> None:
    assert parse() == GenerateRequest(model="m", messages=(Message(role="user", content="Hi"),))


def test_what_is_honoured_arrives() -> None:
    request = parse(
        temperature=0.25, top_p=0.5, seed=-7, stop=["a", "b"], max_completion_tokens=9,
        stream=True, stream_options={"include_usage": True},
    )  # fmt: skip
    assert (request.temperature, request.top_p, request.seed) == (0.25, 0.5, -7)
    assert (request.stop, request.max_tokens) == (("a", "b"), 9)
    assert request.stream
    assert request.include_usage


def test_every_field_of_the_official_client_is_honoured_accepted_or_refused_by_name() -> None:
    fields = set(typing.get_type_hints(completion_create_params.CompletionCreateParamsStreaming))
    assert len(fields) > 30
    for field in fields:
        error = refusal(**{field: [[["no value of any field"]]]})
        assert error.param is not None
        assert error.param.partition("[")[0] == field
        assert error.reason != "unknown_parameter", field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x" * 500}}),
        ("audio", {"voice": "x", "format": "wav"}),
        ("modalities", ["text", "audio"]),
        ("functions", [{"name": "f"}]),
        ("prediction", {"type": "content", "content": "x"}),
        ("reasoning_effort", "high"),
        ("verbosity", "low"),
        ("web_search_options", {}),
        ("chat_template_kwargs", {"tokenize": True}),
    ],
)
def test_what_is_known_but_not_built_is_refused_by_name(field: str, value: object) -> None:
    error = refusal(**{field: value})
    assert (error.param, error.reason) == (field, "unsupported_parameter")


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
        {"tools": None, "tool_choice": "none", "functions": []},
        {"response_format": {"type": "text"}, "modalities": ["text"]},
        {"logprobs": False, "top_logprobs": None, "n": 1, "logit_bias": {}},
        {"reasoning_effort": None, "verbosity": "medium"},
        {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"},
        {"safety_identifier": "s", "prompt_cache_key": "k", "prompt_cache_retention": "24h"},
        {"stream": True, "stream_options": {"include_obfuscation": False}},
        {"temperature": None, "top_p": None, "seed": None, "stop": None, "max_tokens": None, "stream": None},
        {"stop": []},
    ],
)
def test_what_changes_no_answer_is_accepted(fields: dict[str, object]) -> None:
    assert parse(**fields).messages == parse().messages


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 0.5}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"stop": ""}, "stop"),
        ({"stop": ["ok", ""]}, "stop[1]"),
        ({"stop": ["ok", 5]}, "stop[1]"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": "x" * 513}, "stop"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"other": 1}}, "stream_options.other"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
        ),
        ({"model": ""}, "model"),
        ({"model": "m" * 257}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": [5]}, "messages[0]"),
        ({"messages": [*MESSAGES, {"role": "user", "content": 5}]}, "messages[1].content"),
        ({"messages": [*MESSAGES, {"role": "user"}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "user", "content": "x", "name": "Bo"}]}, "messages[0].name"),
        ({"messages": [{"role": "user", "content": "x", "nonsense": 1}]}, "messages[0].nonsense"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]},
            "messages[0].content[0].text",
        ),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {}}]}]},
            "messages[0].content[0].cache_control",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
        ),
        ({"user": 5}, "user"),
        ({"metadata": {"a": 1}}, "metadata[...]"),
    ],
)
def test_a_wrong_value_is_refused_with_its_path(fields: dict[str, object], param: str) -> None:
    error = refusal(**fields)
    assert error.param == param
    assert str(error)


def test_roles_and_parts_become_plain_messages() -> None:
    request = parse(
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
            {"role": "assistant", "content": None, "refusal": None, "tool_calls": None},
            {"role": "user", "content": ""},
        ]
    )
    assert [(m.role, m.content) for m in request.messages] == [
        ("system", "Be brief."),
        ("user", "one\ntwo"),
        ("assistant", ""),
        ("user", ""),
    ]


@pytest.mark.parametrize("escape", [r"\ud800", r"\udc00 and more", r"\ud83dA", r"x\udfff"])
def test_half_a_surrogate_pair_is_refused_with_its_path(escape: str) -> None:
    error = refusal_of(
        b'{"model":"m","messages":[{"role":"user","content":"ok"},{"role":"user","content":"%s"}]}'
        % escape.encode()
    )
    assert error.param == "messages[1].content"
    error = refusal_of(b'{"model":"m","messages":[],"stop":["a","%s"]}' % escape.encode())
    assert error.param == "stop[1]"


def test_a_whole_surrogate_pair_is_one_character() -> None:
    body = rb'{"model":"m","messages":[{"role":"user","content":"\ud83e\udd79"}]}'
    assert DIALECT.parse(body, max_depth=64).messages[0].content == "\U0001f979"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b'"text"',
        b"{",
        b"{}x",
        b"\xff\xfe",
        b'{"model":"m","messages":[{"role":"user","content":"\xff"}]}',
        b'{"model":"m","messages":[{"role":"user","content":"\xed\xa0\x80"}]}',
        b'{"model":"m","temperature":NaN,"messages":[]}',
        b'{"model":"m","temperature":Infinity,"messages":[]}',
        b'{"model":"m","temperature":1e999,"messages":[{"role":"user","content":"x"}]}',
        b"{'model':'m'}",
        b'{"model":"m",}',
        b"\xef\xbb\xbf{}",
    ],
)
def test_what_is_not_json_is_refused(body: bytes) -> None:
    assert str(refusal_of(body))


def test_depth_is_counted_outside_strings_only() -> None:
    brackets = "[{" * 1000
    assert parse(messages=[{"role": "user", "content": brackets}]).messages[0].content == brackets
    assert refusal(metadata=json.loads("[" * 63 + "]" * 63)).reason == "invalid_request"
    assert refusal(metadata=json.loads("[" * 64 + "]" * 64)).reason == "body_too_deep"


def test_a_body_of_countless_small_values_is_refused_before_they_are_made() -> None:
    strings = b'{"model":"m","messages":[],"stop":[' + b'"",' * 150_000 + b'""]}'
    assert refusal_of(strings).reason == "body_too_complex"
    numbers = b'{"model":"m","messages":[' + b"1," * 250_000 + b"1]}"
    assert refusal_of(numbers).reason == "body_too_complex"
    lists = b'{"model":"m","messages":[' + b"[]," * 150_000 + b"[]]}"
    assert refusal_of(lists).reason == "body_too_complex"


def test_the_last_of_two_equal_names_wins_as_in_json() -> None:
    body = b'{"model":"a","model":"b","messages":[{"role":"user","content":"x"}]}'
    assert DIALECT.parse(body, max_depth=64).model == "b"
