"""A small random Llama checkpoint, written as GGUF and, for the oracle, as a `transformers` model."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from core.quantization import dequantise, quantise
from tests.fakes.gguf_writer import Tensor, Typed, write_gguf


@dataclass(frozen=True)
class TinyShape:
    vocab_size: int = 320
    width: int = 64
    hidden_width: int = 128
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    context: int = 1024
    linear_type: str = "F32"
    embedding_type: str = "F32"
    tied: bool = True


@dataclass(frozen=True)
class TinyTensor:
    ggml_type: str
    raw: torch.Tensor
    """As stored, uint8."""
    weight: torch.Tensor
    """As the file means it, float32."""


def tiny_tensors(shape: TinyShape, *, seed: int = 0) -> dict[str, TinyTensor]:
    """The checkpoint's tensors by their GGUF names."""
    generator = torch.Generator().manual_seed(seed)

    def random(ggml_type: str, *size: int, scale: float = 0.15) -> TinyTensor:
        weight = torch.randn(size, generator=generator) * scale
        if len(size) == 1:
            weight = 1 + weight
        raw = quantise(weight.view(-1, size[-1]), ggml_type)
        return TinyTensor(ggml_type, raw, dequantise(raw, ggml_type).view(size))

    s = shape
    tensors = {
        "token_embd.weight": random(s.embedding_type, s.vocab_size, s.width, scale=1.0),
        "output_norm.weight": random("F32", s.width),
    }
    if not s.tied:
        tensors["output.weight"] = random(s.embedding_type, s.vocab_size, s.width)
    for layer in range(s.num_layers):
        for name, rows, columns in (
            ("attn_q", s.num_heads * s.head_dim, s.width),
            ("attn_k", s.num_kv_heads * s.head_dim, s.width),
            ("attn_v", s.num_kv_heads * s.head_dim, s.width),
            ("attn_output", s.width, s.num_heads * s.head_dim),
            ("ffn_gate", s.hidden_width, s.width),
            ("ffn_up", s.hidden_width, s.width),
            ("ffn_down", s.width, s.hidden_width),
        ):
            tensors[f"blk.{layer}.{name}.weight"] = random(s.linear_type, rows, columns)
        tensors[f"blk.{layer}.attn_norm.weight"] = random("F32", s.width)
        tensors[f"blk.{layer}.ffn_norm.weight"] = random("F32", s.width)
    return tensors


def tiny_metadata(shape: TinyShape) -> dict[str, object]:
    return {
        "general.architecture": "llama",
        "llama.block_count": Typed("u32", shape.num_layers),
        "llama.context_length": Typed("u32", shape.context),
        "llama.embedding_length": Typed("u32", shape.width),
        "llama.feed_forward_length": Typed("u32", shape.hidden_width),
        "llama.attention.head_count": Typed("u32", shape.num_heads),
        "llama.attention.head_count_kv": Typed("u32", shape.num_kv_heads),
        "llama.attention.key_length": Typed("u32", shape.head_dim),
        "llama.rope.dimension_count": Typed("u32", shape.head_dim),
        "llama.rope.freq_base": Typed("f32", 10000.0),
        "llama.attention.layer_norm_rms_epsilon": Typed("f32", 1e-5),
        "tokenizer.ggml.tokens": [f"token{i}" for i in range(shape.vocab_size)],
    }


def write_tiny_llama(
    path: Path,
    shape: TinyShape | None = None,
    *,
    seed: int = 0,
    drop: str = "",
    extra: tuple[Tensor, ...] = (),
) -> Path:
    """Write the checkpoint; `drop` leaves one tensor out."""
    shape = shape or TinyShape()
    tensors = [
        Tensor(name, tensor.ggml_type, tuple(tensor.weight.shape), bytes(tensor.raw.flatten().tolist()))
        for name, tensor in tiny_tensors(shape, seed=seed).items()
        if name != drop
    ]
    return write_gguf(path, tiny_metadata(shape), tensors=[*tensors, *extra])


def transformers_llama(shape: TinyShape | None = None, *, seed: int = 0) -> LlamaForCausalLM:
    """The same weights in the reference implementation, float32."""
    shape = shape or TinyShape()
    tensors = {name: tensor.weight for name, tensor in tiny_tensors(shape, seed=seed).items()}
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.width,
        intermediate_size=shape.hidden_width,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.context,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        tie_word_embeddings=shape.tied,
        attn_implementation="eager",
    )
    return load_transformers(config, tensors)


def load_transformers(config: LlamaConfig, tensors: dict[str, torch.Tensor]) -> LlamaForCausalLM:
    """Fill a `transformers` Llama from dequantised GGUF tensors (undoing GGUF's order of rotated rows)."""
    model = LlamaForCausalLM(config).eval()
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    state = {
        "model.embed_tokens.weight": tensors["token_embd.weight"],
        "model.norm.weight": tensors["output_norm.weight"],
        "lm_head.weight": tensors.get("output.weight", tensors["token_embd.weight"]),
    }
    for layer in range(config.num_hidden_layers):
        for ours, theirs in names.items():
            weight = tensors[f"blk.{layer}.{theirs}.weight"]
            if theirs in {"attn_q", "attn_k"}:
                heads = weight.view(-1, config.head_dim // 2, 2, weight.shape[-1])
                weight = heads.transpose(1, 2).reshape(weight.shape)
            state[f"model.layers.{layer}.{ours}.weight"] = weight
    model.load_state_dict(state, strict=True)
    return model
