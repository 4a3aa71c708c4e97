"""The peers' model files, each derived from the default checkpoint, and a large random model for all.

Every form begins with the weights that the shipped file means, widened to float32: a GGUF file of them,
which llama.cpp's own quantiser turns into its forms, and a Hugging Face folder for OpenVINO's exporter.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file

from core.quantization import dequantise, quantise
from core.weights import open_checkpoint
from core.weights.packed_file import readonly_tensor
from tests.fakes.gguf_writer import Tensor, Typed, write_gguf
from tests.fakes.tiny_llama import TinyShape, tiny_metadata

Weights = dict[str, torch.Tensor]
"""Float32, by their GGUF names."""

LARGE = TinyShape(
    width=2048, hidden_width=5632, num_layers=22, num_heads=32, num_kv_heads=4, head_dim=64, context=2048,
    linear_type="Q4_0", embedding_type="Q8_0",
)  # fmt: skip
"""TinyLlama-1.1B's shape, with the default model's vocabulary and one matrix for both ends of it."""


def read_weights(path: Path) -> tuple[Weights, dict[str, object]]:
    """A GGUF file's tensors in float32, and its metadata."""
    checkpoint = open_checkpoint(str(path))
    try:
        weights = {
            name: dequantise(
                readonly_tensor(checkpoint.raw(name), torch.uint8).view(rows(info.shape), -1),
                info.ggml_type,
            ).reshape(info.shape)
            for name, info in checkpoint.tensors.items()
        }
        return weights, dict(checkpoint.metadata)
    finally:
        checkpoint.close()


def rows(shape: tuple[int, ...]) -> int:
    return shape[0] if len(shape) > 1 else 1


def write_float_gguf(path: Path, weights: Weights, metadata: Mapping[str, object]) -> Path:
    tensors = (
        Tensor(name, "F32", tuple(weight.shape), weight.numpy().tobytes()) for name, weight in weights.items()
    )
    kept = {**with_types(metadata), "general.file_type": Typed("u32", 0)}
    return write_gguf(path, kept, tensors=tensors)


def with_types(metadata: Mapping[str, Any]) -> dict[str, object]:
    """llama.cpp reads these as signed 32-bit numbers, and refuses any other kind."""
    key = "tokenizer.ggml.token_type"
    return {**metadata, key: Typed("i32", metadata[key])}


def write_hugging_face_folder(folder: Path, weights: Weights, metadata: Mapping[str, Any]) -> Path:
    """config.json, model.safetensors and a tokeniser of the same vocabulary."""
    folder.mkdir(parents=True, exist_ok=True)
    config = llama_config(metadata)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file(hugging_face_names(weights, config), str(folder / "model.safetensors"), {"format": "pt"})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(metadata)))
    tokens = metadata["tokenizer.ggml.tokens"]
    named = {
        name: tokens[metadata[f"tokenizer.ggml.{key}_token_id"]]
        for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding"))
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **named})
    )
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": config["eos_token_id"]}))
    return folder


def llama_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    heads = metadata["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": metadata["llama.embedding_length"],
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": metadata["llama.embedding_length"] // heads,
        "max_position_embeddings": metadata["llama.context_length"],
        "rms_norm_eps": metadata["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": metadata["llama.rope.freq_base"],
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "dtype": "float32",
    }


def hugging_face_names(weights: Weights, config: Mapping[str, Any]) -> Weights:
    """GGUF's tensors under Hugging Face's names, and its order of rotated rows undone."""
    names = {
        "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    }  # fmt: skip
    ends = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    found: Weights = {}
    for name, weight in weights.items():
        if name in ends:
            found[ends[name]] = weight.contiguous()
            continue
        _, layer, part, _ = name.split(".")
        if part in {"attn_q", "attn_k"}:
            halves = weight.view(-1, config["head_dim"] // 2, 2, weight.shape[-1])
            weight = halves.transpose(1, 2).reshape(weight.shape)  # noqa: PLW2901 - the same weight in another order
        found[f"model.layers.{layer}.{names[part]}.weight"] = weight.contiguous()
    return found


def tokenizer_json(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """A byte-level BPE as `tokenizers` reads it. The benchmark's prompts are ids; it only has to load."""
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    control = 3
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": number, "content": token, **flags}
            for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind == control
        ],
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
            ],
        },
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [pair.split(" ") for pair in metadata["tokenizer.ggml.merges"]],
        },
    }


def write_large_model(path: Path, metadata: Mapping[str, object]) -> Path:
    """Random weights of `LARGE`, under the default model's vocabulary."""
    text_side = {key: value for key, value in with_types(metadata).items() if key.startswith("tokenizer.")}
    num_tokens = len(cast(list[object], text_side["tokenizer.ggml.tokens"]))
    return write_gguf(
        path, {**tiny_metadata(LARGE), **text_side}, tensors=large_tensors(LARGE, num_tokens=num_tokens)
    )


def large_tensors(shape: TinyShape, *, num_tokens: int) -> Iterator[Tensor]:
    """One at a time: in float32 all of them would be 4 GB."""
    generator = torch.Generator().manual_seed(0)

    def random(name: str, ggml_type: str, *size: int) -> Tensor:
        weight = (
            torch.randn(size, generator=generator) * size[-1] ** -0.5 if len(size) > 1 else torch.ones(size)
        )
        return Tensor(
            name, ggml_type, size, quantise(weight.view(rows(size), -1), ggml_type).numpy().tobytes()
        )

    s = shape
    yield random("token_embd.weight", s.embedding_type, num_tokens, s.width)
    yield random("output_norm.weight", "F32", s.width)
    for layer in range(s.num_layers):
        for part, out, into in (
            ("attn_q", s.num_heads * s.head_dim, s.width),
            ("attn_k", s.num_kv_heads * s.head_dim, s.width),
            ("attn_v", s.num_kv_heads * s.head_dim, s.width),
            ("attn_output", s.width, s.num_heads * s.head_dim),
            ("ffn_gate", s.hidden_width, s.width),
            ("ffn_up", s.hidden_width, s.width),
            ("ffn_down", s.width, s.hidden_width),
        ):
            yield random(f"blk.{layer}.{part}.weight", s.linear_type, out, into)
        yield random(f"blk.{layer}.attn_norm.weight", "F32", s.width)
        yield random(f"blk.{layer}.ffn_norm.weight", "F32", s.width)
