"""The tokenisers under test: every implementation, the real one included."""

from pathlib import Path
from typing import Any

import pytest

from tests.tokenization.gguf_metadata import read_metadata
from tests.tokenization.vocabularies import byte_level_json, spm_json, tiny_metadata, write_tokenizer
from tokenization import Tokenizer, byte_tokenizer, tokenizer_from_folder, tokenizer_from_gguf


@pytest.fixture(scope="session")
def smollm_metadata(default_model_path: Path) -> dict[str, Any]:
    return read_metadata(default_model_path)


@pytest.fixture(scope="session")
def smollm(smollm_metadata) -> Tokenizer:
    return tokenizer_from_gguf(smollm_metadata)


@pytest.fixture(
    scope="session", params=["bytes", "tiny", "smollm", "folder", "spm-each", "spm-first", "spm-none"]
)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Every implementation in turn: a new one is added here and is tested at once."""
    if request.param == "bytes":
        return byte_tokenizer()
    if request.param == "tiny":
        return tokenizer_from_gguf(tiny_metadata())
    if request.param == "folder":
        folder = tmp_path_factory.mktemp("folder")
        write_tokenizer(folder, byte_level_json(), bos_token="<|im_start|>", eos_token="<|im_end|>")
        return tokenizer_from_folder(folder)
    if request.param.startswith("spm-"):
        folder = tmp_path_factory.mktemp("folder")
        document = spm_json(request.param.removeprefix("spm-"))
        write_tokenizer(folder, document, bos_token="<s>", eos_token={"content": "</s>"})
        return tokenizer_from_folder(folder)
    real: Tokenizer = request.getfixturevalue("smollm")
    return real
