"""Text <-> token ids. No torch, no HTTP, nothing else of ours."""

from tokenization.byte_tokenizer import byte_tokenizer
from tokenization.chat_template import ChatTemplate
from tokenization.detokenizer import Detokenizer
from tokenization.errors import (
    BadText,
    BadVocabulary,
    NoChatTemplate,
    TemplateError,
    TokenizationError,
    UnsupportedTokenizer,
)
from tokenization.gguf_vocab import tokenizer_from_gguf
from tokenization.huggingface import read_chat_template, tokenizer_from_folder
from tokenization.prompt import RenderedPrompt
from tokenization.stop_strings import StopMatcher
from tokenization.tokenizer import Tokenizer

__all__ = [
    "BadText",
    "BadVocabulary",
    "ChatTemplate",
    "Detokenizer",
    "NoChatTemplate",
    "RenderedPrompt",
    "StopMatcher",
    "TemplateError",
    "TokenizationError",
    "Tokenizer",
    "UnsupportedTokenizer",
    "byte_tokenizer",
    "read_chat_template",
    "tokenizer_from_folder",
    "tokenizer_from_gguf",
]
