"""The sampling options of OpenAI's dialects: one table of bounds, checked at the door and by name."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core import SamplingParams
from gateway.dialects import Dialect, openai_chat, openai_completions
from gateway.errors import InvalidRequest
from gateway.generation import sampling_params
from gateway.request import GenerateRequest

over_dialects = pytest.mark.parametrize(
    "dialect", [openai_chat.DIALECT, openai_completions.DIALECT], ids=lambda dialect: dialect.path
)
VOCAB_SIZE = 100


def parse(dialect: Dialect, **fields: Any) -> GenerateRequest:
    body: dict[str, Any] = json.loads(dialect.example(model="m", stream=False))
    return dialect.parse(json.dumps(body | fields).encode(), max_depth=64)


def asked(request: GenerateRequest, *, sibling: int = 0) -> SamplingParams:
    return sampling_params(
        request,
        num_prompt_tokens=10,
        max_context_tokens=1000,
        stop_token_ids=(7,),
        vocab_size=VOCAB_SIZE,
        sibling=sibling,
    )


@over_dialects
def test_every_option_reaches_the_engine(dialect: Dialect) -> None:
    params = asked(
        parse(
            dialect, max_tokens=20, temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, typical_p=0.8,
            repetition_penalty=1.2, presence_penalty=-0.5, frequency_penalty=0.25,
            logit_bias={"3": -100, "4": 5.5}, stop_token_ids=[9, 8], min_tokens=2, seed=11,
        )
    )  # fmt: skip
    assert params == SamplingParams(
        max_tokens=20, temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, typical_p=0.8,
        repetition_penalty=1.2, presence_penalty=-0.5, frequency_penalty=0.25,
        logit_bias=((3, -100.0), (4, 5.5)), stop_token_ids=(7, 8, 9), min_tokens=2, seed=11,
    )  # fmt: skip


@over_dialects
def test_ignoring_the_end_of_a_turn_keeps_the_clients_own_stop_tokens(dialect: Dialect) -> None:
    assert asked(parse(dialect, ignore_eos=True, stop_token_ids=[9])).stop_token_ids == (9,)
    assert asked(parse(dialect, ignore_eos=False)).stop_token_ids == (7,)


@over_dialects
@pytest.mark.parametrize("top_k", [0, -1, None, VOCAB_SIZE, VOCAB_SIZE + 1, 2**62])
def test_one_table_says_when_top_k_is_off(dialect: Dialect, top_k: int | None) -> None:
    assert asked(parse(dialect, top_k=top_k)).top_k == 0
    assert asked(parse(dialect, top_k=VOCAB_SIZE - 1)).top_k == VOCAB_SIZE - 1


@over_dialects
def test_each_choice_has_a_seed_of_its_own_and_the_first_that_of_a_single_one(dialect: Dialect) -> None:
    request = parse(dialect, n=3, seed=5)
    assert [asked(request, sibling=i).seed for i in range(3)] == [5, 6, 7]
    assert asked(parse(dialect, n=3), sibling=2).seed is None


@over_dialects
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_k": True}, "top_k"),
        ({"min_p": -0.01}, "min_p"),
        ({"min_p": 1.01}, "min_p"),
        ({"typical_p": 0}, "typical_p"),
        ({"typical_p": 1.1}, "typical_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": -1}, "repetition_penalty"),
        ({"repetition_penalty": 101}, "repetition_penalty"),
        ({"presence_penalty": 2.01}, "presence_penalty"),
        ({"frequency_penalty": -2.01}, "frequency_penalty"),
        ({"logit_bias": {"abc": 1}}, "logit_bias.abc"),
        ({"logit_bias": {"-1": 1}}, "logit_bias.-1"),
        ({"logit_bias": {"1.0": 1}}, "logit_bias.1.0"),
        ({"logit_bias": {" 1": 1}}, "logit_bias. 1"),
        ({"logit_bias": {"1_0": 1}}, "logit_bias.1_0"),
        ({"logit_bias": {"\u0661": 1}}, "logit_bias.\u0661"),
        ({"logit_bias": {"99999999999": 1}}, "logit_bias.99999999999"),
        ({"logit_bias": {"1": 101}}, "logit_bias[...]"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"stop_token_ids": [1, -1]}, "stop_token_ids[1]"),
        ({"stop_token_ids": [1] * 129}, "stop_token_ids"),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 10**9}, "n"),
        ({"n": 128, "max_tokens": 2**20}, "n"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": "x" * 513}, "stop"),
        ({"seed": 2**63}, "seed"),
        ({"temperature": 2.5}, "temperature"),
        ({"top_p": 0}, "top_p"),
    ],
)
def test_what_is_out_of_bounds_is_refused_with_its_path(
    dialect: Dialect, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(dialect, **fields)
    assert caught.value.param == param
    assert str(caught.value)


def test_choices_times_the_rest_of_the_context_is_bounded_too() -> None:
    request = parse(openai_chat.DIALECT, n=128)
    with pytest.raises(InvalidRequest, match="128 x 99990") as caught:
        sampling_params(
            request, num_prompt_tokens=10, max_context_tokens=100_000, stop_token_ids=(), vocab_size=9
        )
    assert caught.value.param == "n"


@pytest.mark.parametrize(("echo", "num_prompt_tokens", "fits"), [(False, 9000, True), (True, 9000, False)])
def test_log_probabilities_are_bounded_by_the_product_of_sizes(
    echo: bool, num_prompt_tokens: int, fits: bool
) -> None:
    request = parse(openai_completions.DIALECT, n=16, max_tokens=1000, logprobs=20, echo=echo)

    def ask() -> SamplingParams:
        return sampling_params(
            request,
            num_prompt_tokens=num_prompt_tokens,
            max_context_tokens=20_000,
            stop_token_ids=(),
            vocab_size=9,
        )

    if fits:
        assert ask().num_logprobs == 20
    else:
        with pytest.raises(InvalidRequest, match="16 x 10000 x 21") as caught:
            ask()
        assert caught.value.param == "logprobs"


@over_dialects
@given(field=st.sampled_from(["n", "min_tokens", "top_k", "seed", "max_tokens"]), value=st.integers())
def test_any_integer_is_in_bounds_or_refused_by_name(dialect: Dialect, field: str, value: int) -> None:
    try:
        request = parse(dialect, **{field: value})
        params = asked(request)
    except InvalidRequest as error:  # by the field alone, or by what fits after the prompt
        assert error.param == field
        return
    assert request.num_choices <= 128
    assert 1 <= params.max_tokens < 2**31
    assert 0 <= params.top_k < VOCAB_SIZE
    assert 0 <= params.min_tokens <= params.max_tokens


def test_chat_logprobs_are_asked_for_in_two_fields() -> None:
    chat = openai_chat.DIALECT
    assert parse(chat).num_logprobs is None
    assert parse(chat, logprobs=False, top_logprobs=0).num_logprobs is None
    assert parse(chat, logprobs=True).num_logprobs == 0
    assert parse(chat, logprobs=True, top_logprobs=20).num_logprobs == 20
    for fields in (
        {"top_logprobs": 3},
        {"logprobs": True, "top_logprobs": 21},
        {"logprobs": True, "top_logprobs": -1},
    ):
        with pytest.raises(InvalidRequest) as caught:
            parse(chat, **fields)
        assert caught.value.param == "top_logprobs"
