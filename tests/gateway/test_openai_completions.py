"""Which fields of OpenAI's Completions API are honoured, accepted, or refused by name."""

import json
import typing
from typing import Any

import pytest
from openai.types import completion_create_params

from gateway.dialects.openai_completions import DIALECT
from gateway.errors import InvalidRequest
from gateway.request import GenerateRequest


def parse(**fields: Any) -> GenerateRequest:
    body = {"model": "m", "prompt": "Hi"} | fields
    return DIALECT.parse(json.dumps(body).encode(), max_depth=64)


def refusal(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse(**fields)
    return caught.value


def test_defaults_are_openais() -> None:
    assert parse() == GenerateRequest(model="m", prompts=("Hi",), max_tokens=16)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("", ("",)),
        ("one", ("one",)),
        (["one", "two"], ("one", "two")),
        ([5, 6], ((5, 6),)),
        ([[5, 6], [7]], ((5, 6), (7,))),
        (["one", [7]], ("one", (7,))),
    ],
)
def test_a_prompt_is_text_or_token_ids_or_several_of_them(prompt: object, prompts: object) -> None:
    assert parse(prompt=prompt).prompts == prompts


def test_what_is_honoured_arrives() -> None:
    request = parse(echo=True, logprobs=3, max_tokens=0, n=2, best_of=2, stop="x", stream=True)
    assert (request.echo, request.num_logprobs, request.max_tokens, request.n) == (True, 3, 0, 2)
    assert (request.stop, request.stream, request.num_choices) == (("x",), True, 2)
    assert parse(prompt=["a", "b", "c"], n=4).num_choices == 12


def test_every_field_of_the_official_client_is_honoured_accepted_or_refused_by_name() -> None:
    fields = set(typing.get_type_hints(completion_create_params.CompletionCreateParamsStreaming))
    assert len(fields) > 15
    for field in fields:
        error = refusal(**{field: {"no": ["value of any field"]}})
        assert error.param is not None
        assert error.param.partition(".")[0].partition("[")[0] == field
        assert error.reason != "unknown_parameter", field


@pytest.mark.parametrize("fields", [{"suffix": "x"}, {"best_of": 2}, {"best_of": 1, "n": 2}, {"priority": 5}])
def test_what_is_known_but_not_built_is_refused_by_name(fields: dict[str, object]) -> None:
    error = refusal(**fields)
    assert (error.param, error.reason) == (next(iter(fields)), "unsupported_parameter")


@pytest.mark.parametrize(
    "fields",
    [{"suffix": None}, {"suffix": ""}, {"best_of": 1}, {"user": "u"}, {"echo": None, "logprobs": None}],
)
def test_what_changes_no_answer_is_accepted(fields: dict[str, object]) -> None:
    assert parse(**fields) == parse()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": {"text": "x"}}, "prompt"),
        ({"prompt": [None]}, "prompt[0]"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": [1, -1]}, "prompt[1]"),
        ({"prompt": [1, 1.5]}, "prompt[1]"),
        ({"prompt": [1, 2**31]}, "prompt[1]"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": [[1], 2]}, "prompt[1]"),
        ({"prompt": [[1], [2, True]]}, "prompt[1][1]"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": ["a"] * 65, "n": 2}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"echo": 1}, "echo"),
        ({"best_of": 0}, "best_of"),
        ({"messages": []}, "messages"),
    ],
)
def test_a_wrong_value_is_refused_with_its_path(fields: dict[str, object], param: str) -> None:
    error = refusal(**fields)
    assert error.param == param
    assert str(error)
