"""How each family cuts text into words before byte-pair merging. One entry per `tokenizer.ggml.pre`.

Source: the `pre_tokenizer` of each family's own `tokenizer.json`; the names are llama.cpp's.
Each pattern in turn isolates its matches within what the pattern before it left together.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tokenizers import Regex, normalizers, pre_tokenizers


@dataclass(slots=True, frozen=True)
class PreTokenization:
    """`ignore_merges`: a word that is itself a token needs no merges. `nfc`: compose text first."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    nfc: bool = False

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence(
            [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.nfc else None


_ONE_NUMERAL = r"\p{N}"
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3_WORDS = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_QWEN2_WORDS = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_QWEN35_WORDS = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)

# Words in which case changes only from upper to lower: fooBar -> foo Bar.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_ENDING_LOWER = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+"
_CASED_ENDING_UPPER = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_SYMBOLS_AND_SPACES = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_GPT4O_WORDS = (
    rf"{_CASED_ENDING_LOWER}{_CONTRACTIONS}?|{_CASED_ENDING_UPPER}{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{_SYMBOLS_AND_SPACES}"
)
_TEKKEN_WORDS = rf"{_CASED_ENDING_LOWER}|{_CASED_ENDING_UPPER}|\p{{N}}|{_SYMBOLS_AND_SPACES}"

_DEEPSEEK_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_CODER = ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, _ONE_NUMERAL)
_DEEPSEEK_V3_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    _DEEPSEEK_V3_WORDS,
)
# The scripts that have case, written out as ranges, as the original does.
_DEEPSEEK_LLM_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7d"
    "ᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎ"
    "ꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-\uff3a\uff41-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_DEEPSEEK_LLM = (
    "[\r\n]",
    rf"\s?[{_DEEPSEEK_LLM_LETTERS}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-‟　-。]+",
    # The original's `\s+$`, not tried again from within the run: that is quadratic in long white space.
    r"(?<!\s)\s++$",
    _DEEPSEEK_CJK,
    _ONE_NUMERAL,
)

_GPT2 = PreTokenization((_GPT2_WORDS,))
_DIGITS_THEN_GPT2 = PreTokenization((_ONE_NUMERAL, _GPT2_WORDS))
_LLAMA3 = PreTokenization((_LLAMA3_WORDS,), ignore_merges=True)
_QWEN2 = PreTokenization((_QWEN2_WORDS,), nfc=True)
_TIKTOKEN_LLAMA3 = PreTokenization((_LLAMA3_WORDS,))

PRE_TOKENIZATIONS: Mapping[str, PreTokenization] = MappingProxyType(
    {
        "default": _GPT2,
        "gpt-2": _GPT2,
        "mpt": _GPT2,
        "olmo": _GPT2,
        "phi-2": _GPT2,
        "smollm": _DIGITS_THEN_GPT2,
        "starcoder": _DIGITS_THEN_GPT2,
        "refact": _DIGITS_THEN_GPT2,
        "llama3": _LLAMA3,
        "llama-v3": _LLAMA3,
        "llama-bpe": _LLAMA3,
        "dbrx": _TIKTOKEN_LLAMA3,
        "qwen2": _QWEN2,
        "deepseek-r1-qwen": _QWEN2,
        "qwen35": PreTokenization((_QWEN35_WORDS,), nfc=True),
        "gpt-4o": PreTokenization((_GPT4O_WORDS,)),
        "tekken": PreTokenization((_TEKKEN_WORDS,), ignore_merges=True),
        "deepseek-llm": PreTokenization(_DEEPSEEK_LLM),
        "deepseek-coder": PreTokenization(_DEEPSEEK_CODER),
        "deepseek-v3": PreTokenization(_DEEPSEEK_V3),
    }
)
