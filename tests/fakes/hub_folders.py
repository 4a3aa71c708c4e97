"""Small random models as folders of the Hugging Face hub, written by `transformers` itself."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.fakes.gguf_writer import Tensor, Typed, write_gguf

KINDS: dict[str, tuple[type, type]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "attn_implementation": "eager",
}


def tiny_model(kind: str = "llama", *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A model with random weights, norms and biases too, float32."""
    make_config, make_model = KINDS[kind]
    model: PreTrainedModel = make_model(make_config(**SIZES | {"head_dim": 16} | changes)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if "norm" in name else noise * (1.0 if "embed" in name else 0.15))
    model.tie_weights()
    return model


def write_folder(folder: Path, model: PreTrainedModel, *, shard_size: str = "1GB", **config: Any) -> Path:
    """Save a model; `config` changes entries of its `config.json` afterwards (None removes one)."""
    model.save_pretrained(folder, max_shard_size=shard_size)
    return change_config(folder, **config)


def change_config(folder: Path, **config: Any) -> Path:
    path = folder / "config.json"
    entries = {**json.loads(path.read_text()), **config}
    path.write_text(json.dumps({key: value for key, value in entries.items() if value is not None}))
    return folder


def change_tensors(path: Path, changes: Mapping[str, torch.Tensor | None]) -> None:
    """Replace, add or (None) remove tensors of one file."""
    from safetensors.torch import load_file, save_file

    tensors = {**load_file(path), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def write_model_as_gguf(
    path: Path, model: PreTrainedModel, *, rope_factors: list[float] | None = None
) -> Path:
    """The same weights as a converter writes them: Llama's rotated rows interleaved, others as they are."""
    config, kind = model.config, model.config.model_type
    tensors = (
        [
            Tensor(
                "rope_freqs.weight",
                "F32",
                (len(rope_factors),),
                struct.pack(f"<{len(rope_factors)}f", *rope_factors),
            )
        ]
        if rope_factors
        else []
    )
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stored = weight
        module, _, suffix = name.rpartition(".")
        if module.startswith("model.layers."):
            _, _, layer, rest = module.split(".", 3)
            gguf_name = f"blk.{layer}.{GGUF_NAMES[rest]}.{suffix}"
            if kind == "llama" and rest in {"self_attn.q_proj", "self_attn.k_proj"}:
                halves = weight.view(-1, 2, config.head_dim // 2, weight.shape[-1])
                stored = halves.transpose(1, 2).reshape(weight.shape)
        else:
            gguf_name = f"{GGUF_NAMES[module]}.{suffix}"
        tensors.append(
            Tensor(
                gguf_name,
                "F32",
                tuple(stored.shape),
                bytes(stored.contiguous().view(torch.uint8).flatten().tolist()),
            )
        )
    sizes = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
    }
    metadata: dict[str, object] = {"general.architecture": kind}
    metadata |= {f"{kind}.{key}": Typed("u32", value) for key, value in sizes.items()}
    metadata[f"{kind}.rope.freq_base"] = Typed("f32", config.rope_parameters["rope_theta"])
    metadata[f"{kind}.attention.layer_norm_rms_epsilon"] = Typed("f32", config.rms_norm_eps)
    metadata["tokenizer.ggml.tokens"] = [f"token{i}" for i in range(config.vocab_size)]
    return write_gguf(path, metadata, tensors=tensors)
