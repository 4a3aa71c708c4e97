"""Linears that are stored apart and computed in one product: the same numbers, each from its own tensor."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import pytest
import torch

from core.config import EngineConfig, Numerics
from core.errors import CheckpointError, UnsupportedModel
from core.execution.worker import ModelWorker, load_worker
from core.layers import Decoder
from core.quantization import PackedLinear, quantise
from core.quantization.bias import Biased
from core.quantization.codec import FLOAT32
from core.quantization.kernels import linear_kernels
from tests.core.quantization.weights import packed
from tests.fakes.gguf_writer import Tensor, write_gguf
from tests.fakes.hub_folders import change_tensors, tiny_model, write_folder
from tests.fakes.tiny_llama import TinyShape, tiny_metadata, tiny_tensors

SHAPE = TinyShape(vocab_size=64, num_layers=1, context=64)
QKV = {"attn_q": 64, "attn_k": 32, "attn_v": 32}
GATE_UP = {"ffn_gate": 128, "ffn_up": 128}
FUSED = {"self_attn.qkv_proj": QKV, "mlp.gate_up_proj": GATE_UP}
MIXED_TYPES = {
    "one type": ("Q4_1", "Q4_1", "Q4_1"),
    "types of one kernel": ("Q4_1", "Q8_0", "Q4_0"),
    "floats among them": ("Q8_0", "F16", "Q4_1"),
    "floats of three widths": ("F32", "BF16", "F16"),
}


def write_mixed(path: Path, types: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """The tiny checkpoint with some of its linears in types of their own; returns their stored bytes."""
    raws = {}
    tensors = []
    for name, tensor in tiny_tensors(SHAPE).items():
        part = name.removeprefix("blk.0.").removesuffix(".weight")
        ggml_type, raw = tensor.ggml_type, tensor.raw
        if part in types:
            ggml_type = types[part]
            raw = raws[part] = quantise(tensor.weight, ggml_type)
        tensors.append(Tensor(name, ggml_type, tuple(tensor.weight.shape), bytes(raw.flatten().tolist())))
    write_gguf(path, tiny_metadata(SHAPE), tensors=tensors)
    return raws


def load(path: Path, numerics: Numerics = "stable") -> ModelWorker:
    return load_worker(EngineConfig(checkpoint=str(path), num_blocks=8, numerics=numerics))


def linear_of(worker: ModelWorker, name: str) -> PackedLinear:
    model = worker.runner._model
    assert isinstance(model, Decoder)
    return cast(PackedLinear, model.layers[0].get_submodule(name))


def rotated_halves(raw: torch.Tensor, part: str) -> torch.Tensor:
    """GGUF keeps a head's rotated pairs beside each other, published checkpoints half a head apart."""
    if part not in {"attn_q", "attn_k"}:
        return raw
    return raw.view(-1, SHAPE.head_dim // 2, 2, raw.shape[1]).transpose(1, 2).reshape(raw.shape)


@pytest.mark.parametrize("numerics", ["stable", "reference"])
@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("types", MIXED_TYPES)
def test_a_fused_linear_equals_those_it_is_made_of(types, fused, numerics, tmp_path):
    """Each part packed by itself with the kernel that was chosen for the whole; int8 ones bit for bit."""
    stored = dict(zip(FUSED[fused], MIXED_TYPES[types], strict=False))
    raws = write_mixed(tmp_path / "mixed.gguf", stored)
    worker = load(tmp_path / "mixed.gguf", numerics)
    linear = linear_of(worker, fused)
    codec = linear.codec
    kernel = next(
        kernel
        for kernel in linear_kernels().values()
        if cast(PackedLinear, kernel.empty(64, 64)).codec is codec
    )
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(1))
    apart = [packed(kernel, rotated_halves(raws[part], part), stored[part])(x) for part in FUSED[fused]]
    exact = codec.name.startswith("int8")
    torch.testing.assert_close(
        linear.forward(x), torch.cat(apart, 1), rtol=0 if exact else 1e-5, atol=0 if exact else 1e-4
    )
    if numerics == "reference":
        assert codec is FLOAT32


@pytest.mark.parametrize(
    ("types", "kernel"),
    [(("Q4_1", "Q8_0", "Q4_0"), "int8_split"), (("Q8_0", "F16", "Q4_1"), "bfloat16")],
)
def test_parts_of_several_types_go_to_one_kernel_that_takes_all(types, kernel, tmp_path):
    write_mixed(tmp_path / "mixed.gguf", dict(zip(QKV, types, strict=True)))
    worker = load(tmp_path / "mixed.gguf")
    assert linear_of(worker, "self_attn.qkv_proj").codec.name == kernel
    assert worker.info.kernels["bfloat16"] == 4 + (kernel == "bfloat16")
    assert sum(worker.info.kernels.values()) == 5


def test_a_part_of_a_type_that_nobody_reads_is_refused_by_name(tmp_path):
    path = write_folder(tmp_path, tiny_model()) / "model.safetensors"
    name = "model.layers.0.self_attn.k_proj.weight"
    change_tensors(path, {name: torch.ones(32, 64, dtype=torch.int8)})
    with pytest.raises((CheckpointError, UnsupportedModel), match=re.escape(name)):
        load(tmp_path)


@pytest.mark.parametrize("part", ["q_proj", "k_proj", "v_proj"])
@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_a_missing_part_is_refused_by_its_own_name(part, kind, tmp_path):
    path = write_folder(tmp_path, tiny_model("qwen2")) / "model.safetensors"
    name = f"model.layers.1.self_attn.{part}.{kind}"
    change_tensors(path, {name: None})
    with pytest.raises(CheckpointError, match=rf"tensors are missing: {re.escape(name)}$"):
        load(tmp_path)


@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_a_part_of_another_height_is_refused_although_the_sum_would_fit(kind, tmp_path):
    path = write_folder(tmp_path, tiny_model("qwen2")) / "model.safetensors"
    prefix, width = "model.layers.0.self_attn", (64,) if kind == "weight" else ()
    change_tensors(
        path,
        {
            f"{prefix}.k_proj.{kind}": torch.zeros(16, *width),
            f"{prefix}.v_proj.{kind}": torch.zeros(48, *width),
        },
    )
    with pytest.raises(CheckpointError, match=rf"k_proj\.{kind} has shape \(16,.* calls for \(32"):
        load(tmp_path)


@pytest.mark.parametrize("numerics", ["stable", "reference"])
def test_biases_lie_beside_the_rows_that_they_belong_to(numerics, tmp_path):
    model = tiny_model("qwen2")
    worker = load(write_folder(tmp_path, model), numerics)
    attention = model.model.layers[0].self_attn
    parts = (attention.q_proj, attention.k_proj, attention.v_proj)
    linear = linear_of(worker, "self_attn.qkv_proj")
    assert isinstance(linear, Biased)
    assert torch.equal(linear.bias, torch.cat([part.bias.detach() for part in parts]))
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        expected = torch.cat([part(x) for part in parts], 1)
    bound = 1e-5 if numerics == "reference" else 2.0**-6
    torch.testing.assert_close(linear.forward(x), expected, rtol=bound, atol=bound)


def test_the_rows_of_queries_and_keys_are_put_in_order_and_no_others(tmp_path):
    """Through the whole of loading, on a checkpoint whose weights are the numbers of their rows."""
    tensors = []
    for name, tensor in tiny_tensors(SHAPE).items():
        weight = tensor.weight
        if any(part in name for part in QKV):
            weight = torch.arange(weight.shape[0]).float().unsqueeze(1).expand(weight.shape).contiguous()
        raw = bytes(weight.view(torch.uint8).flatten().tolist())
        tensors.append(Tensor(name, "F32", tuple(weight.shape), raw))
    write_gguf(tmp_path / "rows.gguf", tiny_metadata(SHAPE), tensors=tensors)
    linear = linear_of(load(tmp_path / "rows.gguf", "reference"), "self_attn.qkv_proj")
    first_of_each = linear.forward(torch.eye(64)[:1])[0]
    head = [0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15]
    expected = [16 * h + row for h in range(4) for row in head] + [
        16 * h + row for h in range(2) for row in head
    ]
    assert first_of_each.tolist() == [*expected, *range(32)]
