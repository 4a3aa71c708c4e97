"""Folders of safetensors: the same numbers as `transformers`, and what is refused by which name."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from core.config import EngineConfig, Numerics
from core.errors import CheckpointError, UnsupportedModel
from core.execution.worker import ModelWorker, load_worker
from tests.fakes.hub_folders import (
    change_config,
    change_tensors,
    tiny_model,
    write_folder,
    write_model_as_gguf,
)
from tests.fakes.plans import planned, step
from tests.fakes.safetensors_files import read_safetensors, safetensors_bytes

LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
    "rope_theta": 10000.0,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama with one head each": ("llama", {"num_key_value_heads": 4}),
    "llama3 scaling": ("llama", {"rope_parameters": LLAMA3}),
    "linear scaling": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
    ),
    "qwen2": ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
}


def load(folder: Path, *, numerics: Numerics = "reference", cache_dir: Path | str = "") -> ModelWorker:
    return load_worker(
        EngineConfig(
            checkpoint=str(folder), numerics=numerics, num_blocks=40, cache_dir=str(cache_dir), compile="off"
        )
    )


def random_ids(count: int = 300) -> list[int]:
    return torch.randint(0, 320, (count,), generator=torch.Generator().manual_seed(1)).tolist()


def logits(worker: ModelWorker, token_ids: list[int]) -> torch.Tensor:
    blocks = list(range(len(token_ids) // 16 + 1))
    worker.execute(step(planned("a", token_ids[:37], blocks=blocks, num_samples=0)))
    rest = token_ids[37:]
    return worker.runner.logits(
        step(planned("a", rest, first_position=37, blocks=blocks, num_samples=len(rest)))
    )


def reference(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        result: torch.Tensor = model(torch.tensor([token_ids])).logits[0, 37:]
    return result


@pytest.mark.parametrize("name", MODELS)
def test_reference_logits_of_a_folder_equal_the_transformers_implementation(name, tmp_path):
    kind, changes = MODELS[name]
    model = tiny_model(kind, **changes)
    worker = load(write_folder(tmp_path, model))
    assert worker.info.architecture == kind
    token_ids = random_ids()
    torch.testing.assert_close(logits(worker, token_ids), reference(model, token_ids), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_same_model_as_gguf_gives_the_same_logits(kind, tied, tmp_path):
    model = tiny_model(kind, tie_word_embeddings=tied)
    token_ids = random_ids()
    ours = logits(load(write_model_as_gguf(tmp_path / "tiny.gguf", model)), token_ids)
    torch.testing.assert_close(ours, reference(model, token_ids), atol=1e-4, rtol=1e-4)


def test_the_rope_factors_of_a_gguf_file_are_used(tmp_path):
    model = tiny_model(rope_parameters=LLAMA3)
    factors = (tiny_model().model.rotary_emb.inv_freq / model.model.rotary_emb.inv_freq).tolist()
    assert max(factors) > 7.9
    token_ids = random_ids()
    ours = logits(load(write_model_as_gguf(tmp_path / "a.gguf", model, rope_factors=factors)), token_ids)
    torch.testing.assert_close(ours, reference(model, token_ids), atol=1e-4, rtol=1e-4)
    for lie in (factors[:-1], [0.0] * 8, [float("nan")] * 8):
        with pytest.raises(CheckpointError, match=r"rope_freqs\.weight must hold 8 numbers"):
            load(write_model_as_gguf(tmp_path / "b.gguf", model, rope_factors=lie))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_width_folders_load_as_they_are(dtype, tmp_path):
    model = tiny_model()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype).float()
    token_ids = random_ids()
    expected = reference(model, token_ids)
    worker = load(write_folder(tmp_path, model.to(dtype)))
    torch.testing.assert_close(logits(worker, token_ids), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("numerics", ["reference", "stable"])
def test_shards_one_file_and_the_cache_of_packed_weights_give_the_same_bits(numerics, tmp_path):
    model = tiny_model("qwen2")
    whole = load(write_folder(tmp_path / "whole", model), numerics=numerics)
    folder = write_folder(tmp_path / "shards", model, shard_size="100KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    token_ids = random_ids(60)
    expected = logits(whole, token_ids)
    for _ in range(2):  # packed, then from the cache
        sharded = load(folder, numerics=numerics, cache_dir=tmp_path / "cache")
        assert torch.equal(logits(sharded, token_ids), expected)
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_tensors_that_are_not_aligned_are_read_as_well(tmp_path):
    model = tiny_model()
    path = write_folder(tmp_path, model) / "model.safetensors"
    expected = logits(load(tmp_path), random_ids())
    header, data = read_safetensors(path)
    text = json.dumps(header).encode()
    path.write_bytes(safetensors_bytes(text + b" " * ((-8 - len(text)) % 8 + 1), data))
    assert torch.equal(logits(load(tmp_path), random_ids()), expected)


def test_a_missing_shard_fails_by_its_name(tmp_path):
    folder = write_folder(tmp_path, tiny_model(), shard_size="100KB")
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=rf"{re.escape(str(shard))}: is missing: .* keeps \d+ tensors"):
        load(folder)


def test_a_shard_cut_short_fails_by_its_name(tmp_path):
    folder = write_folder(tmp_path, tiny_model(), shard_size="100KB")
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=rf"{re.escape(shard.name)}: tensor .* ends at data byte"):
        load(folder)


def test_missing_and_unknown_tensors_are_named(tmp_path):
    path = write_folder(tmp_path, tiny_model()) / "model.safetensors"
    shutil.copy(path, tmp_path / "kept")
    name = "model.layers.1.mlp.up_proj.weight"
    change_tensors(path, {name: None})
    with pytest.raises(CheckpointError, match=f"tensors are missing: {name}$"):
        load(tmp_path)
    shutil.copy(tmp_path / "kept", path)
    change_tensors(path, {"score.weight": torch.zeros(2, 64)})
    with pytest.raises(UnsupportedModel, match=r"does not know the tensors score\.weight$"):
        load(tmp_path)


def test_saved_rotary_tables_of_old_checkpoints_are_no_unknown_tensors(tmp_path):
    path = write_folder(tmp_path, tiny_model()) / "model.safetensors"
    change_tensors(path, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)})
    load(tmp_path)


def test_a_tied_model_that_also_brings_an_output_layer_uses_the_embedding(tmp_path):
    model = tiny_model(tie_word_embeddings=True)
    path = write_folder(tmp_path, model) / "model.safetensors"
    token_ids = random_ids(60)
    expected = logits(load(tmp_path), token_ids)
    change_tensors(path, {"lm_head.weight": model.get_input_embeddings().weight.detach().clone()})
    assert torch.equal(logits(load(tmp_path), token_ids), expected)
    change_tensors(path, {"lm_head.weight": torch.zeros(320, 64)})
    with pytest.warns(UserWarning, match=r"lm_head\.weight is not used: .* their values differ"):
        assert torch.equal(logits(load(tmp_path), token_ids), expected)


def test_a_model_that_is_not_tied_and_has_no_output_layer_is_refused(tmp_path):
    write_folder(tmp_path, tiny_model(tie_word_embeddings=True), tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight, and the config does not tie it"):
        load(tmp_path)


REFUSED_CONFIGS = [
    ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type 'yarn' is not supported"),
    ({"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "type 'dynamic' is not"),
    ({"rope_parameters": "llama3"}, "rope_scaling is 'llama3', not an object"),
    ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "'low_freq_factor' is missing"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config is set"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: silu"),
    ({"attention_bias": True}, "attention_bias True is not supported"),
    ({"mlp_bias": True}, "mlp_bias True is not supported"),
    ({"hidden_size": 2**40}, "hidden_size is 1099511627776"),
    ({"num_attention_heads": "4"}, "num_attention_heads is '4'"),
    ({"num_hidden_layers": 1.5}, "num_hidden_layers is 1.5; it must be a whole number"),
    ({"rms_norm_eps": None}, "'rms_norm_eps' is missing"),
    ({"num_key_value_heads": 3}, "4 query heads cannot share 3"),
    ({"head_dim": 15}, "head width 15 must be even"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
    ({"model_type": None}, "'model_type' is missing or no text"),
    ({"model_type": "mamba"}, "'mamba' is not supported; supported: llama, qwen2, qwen3"),
    ({"hidden_size": 128}, "has shape .* calls for"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "said"), REFUSED_CONFIGS, ids=[said for _, said in REFUSED_CONFIGS])
def test_a_config_that_asks_for_something_else_is_refused_by_name(config, said, tmp_path):
    write_folder(tmp_path, tiny_model(), **config)
    with pytest.raises(CheckpointError, match=said):
        load(tmp_path)


def test_a_sliding_window_is_refused_by_name(tmp_path):
    write_folder(tmp_path, tiny_model("qwen2"), use_sliding_window=True)
    with pytest.raises(CheckpointError, match="use_sliding_window True is not supported"):
        load(tmp_path)


def test_python_of_the_folder_never_runs(tmp_path):
    folder = write_folder(tmp_path, tiny_model())
    canary = folder / "modeling_canary.py"
    canary.write_text(f"open({str(folder / 'ran')!r}, 'w')\n")
    change_config(folder, auto_map={"AutoModelForCausalLM": "modeling_canary.Canary"}, trust_remote_code=True)
    load(folder)
    with pytest.raises(UnsupportedModel, match="'canary' is not supported"):
        load(change_config(folder, model_type="canary"))
    assert not (folder / "ran").exists()
    assert not any("canary" in name for name in sys.modules)


def test_weights_in_other_files_are_not_looked_at(tmp_path):
    folder = write_folder(tmp_path, tiny_model())
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"holds neither model\.safetensors nor .*index\.json"):
        load(folder)


@pytest.mark.parametrize("name", ["default", "linear", "llama3"])
@pytest.mark.parametrize("position", [0, 1000, 8000, 20000])
def test_rotary_angles_agree_with_transformers_far_from_the_start(name, position):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    from core.layers import Rotary
    from core.models.llama import from_hub

    rope: dict[str, dict[str, Any]] = {
        "default": {"rope_type": "default"},
        "linear": {"rope_type": "linear", "factor": 4.0},
        "llama3": LLAMA3,
    }
    parameters = {"rope_theta": 500000.0, **rope[name]} | {"rope_theta": 500000.0}
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=4, head_dim=64, max_position_embeddings=32768,
        rope_parameters=parameters,
    )  # fmt: skip
    ours_config = from_hub(config.to_dict(), 0)
    ours = Rotary(64, 20001, theta=ours_config.rope_theta, scaling=ours_config.rope_scaling)
    cos, sin = ours.tables(torch.tensor([position]))
    expected_cos, expected_sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.tensor([[position]]))
    # The reference rounds its frequencies to float32: 6e-8 of the angle.
    bound = 1e-6 + 2e-7 * position
    torch.testing.assert_close(cos[0, 0], expected_cos[0, 0], atol=bound, rtol=0)
    torch.testing.assert_close(sin[0, 0, 32:], expected_sin[0, 0, 32:], atol=bound, rtol=0)


SHRINK = """
import os, sys, torch
from tests.core.execution.test_hub_folders import load, logits, random_ids
from pathlib import Path
folder = Path(sys.argv[1])
worker = load(folder, numerics="stable")
before = logits(worker, random_ids(60))
for file in folder.iterdir():
    os.truncate(file, 0)
assert torch.equal(logits(worker, random_ids(60)), before)
print("still here")
"""


def test_files_that_shrink_after_loading_change_nothing(tmp_path):
    write_folder(tmp_path, tiny_model(), shard_size="100KB")
    done = subprocess.run(
        [sys.executable, "-c", SHRINK, str(tmp_path)],
        cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "still here\n"), done.stderr
