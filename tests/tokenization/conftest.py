"""The tokenisers under test: every implementation, the real one included."""

from pathlib import Path
from typing import Any

import pytest

from tests.tokenization.gguf_metadata import read_metadata
from tests.tokenization.vocabularies import tiny_metadata
from tokenization import Tokenizer, byte_tokenizer, tokenizer_from_gguf


@pytest.fixture(scope="session")
def smollm_metadata(default_model_path: Path) -> dict[str, Any]:
    return read_metadata(default_model_path)


@pytest.fixture(scope="session")
def smollm(smollm_metadata) -> Tokenizer:
    return tokenizer_from_gguf(smollm_metadata)


@pytest.fixture(scope="session", params=["bytes", "tiny", "smollm"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Every implementation in turn: a new one is added here and is tested at once."""
    if request.param == "bytes":
        return byte_tokenizer()
    if request.param == "tiny":
        return tokenizer_from_gguf(tiny_metadata())
    real: Tokenizer = request.getfixturevalue("smollm")
    return real
