"""Llama and its kin: pre-norm blocks, rotary positions, grouped queries, SwiGLU.

Source: arXiv:2302.13971, arXiv:2307.09288; `transformers` `models/llama/modeling_llama.py`.
Shapes: see `core.layers`.
"""

from collections.abc import Mapping
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from core.layers import BatchView, Embedding, GatedMLP, Linear, RMSNorm, Rotary
from core.layers.rotary import rotate
from core.models import ModelConfig, ModelSpec

MOST_POSITIONS = 1 << 24
"""Of a context, so that a lying file cannot ask for rotary tables that no machine holds."""


class LlamaConfig(NamedTuple):
    vocab_size: int
    width: int
    hidden_width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    norm_eps: float
    max_position: int


class Attention(nn.Module):
    def __init__(self, c: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, c.head_dim
        self.q_proj = Linear(c.width, c.num_heads * c.head_dim)
        self.k_proj = Linear(c.width, c.num_kv_heads * c.head_dim)
        self.v_proj = Linear(c.width, c.num_kv_heads * c.head_dim)
        self.o_proj = Linear(c.num_heads * c.head_dim, c.width)

    def forward(self, x_TE: Tensor, rope: tuple[Tensor, Tensor], batch: BatchView) -> Tensor:
        q_THD = rotate(self.q_proj(x_TE).unflatten(-1, (-1, self.head_dim)), *rope)
        k_TKD = rotate(self.k_proj(x_TE).unflatten(-1, (-1, self.head_dim)), *rope)
        v_TKD = self.v_proj(x_TE).unflatten(-1, (-1, self.head_dim))
        out: Tensor = self.o_proj(batch.attend(self.layer, q_THD, k_TKD, v_TKD).flatten(1))
        return out


class Block(nn.Module):
    def __init__(self, c: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c.width, eps=c.norm_eps)
        self.self_attn = Attention(c, layer)
        self.post_attention_layernorm = RMSNorm(c.width, eps=c.norm_eps)
        self.mlp = GatedMLP(c.width, c.hidden_width)

    def forward(self, x_TE: Tensor, rope: tuple[Tensor, Tensor], batch: BatchView) -> Tensor:
        x_TE = x_TE + self.self_attn(self.input_layernorm(x_TE), rope, batch)
        out: Tensor = x_TE + self.mlp(self.post_attention_layernorm(x_TE))
        return out


class Llama(nn.Module):
    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(c.vocab_size, c.width)
        self.layers = nn.ModuleList(Block(c, layer) for layer in range(c.num_layers))
        self.norm = RMSNorm(c.width, eps=c.norm_eps)
        self.lm_head = Linear(c.width, c.vocab_size)
        self.rotary = Rotary(c.head_dim, c.max_position, theta=c.rope_theta)

    def forward(self, token_ids_T: Tensor, batch: BatchView) -> Tensor:
        x_TE = self.embed_tokens(token_ids_T)
        rope = self.rotary.tables(batch.positions_T)
        for block in self.layers:
            x_TE = block(x_TE, rope, batch)
        out: Tensor = self.norm(x_TE)
        return out

    def logits(self, hidden_RE: Tensor) -> Tensor:
        out: Tensor = self.lm_head(hidden_RE)
        return out


def _number(metadata: Mapping[str, object], key: str, *, low: float, high: float) -> float:
    value = metadata[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ValueError(f"{key} is {value!r:.60}; it must be a number between {low:g} and {high:g}")
    return value


def read_config(metadata: Mapping[str, object], max_model_len: int) -> LlamaConfig:
    def integer(key: str, high: int = 1 << 20) -> int:
        value = _number(metadata, f"llama.{key}", low=1, high=high)
        if value != int(value):
            raise ValueError(f"llama.{key} is {value!r}; it must be a whole number")
        return int(value)

    scaling = metadata.get("llama.rope.scaling.type", "none")
    if scaling != "none":
        raise ValueError(f"llama.rope.scaling.type {scaling!r} is not supported; supported: none")
    width, num_heads = integer("embedding_length"), integer("attention.head_count", 4096)
    num_kv_heads = (
        integer("attention.head_count_kv", 4096) if "llama.attention.head_count_kv" in metadata else num_heads
    )
    head_dim = (
        integer("attention.key_length", 4096)
        if "llama.attention.key_length" in metadata
        else width // num_heads
    )
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads cannot share {num_kv_heads} key/value heads evenly")
    if head_dim % 2 or integer("rope.dimension_count", 4096) != head_dim:
        raise ValueError(f"head width {head_dim} must be even and equal to llama.rope.dimension_count")
    tokens = metadata["tokenizer.ggml.tokens"]
    if not isinstance(tokens, list):
        raise ValueError("tokenizer.ggml.tokens is not a list")  # noqa: TRY004 -- the contract's error
    return LlamaConfig(
        vocab_size=len(tokens),
        width=width,
        hidden_width=integer("feed_forward_length"),
        num_layers=integer("block_count", 4096),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope_theta=_number(metadata, "llama.rope.freq_base", low=1.0, high=1e12)
        if "llama.rope.freq_base" in metadata
        else 10000.0,
        norm_eps=_number(metadata, "llama.attention.layer_norm_rms_epsilon", low=0.0, high=1.0),
        max_position=max_model_len or integer("context_length", MOST_POSITIONS),
    )


GGUF_NAMES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(parameter: str) -> str:
    """`layers.3.mlp.up_proj.weight` -> `blk.3.ffn_up.weight`."""
    module, _, kind = parameter.rpartition(".")
    if module.startswith("layers."):
        _, layer, rest = module.split(".", 2)
        return f"blk.{layer}.{GGUF_NAMES[rest]}.{kind}"
    return f"{GGUF_NAMES[module]}.{kind}"


def row_order(config: ModelConfig, module: str) -> Tensor | None:
    """GGUF interleaves the two halves of each rotated head; this puts the rows of q and k back."""
    if not module.endswith(("q_proj", "k_proj")):
        return None
    num_heads = config.num_heads if module.endswith("q_proj") else config.num_kv_heads
    rows = torch.arange(num_heads * config.head_dim)
    return rows.view(num_heads, config.head_dim // 2, 2).transpose(1, 2).flatten()


MODEL = ModelSpec(
    read_config=read_config,
    build=lambda config: Llama(cast(LlamaConfig, config)),
    gguf_name=gguf_name,
    row_order=row_order,
    tied=("lm_head", "embed_tokens"),
)
