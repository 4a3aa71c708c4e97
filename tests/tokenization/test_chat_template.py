"""Templates render as Hugging Face renders them, fail by name, and reach nothing."""

from datetime import datetime
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from tests.tokenization.templates import TEMPLATES
from tokenization import BadText, BadVocabulary, ChatTemplate, NoChatTemplate, TemplateError, byte_tokenizer

BYTES = byte_tokenizer()
TOKENS = {"bos_token": "<|bos|>", "eos_token": "<|im_end|>"}
CALL = {
    "type": "function",
    "id": "call_1",
    "function": {"name": "look_up", "arguments": {"q": "ü & <b>", "n": 2}},
}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "Hi"}],
    "system": [{"role": "system", "content": "Be brief. "}, {"role": "user", "content": "  Grüße\n"}],
    "turns": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nb"},
        {"role": "user", "content": "c's < d"},
    ],
    "tools": [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": '{"t": 3}', "tool_call_id": "call_1"},
    ],
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Finds <b>things</b> & „more“.",
            "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
        },
    }
]


def _hugging_face(source: str, messages: list[Any], **variables: object) -> str:
    ((text,), _) = render_jinja_template([messages], chat_template=source, **TOKENS, **variables)
    return str(text)


@pytest.mark.parametrize("prompt", [True, False], ids=["prompt", "history"])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_every_family_renders_as_hugging_face_does(template: str, chat: str, prompt: bool) -> None:
    source, tools = TEMPLATES[template], TOOLS if chat == "tools" else None
    ours = ChatTemplate(source, BYTES).render(CHATS[chat], tools=tools, add_generation_prompt=prompt)
    assert ours.text == _hugging_face(source, CHATS[chat], tools=tools, add_generation_prompt=prompt)


@pytest.mark.parametrize("chat", ["one", "system", "turns"])
def test_the_default_model_renders_and_encodes_as_hugging_face_does(smollm, smollm_metadata, chat) -> None:
    template = ChatTemplate.from_gguf(smollm_metadata, smollm)
    prompt = template.render(CHATS[chat])
    source = smollm_metadata["tokenizer.chat_template"]
    text = _hugging_face(source, CHATS[chat], add_generation_prompt=True)
    assert prompt.text == text
    assert smollm.encode_rendered(prompt) == smollm.encode(text, parse_special=True)


def test_variables_reach_the_template() -> None:
    template = ChatTemplate("{{ style }} {{ documents[0].title }}", BYTES)
    assert template.render([], style="terse", documents=[{"title": "T"}]).text == "terse T"


@pytest.mark.parametrize("name", ["bos_token", "eos_token", "raise_exception", "range"])
def test_a_variable_of_the_template_cannot_be_replaced(name: str) -> None:
    variables: dict[str, Any] = {name: "y"}
    with pytest.raises(TemplateError, match=f"'{name}' belongs to the template"):
        ChatTemplate("x", BYTES).render([], **variables)


def test_null_content_is_empty_and_other_nulls_are_absent() -> None:
    template = ChatTemplate(
        "{% for m in messages %}[{{ m.content }}{{ m.name is defined }}]{% endfor %}", BYTES
    )
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "content": None, "name": None},
        {"role": "assistant"},
    ]
    assert template.render(messages).text == "[False][False]"


def test_the_clock_is_ours_to_set() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", BYTES, now=lambda: datetime(2024, 7, 26))  # noqa: DTZ001 - the templates' clock is naive
    assert template.render([]).text == "26 Jul 2024"


def test_a_refusal_quotes_the_templates_own_message() -> None:
    template = ChatTemplate(
        "{{ raise_exception('Roles must alternate, not ' ~ messages[0].content) }}", BYTES
    )
    with pytest.raises(TemplateError, match=r"^Roles must alternate, not <\|im_end\|>$"):
        template.render([{"role": "user", "content": "<|im_end|>"}])


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("{{ messages[0].missing.deeper }}", "missing"),
        ("{{ messages[7].content }}", "no element 7"),
        ("{{ 1 // 0 }}", "zero"),
        ("{{ 'a' + 1 }}", "concatenate"),
        ("{{ missing | tojson }}", "not JSON serializable"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ cycler.__init__.__globals__.os.system('id') }}", "unsafe"),
        ("{{ (strftime_now.__globals__).x }}", "unsafe"),
        ("{% set ns = namespace() %}{% set ns.__class__ = 1 %}", "may not set"),
        ("{{ dict.__subclasses__() }}", "no attribute"),
        ("{{ range(9999999) | list }}", "[Rr]ange too big"),
        ("{{ 'x' * 99999999999 }}", "value of size"),
        ("{{ 9 ** 999999999 }}", "value of size"),
        ("{% for i in range(9999) %}{{ 'x' * 9999 }}{% endfor %}", "more than 1000000 characters"),
    ],
)
def test_a_template_that_fails_or_reaches_out_is_a_named_error(source: str, named: str) -> None:
    template = ChatTemplate(source, BYTES, max_chars=1_000_000)
    with pytest.raises(TemplateError, match=named):
        template.render([{"role": "user", "content": "hi"}])


def test_a_template_that_runs_on_is_stopped() -> None:
    template = ChatTemplate("{% for i in range(9999) %}x{% endfor %}", BYTES, max_seconds=-1)
    with pytest.raises(TemplateError, match="ran longer than -1 s"):
        template.render([])


def test_a_template_that_does_not_compile_is_a_named_error() -> None:
    with pytest.raises(TemplateError, match="does not compile"):
        ChatTemplate("{% for %}", BYTES)


def test_a_checkpoint_without_a_template_is_refused_by_name() -> None:
    with pytest.raises(NoChatTemplate, match="no chat template"):
        ChatTemplate.from_gguf({}, BYTES)
    with pytest.raises(BadVocabulary, match="is int"):
        ChatTemplate.from_gguf({"tokenizer.chat_template": 3}, BYTES)


def test_the_fingerprint_is_of_the_source() -> None:
    assert ChatTemplate("a", BYTES).fingerprint == ChatTemplate("a", BYTES).fingerprint
    assert ChatTemplate("a", BYTES).fingerprint != ChatTemplate("b", BYTES).fingerprint


def _nested(depth: int) -> object:
    value: object = "x"
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("messages", "tools", "path"),
    [
        ([{"role": "user", "content": "\ud800"}], None, r"messages\[0\].content: lone surrogate U\+D800"),
        ([{"role": "user", "\udfff": ""}], None, r"messages\[0\] \(a key\): lone"),
        (
            [{"role": "a", "tool_calls": [{"function": {"name": "\ud800"}}]}],
            None,
            r"messages\[0\].tool_calls\[0\].function.name",
        ),
        ([], [{"function": {"description": "\ud83d"}}], r"tools\[0\].function.description: lone"),
        ([{"role": "user", "content": b"x"}], None, r"content: is bytes"),
        ([{"role": "user", "content": {1: 2}}], None, r"content: has a key of type int"),
        ([{"role": "user", "content": _nested(100)}], None, "nested more than 64 deep"),
    ],
)
def test_what_is_not_json_text_is_refused_by_its_path(messages, tools, path) -> None:
    with pytest.raises(BadText, match=path):
        ChatTemplate("x", BYTES).render(messages, tools=tools)
