"""The pre-norm decoder that Llama and its kin share: rotary positions, grouped queries, SwiGLU.

What sets a family apart is a field of `DecoderConfig`. Parameters are named as published
checkpoints name them.

Source: arXiv:2302.13971, arXiv:2307.09288; `transformers` `models/llama/modeling_llama.py`.
Shapes: see `core.layers`.
"""

from typing import NamedTuple

from torch import Tensor, nn

from core.layers.batch_view import BatchView
from core.layers.embedding import Embedding
from core.layers.linear import Linear
from core.layers.mlp import GatedMLP
from core.layers.norm import RMSNorm
from core.layers.rope_scaling import RopeScaling
from core.layers.rotary import Rotary, rotate


class DecoderConfig(NamedTuple):
    vocab_size: int
    width: int
    hidden_width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    norm_eps: float
    max_position: int
    qkv_bias: bool = False
    """Qwen2: the three inner projections add a bias."""
    qk_norm: bool = False
    """Qwen3: every query and key head is normalised before it is rotated."""


class Attention(nn.Module):
    def __init__(self, c: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, c.head_dim
        self.q_proj = Linear(c.width, c.num_heads * c.head_dim, bias=c.qkv_bias)
        self.k_proj = Linear(c.width, c.num_kv_heads * c.head_dim, bias=c.qkv_bias)
        self.v_proj = Linear(c.width, c.num_kv_heads * c.head_dim, bias=c.qkv_bias)
        self.o_proj = Linear(c.num_heads * c.head_dim, c.width)
        self.q_norm = RMSNorm(c.head_dim, eps=c.norm_eps) if c.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(c.head_dim, eps=c.norm_eps) if c.qk_norm else nn.Identity()

    def forward(self, x_TE: Tensor, rope: tuple[Tensor, Tensor], batch: BatchView) -> Tensor:
        q_THD = self.q_norm(self.q_proj(x_TE).unflatten(-1, (-1, self.head_dim)))
        k_TKD = self.k_norm(self.k_proj(x_TE).unflatten(-1, (-1, self.head_dim)))
        v_TKD = self.v_proj(x_TE).unflatten(-1, (-1, self.head_dim))
        attended_THD = batch.attend(self.layer, rotate(q_THD, *rope), rotate(k_TKD, *rope), v_TKD)
        out: Tensor = self.o_proj(attended_THD.flatten(1))
        return out


class Block(nn.Module):
    def __init__(self, c: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c.width, eps=c.norm_eps)
        self.self_attn = Attention(c, layer)
        self.post_attention_layernorm = RMSNorm(c.width, eps=c.norm_eps)
        self.mlp = GatedMLP(c.width, c.hidden_width)

    def forward(self, x_TE: Tensor, rope: tuple[Tensor, Tensor], batch: BatchView) -> Tensor:
        x_TE = x_TE + self.self_attn(self.input_layernorm(x_TE), rope, batch)
        out: Tensor = x_TE + self.mlp(self.post_attention_layernorm(x_TE))
        return out


class Decoder(nn.Module):
    def __init__(self, c: DecoderConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(c.vocab_size, c.width)
        self.layers = nn.ModuleList(Block(c, layer) for layer in range(c.num_layers))
        self.norm = RMSNorm(c.width, eps=c.norm_eps)
        self.lm_head = Linear(c.width, c.vocab_size)
        self.rotary = Rotary(c.head_dim, c.max_position, theta=c.rope_theta, scaling=c.rope_scaling)

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
