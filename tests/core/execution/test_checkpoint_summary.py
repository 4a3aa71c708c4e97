"""A checkpoint's account of itself: what it says, what it leaves out, what it cannot mean."""

import pytest

from core import CheckpointError, CheckpointSummary
from core.execution.host_memory import HostMemory
from core.models import supported_models
from tests.fakes.gguf_writer import Typed, write_gguf
from tests.fakes.hub_folders import change_config, tiny_model, write_folder
from tests.fakes.tiny_llama import TinyShape, tiny_metadata, write_tiny_llama


def test_a_summary_adds_up_to_what_was_written(tmp_path):
    shape = TinyShape(linear_type="Q4_0", embedding_type="Q8_0")
    summary = CheckpointSummary.read(str(write_tiny_llama(tmp_path / "tiny.gguf", shape)))
    assert (summary.architecture, summary.is_supported) == ("llama", True)
    assert list(summary.supported) == supported_models()
    assert (summary.num_layers, summary.width, summary.num_heads, summary.num_kv_heads) == (2, 64, 4, 2)
    assert (summary.head_dim, summary.context_tokens) == (16, 1024)
    assert {name: stored.num_tensors for name, stored in summary.types.items()} == {
        "Q4_0": 14,
        "Q8_0": 1,
        "F32": 5,
    }
    per_layer = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 128
    assert summary.types["Q4_0"].num_elements == 2 * per_layer
    assert summary.types["Q4_0"].num_bytes == 2 * per_layer // 32 * 18
    assert summary.num_weight_bytes == sum(stored.num_bytes for stored in summary.types.values())
    assert summary.num_tensors == 20
    assert summary.kv_bytes_per_token == 2 * 2 * 2 * 16 * 2  # K and V, layers, heads, width, bytes
    assert (summary.tokenizer.vocab_size, summary.tokenizer.has_chat_template) == (320, False)


def test_a_folder_of_the_hub_is_summed_up_the_same_way(tmp_path):
    folder = write_folder(tmp_path / "tiny", tiny_model("qwen3"), shard_size="100KB")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    summary = CheckpointSummary.read(str(folder))
    assert (summary.architecture, summary.is_supported) == ("qwen3", True)
    assert (summary.num_layers, summary.width, summary.num_heads, summary.num_kv_heads) == (2, 64, 4, 2)
    assert (summary.head_dim, summary.context_tokens) == (16, 1024)
    assert list(summary.types) == ["F32"]
    assert summary.num_weight_bytes == 4 * summary.num_parameters
    assert summary.num_weight_bytes < summary.file_bytes < summary.num_weight_bytes + 100_000
    assert summary.kv_bytes_per_token == 2 * 2 * 2 * 16 * 2
    assert (summary.tokenizer.kind, summary.tokenizer.vocab_size) == ("tokenizer.json", 320)
    assert summary.tokenizer.has_chat_template
    (folder / "tokenizer_config.json").unlink()
    assert not CheckpointSummary.read(str(folder)).tokenizer.has_chat_template
    change_config(folder, num_hidden_layers="many")
    with pytest.raises(CheckpointError, match="num_hidden_layers is 'many'"):
        CheckpointSummary.read(str(folder))


def test_what_a_file_does_not_say_is_none(tmp_path):
    path = write_gguf(tmp_path / "other.gguf", {"general.architecture": "rwkv"})
    summary = CheckpointSummary.read(str(path))
    assert (summary.architecture, summary.is_supported) == ("rwkv", False)
    assert (summary.num_layers, summary.context_tokens, summary.kv_bytes_per_token) == (None, None, None)
    assert (summary.num_tensors, summary.types) == (0, {})


@pytest.mark.parametrize("value", [Typed("u32", 0), Typed("i32", -3), "many", True, Typed("u64", 1 << 60)])
def test_a_size_that_cannot_be_one_is_refused_by_name(tmp_path, value):
    path = write_gguf(tmp_path / "lie.gguf", {**tiny_metadata(TinyShape()), "llama.block_count": value})
    with pytest.raises(CheckpointError, match=r"llama.block_count is .*; it must be a whole number"):
        CheckpointSummary.read(str(path))


@pytest.mark.parametrize(
    ("available", "headroom", "usable"),
    [(800, None, 800), (800, 300, 300), (None, 300, 300), (None, None, 7)],
)
def test_usable_memory_is_the_tighter_of_machine_and_control_group(available, headroom, usable):
    memory = HostMemory(
        total_bytes=None,
        available_bytes=available,
        cgroup_headroom_bytes=headroom,
        default_kv_bytes=7,
    )
    assert memory.usable_bytes == usable
