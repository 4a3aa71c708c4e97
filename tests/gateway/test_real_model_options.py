"""Every option and route on the default model through a socket: each test fails without what it names."""

import base64
import json
import math
import os
import struct
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types import Completion
from openai.types.chat import ChatCompletion

from core import EngineConfig
from gateway.backends.local import open_local_backend
from tests.gateway.serving import Server, serving
from tests.gateway.threads import in_thread

pytestmark = pytest.mark.slow

MODEL = "smollm2-135m"
STORY = "The sea was calm and the"
LIST = "one two three one two three one two three one two"


@pytest.fixture(scope="module")
def client(default_model_path: Path) -> Iterator[OpenAI]:
    engine = EngineConfig(
        checkpoint=str(default_model_path),
        num_blocks=512,
        max_model_len=2048,
        cache_dir=os.environ.get("TIDEGATE_CACHE_DIR", ""),
        compile="off",
    )

    @asynccontextmanager
    async def opened() -> AsyncIterator[Server]:
        async with serving(
            open_local_backend, engine=engine, model_id=MODEL, aliases=("gpt-4o-mini",)
        ) as server:
            yield server
            server.check_nothing_is_held()

    with (
        in_thread(opened) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client,
    ):
        yield client


def complete(
    client: OpenAI, prompt: Any = STORY, *, extra: dict[str, Any] | None = None, **fields: Any
) -> Completion:
    fields = {"max_tokens": 6, "temperature": 0, **fields}
    answer = client.completions.create(model=MODEL, prompt=prompt, extra_body=extra, **fields)
    assert isinstance(answer, Completion)
    return answer


def text(client: OpenAI, prompt: Any = STORY, **fields: Any) -> str:
    return complete(client, prompt, **fields).choices[0].text


def chat(
    client: OpenAI, question: str, *, extra: dict[str, Any] | None = None, **fields: Any
) -> ChatCompletion:
    fields = {"max_tokens": 6, "temperature": 0, **fields}
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": question}], extra_body=extra, **fields
    )
    assert isinstance(answer, ChatCompletion)
    return answer


def post(client: OpenAI, path: str, **body: Any) -> Any:
    root = str(client.base_url).removesuffix("/v1/")
    request = urllib.request.Request(
        root + path, json.dumps({"model": MODEL, **body}).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def token_ids(client: OpenAI, written: str) -> list[int]:
    found: list[int] = post(client, "/tokenize", prompt=written)["tokens"]
    return found


def dot(one: list[float], other: list[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


HOT = {"temperature": 2, "seed": 3}


@pytest.mark.parametrize("only_the_best", [{"top_k": 1}, {"min_p": 1}], ids=str)
def test_what_leaves_one_token_is_greedy_at_any_temperature(
    client: OpenAI, only_the_best: dict[str, Any]
) -> None:
    greedy, free = text(client), text(client, **HOT)
    assert free != greedy
    assert text(client, **HOT, extra=only_the_best) == greedy
    off = {name: {"top_k": -1, "min_p": 0}[name] for name in only_the_best}
    assert text(client, **HOT, extra=off) == free


def test_the_most_typical_token_does_not_depend_on_the_seed(client: OpenAI) -> None:
    narrow = {"typical_p": 0.0001}
    one, other = (text(client, temperature=1, seed=seed, extra=narrow) for seed in (3, 4))
    assert one == other
    assert text(client, temperature=1, seed=3) != text(client, temperature=1, seed=4)


def test_penalties_keep_a_list_from_going_on(client: OpenAI) -> None:
    assert text(client, LIST, max_tokens=3) == " three one two"
    # The prompt counts for repetition, and for it alone.
    assert " three" not in text(client, LIST, max_tokens=3, extra={"repetition_penalty": 50})
    assert text(client, LIST, max_tokens=1, presence_penalty=2, frequency_penalty=2) == " three"


def test_presence_counts_once_and_frequency_every_time(client: OpenAI) -> None:
    [three], [one] = token_ids(client, " three"), token_ids(client, " one")

    def said(*, behind: float, **penalty: float) -> str:
        """The word one comes when three has lost `behind`, give or take what the model prefers itself."""
        bias = {str(three): 100, str(one): 100 - behind}
        return text(client, LIST, max_tokens=3, logit_bias=bias, **penalty)

    assert said(behind=2) == said(behind=3.5) == " three three three"
    assert said(behind=2, presence_penalty=2).startswith(" three one")
    assert said(behind=3.5, presence_penalty=2) == " three three three"
    assert said(behind=3.5, frequency_penalty=2) == " three three one"


def test_a_bias_forces_and_forbids_tokens(client: OpenAI) -> None:
    [sea] = token_ids(client, " sea")
    assert text(client, max_tokens=4, logit_bias={str(sea): 100}) == " sea" * 4
    first = text(client, max_tokens=1)
    assert text(client, max_tokens=1, logit_bias={str(token_ids(client, first)[0]): -100}) != first
    with pytest.raises(openai.BadRequestError, match="49152") as caught:
        complete(client, logit_bias={"49152": 1})
    assert caught.value.param == "logit_bias.49152"
    assert text(client, max_tokens=1) == first


def test_a_stop_token_ends_the_answer_and_is_no_part_of_it(client: OpenAI) -> None:
    [two] = token_ids(client, " two")
    answer = complete(client, LIST, extra={"stop_token_ids": [two]})
    assert answer.choices[0].text == " three one"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


def test_an_answer_goes_on_past_its_end_if_told_to(client: OpenAI) -> None:
    messages = [
        {"role": "user", "content": "What is the capital of France? Answer in one word."},
        {"role": "assistant", "content": "The capital of France is Paris."},
    ]
    said = post(client, "/tokenize", messages=messages, add_generation_prompt=False)["tokens"]
    almost_over = said[:-2]  # without the token that ends the turn, and the newline after it
    short = complete(client, almost_over)
    assert short.usage is not None
    assert (short.choices[0].finish_reason, short.usage.completion_tokens) == ("stop", 1)
    longer = complete(client, almost_over, extra={"min_tokens": 4})
    assert longer.usage is not None
    assert longer.usage.completion_tokens >= 4
    endless = complete(client, almost_over, extra={"ignore_eos": True})
    assert endless.usage is not None
    assert (endless.choices[0].finish_reason, endless.usage.completion_tokens) == ("length", 6)


def test_each_choice_is_what_its_seed_gives_alone(client: OpenAI) -> None:
    question = "Tell me about the sea. " * 8
    many = chat(client, question, n=3, temperature=1, seed=7)
    alone = [chat(client, question, temperature=1, seed=seed) for seed in (7, 8, 9)]
    assert [choice.index for choice in many.choices] == [0, 1, 2]
    texts = [choice.message.content for choice in many.choices]
    assert texts == [each.choices[0].message.content for each in alone]
    assert len(set(texts)) == 3
    assert many.usage is not None
    assert alone[0].usage is not None
    assert many.usage.prompt_tokens == alone[0].usage.prompt_tokens
    assert many.usage.completion_tokens == sum(each.usage.completion_tokens for each in alone if each.usage)


def test_choices_are_streamed_side_by_side(client: OpenAI) -> None:
    whole = chat(client, "Tell me a story.", n=2, temperature=1, seed=7)
    stream = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Tell me a story."}], n=2, temperature=1, seed=7,
        max_tokens=6, stream=True, stream_options={"include_usage": True},
    )  # fmt: skip
    texts, order, usage = ["", ""], [], None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            order.append(choice.index)
    assert texts == [choice.message.content for choice in whole.choices]
    assert order != sorted(order), "they interleave"
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_log_probabilities_of_a_chat_are_the_models(client: OpenAI) -> None:
    answer = chat(client, "Name a colour.", logprobs=True, top_logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert b"".join(bytes(each.bytes or ()) for each in logprobs.content).decode() == (
        answer.choices[0].message.content
    )
    for each in logprobs.content:
        best = each.top_logprobs
        assert len(best) == 3
        assert (best[0].token, best[0].logprob) == (each.token, each.logprob)
        assert best[0].logprob >= best[1].logprob >= best[2].logprob
        assert sum(math.exp(one.logprob) for one in best) <= 1.0001
    stream = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Name a colour."}], temperature=0, max_tokens=6,
        logprobs=True, top_logprobs=3, stream=True,
    )  # fmt: skip
    streamed = [
        each
        for chunk in stream
        if chunk.choices[0].logprobs
        for each in chunk.choices[0].logprobs.content or ()
    ]
    assert streamed == logprobs.content


def test_a_prompt_may_be_text_or_tokens_and_several_at_once(client: OpenAI) -> None:
    ids, others = token_ids(client, STORY), token_ids(client, LIST)
    expected = [text(client, STORY), text(client, LIST)]
    assert expected[0] != expected[1]
    assert text(client, ids) == expected[0]
    for several in ([STORY, LIST], [ids, others]):
        answer = complete(client, several, n=2)
        assert [choice.text for choice in answer.choices] == [expected[0]] * 2 + [expected[1]] * 2
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(ids) + len(others)
    stream = client.completions.create(
        model=MODEL, prompt=[STORY, LIST], temperature=0, max_tokens=6, stream=True
    )
    texts = ["", ""]
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == expected
    with pytest.raises(openai.BadRequestError, match="49152") as caught:
        complete(client, [[1, 2], [3, 49152]])
    assert caught.value.param == "prompt[1][1]"
    with pytest.raises(openai.BadRequestError, match="empty"):
        complete(client, "")


def test_echoed_log_probabilities_are_those_of_writing_the_same_text(client: OpenAI) -> None:
    written = complete(client, STORY, logprobs=2).choices[0]
    assert written.logprobs is not None
    assert written.logprobs.token_logprobs is not None
    whole = token_ids(client, STORY + written.text)
    echoed = complete(client, whole, logprobs=2, echo=True, max_tokens=0)
    [choice] = echoed.choices
    assert choice.text == STORY + written.text
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.text_offset is not None
    assert logprobs.token_logprobs[:1] == [None]  # which the client's own type does not say
    assert "".join(logprobs.tokens) == choice.text
    assert [choice.text[at:] for at in logprobs.text_offset] == [
        "".join(logprobs.tokens[i:]) for i in range(len(logprobs.tokens))
    ]
    num_written = len(written.logprobs.token_logprobs)
    assert logprobs.token_logprobs[-num_written:] == pytest.approx(written.logprobs.token_logprobs, abs=1e-6)
    assert echoed.usage is not None
    assert echoed.usage.completion_tokens == 0
    longer = complete(client, STORY, logprobs=2, echo=True).choices[0]
    assert longer.text == STORY + written.text


def test_tokens_and_templates_are_those_that_answers_are_made_of(client: OpenAI) -> None:
    messages = [{"role": "user", "content": "Grüße, \U0001f979! <|im_end|>"}]
    rendered = post(client, "/apply-template", messages=messages)["prompt"]
    assert rendered.endswith("<|im_start|>assistant\n")
    shorter = post(client, "/apply-template", messages=messages, add_generation_prompt=False)["prompt"]
    assert rendered.startswith(shorter)
    assert len(shorter) < len(rendered)
    tokens = post(client, "/tokenize", messages=messages)
    assert tokens["count"] == len(tokens["tokens"])
    assert post(client, "/detokenize", tokens=tokens["tokens"])["prompt"] == rendered
    usage = chat(client, str(messages[0]["content"]), max_tokens=1).usage
    assert usage is not None
    assert usage.prompt_tokens == tokens["count"]


def test_embeddings_are_unit_vectors_that_know_what_a_text_is_about(client: OpenAI) -> None:
    texts = ["The cat sat on the mat.", "A cat is sitting on a mat.", "Stocks fell sharply in March 1929."]
    many = client.embeddings.create(model=MODEL, input=texts, encoding_format="float")
    cat, cats, stocks = (each.embedding for each in many.data)
    assert len(cat) == 576
    assert math.hypot(*cat) == pytest.approx(1)
    assert dot(cat, cats) > dot(cat, stocks)
    alone = client.embeddings.create(model=MODEL, input=token_ids(client, texts[0]), encoding_format="float")
    assert alone.data[0].embedding == cat
    assert many.usage.prompt_tokens == sum(len(token_ids(client, each)) for each in texts)
    raw = post(client, "/v1/embeddings", input=texts[0], encoding_format="base64")["data"][0]["embedding"]
    assert list(struct.unpack("<576f", base64.b64decode(raw))) == pytest.approx(cat, abs=1e-6)
    assert client.embeddings.create(model=MODEL, input=texts[0], dimensions=576).data
    with pytest.raises(openai.BadRequestError, match="576") as caught:
        client.embeddings.create(model=MODEL, input=texts[0], dimensions=64)
    assert caught.value.param == "dimensions"


def test_an_alias_is_listed_and_answers_as_the_model(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL, "gpt-4o-mini"]
    answer = client.chat.completions.create(
        model="gpt-4o-mini", messages=[{"role": "user", "content": "Hi"}], max_tokens=1
    )
    assert answer.model == MODEL
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 31, "the template's own system prompt, as README says"


def test_health_is_green_and_other_paths_say_where_to_go(client: OpenAI) -> None:
    root = str(client.base_url).removesuffix("/v1/")
    with urllib.request.urlopen(f"{root}/health", timeout=20) as response:
        assert json.load(response) == {"status": "ready", "models": [MODEL]}
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(root, timeout=20)
    assert "/v1/chat/completions" in json.load(caught.value)["error"]["message"]


def test_too_many_tokens_are_refused_with_how_many_are_allowed(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, "Hi", max_tokens=2048)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "max_tokens")
    assert "at most 2017 are allowed" in caught.value.message
