"""No text costs more than its length: every pattern that reads what clients write is linear.

The bound is far above linear work on a slow machine; quadratic work takes minutes to hours here.
"""

import re
import time
from collections.abc import Callable
from functools import partial

import pytest
from tokenizers import Regex, pre_tokenizers

from tests.tokenization.vocabularies import tiny_metadata
from tokenization import Tokenizer, tokenizer_from_gguf
from tokenization.bpe import cut_at_words
from tokenization.literals import continuation, forged_start, longest_match
from tokenization.pre_tokenizers import PRE_TOKENIZATIONS
from tokenization.stop_strings import StopMatcher
from tokenization.user_text import plain_copy

BOUND_S = 8.0
CHARS = 300_000
FAMILIES = {rule: name for name, rule in PRE_TOKENIZATIONS.items()}
LITERALS = ("<|im_start|>", "<|im_end|>", "<|" + "a" * 60, "a" * 100, "<<<<<<<<<<b")


def run_of(unit: str, *, end: str = "") -> str:
    return unit * (CHARS // len(unit)) + end


TEXTS = (
    run_of(" ", end="a"), run_of(" ", end="中"), run_of(" ", end="1"), run_of("\t", end="."),
    run_of("\u00a0", end="x"), run_of("\r\n", end="x"), run_of(" \n", end="x"), run_of("A", end="1"),
    run_of("中"), run_of("\u0301", end="1"), run_of("'"), run_of("1"), run_of("."), run_of("/"),
    run_of("a"), run_of("hello"), run_of("<"), run_of("<|im_star"),
)  # fmt: skip


def assert_fast(work: Callable[[], object], what: str) -> None:
    began = time.perf_counter()
    work()
    took = time.perf_counter() - began
    assert took < BOUND_S, f"{what}: {took:.1f} s for {CHARS} characters"


@pytest.mark.parametrize("family", FAMILIES.values())
def test_every_family_cuts_long_runs_in_linear_time(family: str) -> None:
    cutter = PRE_TOKENIZATIONS[family].pre_tokenizer()
    text = "".join(run[-CHARS // 3 :] for run in TEXTS[:6])
    assert_fast(lambda: cutter.pre_tokenize_str(text), family)


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: repr(text[:3] + "…" + text[-1]))
def test_no_long_run_makes_encoding_superlinear(text: str) -> None:
    tokenizer: Tokenizer = tokenizer_from_gguf(tiny_metadata(user_defined=("<think>",)))
    assert_fast(lambda: tokenizer.encode(text), "encode")
    assert_fast(lambda: list(cut_at_words(text)), "cut_at_words")


@pytest.mark.parametrize("build", [longest_match, forged_start, continuation])
def test_literals_are_found_in_linear_time(build: Callable[[tuple[str, ...]], re.Pattern[str]]) -> None:
    pattern = build(LITERALS)
    for text in TEXTS:
        assert_fast(partial(pattern.findall, text), build.__name__)


@pytest.mark.parametrize("stop", [("a" * 511 + "b",), ("ab" * 255 + "c", "b" * 512)])
def test_stop_strings_are_found_in_linear_time(stop: tuple[str, ...]) -> None:
    def push_all() -> None:
        matcher = StopMatcher(stop)
        for _ in range(CHARS // 100):
            matcher.push("a" * 100)

    assert_fast(push_all, "stop strings")


def test_one_long_key_above_many_values_costs_their_sum_and_not_their_product() -> None:
    value = {"k" * CHARS: ["x"] * 100_000}
    assert_fast(lambda: plain_copy(value, "tools"), "plain_copy")


@pytest.mark.parametrize(
    "text", ["", " ", "a  ", "  a", "a \t b \u3000", "中  中 ", "a\n  \n ", " \u2028 x", "\v \f"]
)
def test_white_space_at_the_end_is_cut_off_as_by_the_original_pattern(text: str) -> None:
    ours, original = (
        pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(p), "isolated") for p in ("[\r\n]", pattern)]
        ).pre_tokenize_str(text)
        for pattern in (PRE_TOKENIZATIONS["deepseek-llm"].patterns[3], r"\s+$")
    )
    assert ours == original
