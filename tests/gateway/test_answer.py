"""Log-probabilities, echoed prompts and several choices: the same however the tokens came."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

import pytest
from hypothesis import given

from core import FinishReason, TokenOutput
from core.request import TokenLogprob
from gateway.answer import AnswerText, Choice, EchoedPrompt, joined, mixed
from gateway.events import (
    LEAST_LOGPROB,
    AnswerToken,
    ChoiceEnded,
    EndReason,
    Event,
    Failed,
    Finished,
    Started,
    TextDelta,
    Usage,
)
from tests.gateway.test_generation import (
    IM_END,
    TOKENIZER,
    PlayedOutputs,
    cut,
    expected_text,
    places,
    stop_strings,
    text_of,
    token_ids,
)


def scored(ids: Sequence[int]) -> tuple[TokenLogprob, ...]:
    """A log-probability that says which token it belongs to."""
    return tuple(TokenLogprob(token_id, -token_id / 1000, ((token_id, -0.25),)) for token_id in ids)


def outputs_of(
    pieces: Sequence[tuple[int, ...]],
    *,
    reason: FinishReason = FinishReason.LENGTH,
    prompt: Sequence[int] = (),
) -> list[TokenOutput]:
    return [
        TokenOutput(
            request_id="r",
            token_ids=ids,
            logprobs=scored(ids),
            prompt_logprobs=scored(prompt[1:]) if i == 0 else (),
            finish_reason=reason if i == len(pieces) - 1 else None,
            num_cached_tokens=2,
        )
        for i, ids in enumerate(pieces)
    ]


async def events_of(
    outputs: PlayedOutputs,
    *,
    stop: Sequence[str] = (),
    has_logprobs: bool = True,
    echo: EchoedPrompt | None = None,
    max_tokens: int | None = None,
) -> list[Event]:
    choice = Choice(
        AnswerText(TOKENIZER, stop=stop),
        num_prompt_tokens=9,
        stop_token_ids=frozenset({IM_END}),
        has_logprobs=has_logprobs,
        echo=echo,
        max_tokens=max_tokens,
    )
    return [event async for event in choice.events(outputs, is_draining=lambda: False)]


def tokens_of(events: Sequence[Event]) -> list[AnswerToken]:
    return [token for event in events if isinstance(event, TextDelta) for token in event.tokens]


@given(ids=token_ids, stops=stop_strings, places=places)
async def test_log_probabilities_do_not_depend_on_how_the_tokens_are_cut(
    ids: list[int], stops: list[str], places: list[int]
) -> None:
    events = await events_of(PlayedOutputs(outputs_of(cut(ids, places))), stop=stops)
    whole = await events_of(PlayedOutputs(outputs_of([tuple(ids)])), stop=stops)
    assert tokens_of(events) == tokens_of(whole)
    assert text_of(events) == text_of(whole) == expected_text(TOKENIZER.decode(ids), stops)
    last = events[-1]
    assert isinstance(last, Finished)
    kept = ids[: last.usage.num_output_tokens]
    assert [token.token for token in tokens_of(events)] == [TOKENIZER.token_bytes(each) for each in kept]
    assert [token.logprob for token in tokens_of(events)] == [-each / 1000 for each in kept]


@given(ids=token_ids, stops=stop_strings, places=places)
async def test_no_log_probability_tells_of_text_that_is_held_back(
    ids: list[int], stops: list[str], places: list[int]
) -> None:
    shown = 0
    for event in await events_of(PlayedOutputs(outputs_of(cut(ids, places))), stop=stops):
        if isinstance(event, TextDelta):
            shown += len(event.text)
            assert all(token.offset <= shown for token in event.tokens)


@given(ids=token_ids, places=places)
async def test_offsets_are_where_the_tokens_stand_in_the_text(ids: list[int], places: list[int]) -> None:
    events = await events_of(PlayedOutputs(outputs_of(cut(ids, places))))
    text, offsets = text_of(events), [token.offset for token in tokens_of(events)]
    assert offsets == sorted(offsets)
    for token in tokens_of(events):
        if token.token.isascii():
            assert text[token.offset :].startswith(token.token.decode())


async def test_without_asking_nothing_is_told() -> None:
    assert tokens_of(await events_of(PlayedOutputs(outputs_of([(97, 98)])), has_logprobs=False)) == []


async def test_minus_infinity_becomes_a_number() -> None:
    never = TokenLogprob(97, float("-inf"), ((98, -0.5), (99, float("-inf")), (100, float("nan"))))
    output = TokenOutput(
        request_id="r", token_ids=(97,), logprobs=(never,), finish_reason=FinishReason.LENGTH
    )
    [token] = tokens_of(await events_of(PlayedOutputs([output])))
    assert token.logprob == LEAST_LOGPROB
    assert token.top == ((b"b", -0.5), (b"c", LEAST_LOGPROB), (b"d", LEAST_LOGPROB))


@pytest.mark.parametrize("text", [None, "ab\U0001f979c"])
async def test_an_echoed_prompt_comes_first_with_the_chances_of_all_tokens_but_the_first(
    text: str | None,
) -> None:
    prompt = [*"ab\U0001f979c".encode()]
    played = PlayedOutputs(outputs_of([(100,), (101,)], prompt=prompt))
    events = await events_of(played, echo=EchoedPrompt(TOKENIZER, prompt, text=text))
    assert text_of(events) == "ab\U0001f979cde"
    tokens = tokens_of(events)
    assert tokens[0].logprob is None
    assert [token.logprob for token in tokens[1:]] == [-each / 1000 for each in (*prompt[1:], 100, 101)]
    assert [token.offset for token in tokens] == [0, 1, 2, 2, 2, 2, 3, 4, 5]


async def test_a_long_echo_is_spelled_elsewhere_and_is_the_same() -> None:
    prompt = [97] * 5000
    events = await events_of(
        PlayedOutputs(outputs_of([(98,)], prompt=prompt)), echo=EchoedPrompt(TOKENIZER, prompt, text=None)
    )
    assert text_of(events) == "a" * 5000 + "b"
    assert len(tokens_of(events)) == 5001


async def test_no_tokens_at_all_may_be_asked_for() -> None:
    prompt = [97, 98]
    played = PlayedOutputs(outputs_of([(99,)], prompt=prompt))
    events = await events_of(played, echo=EchoedPrompt(TOKENIZER, prompt, text=None), max_tokens=0)
    assert text_of(events) == "ab"
    assert len(tokens_of(events)) == 2
    last = events[-1]
    assert isinstance(last, Finished)
    assert (last.reason, last.usage.num_output_tokens) == (EndReason.LENGTH, 0)
    assert played.finished_with == 0


def choice_of(index: int, *, ids: Sequence[int] = (97,)) -> Choice:
    choice = Choice(
        AnswerText(TOKENIZER), num_prompt_tokens=5, stop_token_ids=frozenset({IM_END}), index=index
    )
    choice.text.push(ids)
    return choice


async def played(events: Sequence[Event]) -> AsyncGenerator[Event, None]:
    for event in events:
        await asyncio.sleep(0)
        yield event


async def test_choices_end_one_by_one_and_the_last_ends_the_answer() -> None:
    choices = [choice_of(index) for index in range(4)]
    mixture: list[Event] = []
    for index in (2, 0, 3, 1):
        mixture += [
            Started(num_prompt_tokens=5),
            TextDelta("x", index),
            Finished(reason=EndReason.STOP, usage=choices[index].usage, index=index),
        ]
    events = [event async for event in joined(played(mixture), choices, n=2)]
    assert events[0] == Started(num_prompt_tokens=10)
    assert [event.index for event in events if isinstance(event, ChoiceEnded)] == [2, 0, 3]
    # Two prompts of two choices each: each prompt is counted once, each choice's output always.
    assert events[-1] == Finished(
        reason=EndReason.STOP,
        index=1,
        usage=Usage(num_prompt_tokens=10, num_cached_tokens=0, num_output_tokens=4),
    )


async def test_a_choice_that_fails_ends_the_others() -> None:
    choices = [choice_of(index) for index in range(2)]
    failed = Failed(code="generation_failed", message="it broke", usage=choices[1].usage)
    mixture: list[Event] = [TextDelta("x", 0), failed, TextDelta("y", 0)]
    events = [event async for event in joined(played(mixture), choices, n=2)]
    assert [type(event) for event in events] == [Started, TextDelta, Failed]
    last = events[-1]
    assert isinstance(last, Failed)
    assert last.usage.num_prompt_tokens == 5


async def test_mixing_keeps_each_order_and_reads_little_ahead() -> None:
    num_made = 0

    async def source(index: int) -> AsyncIterator[Event]:
        nonlocal num_made
        for i in range(50):
            num_made += 1
            yield TextDelta(str(i), index)

    got: list[TextDelta] = []
    async with mixed([source(index) for index in range(3)]) as events:
        async for event in events:
            assert isinstance(event, TextDelta)
            got.append(event)
            assert num_made <= len(got) + 4  # one in the queue, and one in the hands of each reader
            if len(got) == 150:
                break
    for index in range(3):
        assert [delta.text for delta in got if delta.index == index] == [str(i) for i in range(50)]


async def test_leaving_the_mixture_stops_every_source_and_raises_what_was_raised() -> None:
    closed: list[int] = []

    async def source(index: int) -> AsyncGenerator[Event, None]:
        try:
            while True:
                yield TextDelta("x", index)
        finally:
            closed.append(index)

    sources = [source(index) for index in range(3)]

    async def read_and_fail() -> None:
        async with mixed(sources) as events:
            async for _ in events:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await read_and_fail()
    assert len(asyncio.all_tasks()) == 1
    for each in sources:
        await each.aclose()
    assert sorted(closed) == [0, 1, 2]
