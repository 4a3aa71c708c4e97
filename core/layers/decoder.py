"""The pre-norm decoder that Llama and its kin share: rotary positions, grouped queries, SwiGLU.

What sets a family apart is a field of `DecoderConfig`. Parameters are named as published
checkpoints name them.

Source: arXiv:2302.13971, arXiv:2307.09288; `transformers` `models/llama/modeling_llama.py`.
Shapes: see `core.layers`.
"""

from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from core.layers.absorber import Absorber
from core.layers.batch_view import BatchView
from core.layers.decoder_regions import Heads, added_and_normed, encoded, gated, normed, rotated
from core.layers.embedding import Embedding
from core.layers.linear import Linear
from core.layers.norm import RMSNorm
from core.layers.region import Region
from core.layers.rope_scaling import RopeScaling
from core.layers.rotary import Rotary


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
    def __init__(self, c: DecoderConfig) -> None:
        super().__init__()
        heads, kv_heads = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        self.qkv_proj = Linear(
            c.width,
            heads + 2 * kv_heads,
            bias=c.qkv_bias,
            parts={"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads},
        )
        self.o_proj = Linear(heads, c.width)
        if c.qk_norm:
            self.q_norm = RMSNorm(c.head_dim)
            self.k_norm = RMSNorm(c.head_dim)


class GatedMLP(nn.Module):
    """`down(silu(gate(x)) * up(x))` (SwiGLU, arXiv:2002.05202)."""

    def __init__(self, c: DecoderConfig) -> None:
        super().__init__()
        width = c.hidden_width
        self.gate_up_proj = Linear(c.width, 2 * width, parts={"gate_proj": width, "up_proj": width})
        self.down_proj = Linear(width, c.width)


class Block(nn.Module):
    """One layer's weights."""

    def __init__(self, c: DecoderConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c.width)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c.width)
        self.mlp = GatedMLP(c)


class Decoder(nn.Module):
    """Weights in modules, arithmetic in regions between the products.

    `compose()` comes once, when the weights are in place: which regions there are depends on the kernels.
    """

    def __init__(self, c: DecoderConfig) -> None:
        super().__init__()
        self.config = c
        self.embed_tokens = Embedding(c.vocab_size, c.width)
        self.layers = nn.ModuleList(Block(c) for _ in range(c.num_layers))
        self.norm = RMSNorm(c.width)
        self.lm_head = Linear(c.width, c.vocab_size)
        self.rotary = Rotary(c.head_dim, c.max_position, theta=c.rope_theta, scaling=c.rope_scaling)
        self._regions: dict[str, Region] = {}
        self._steps: list[LayerStep] = []

    def absorbers(self) -> dict[str, Absorber]:
        """Linears by dotted name, and what before them can take a division of their inputs."""
        c = self.config
        values = (c.num_heads + c.num_kv_heads) * c.head_dim
        found = {"lm_head": Absorber("norm", is_delicate=True)}
        for layer in range(len(self.layers)):
            qkv, mlp = f"layers.{layer}.self_attn.qkv_proj", f"layers.{layer}.mlp"
            found[qkv] = Absorber(f"layers.{layer}.input_layernorm", is_delicate=True)
            found[f"layers.{layer}.self_attn.o_proj"] = Absorber(
                qkv, values, heads=c.num_kv_heads, repeats=c.num_heads // c.num_kv_heads
            )
            found[f"{mlp}.gate_up_proj"] = Absorber(f"layers.{layer}.post_attention_layernorm")
            found[f"{mlp}.down_proj"] = Absorber(f"{mlp}.gate_up_proj", c.hidden_width)
        return found

    def compose(self, *, kv_dtype: torch.dtype) -> list[Region]:
        """Build the regions for the kernels in place, and say which they are; equal ones are shared.

        Args:
            kv_dtype: of the keys and values that `BatchView.attend` takes.
        """
        c = self.config
        heads = Heads(c.num_heads, c.num_kv_heads, c.head_dim, c.norm_eps, c.qkv_bias, c.qk_norm, kv_dtype)
        blocks = cast("list[Block]", list(self.layers))
        first = blocks[0].self_attn.qkv_proj
        self._enter = self._shared(normed(first.codec, c.width, c.norm_eps))
        self._steps = []
        for block, following in zip(blocks, [*blocks[1:], None], strict=True):
            attention, mlp = block.self_attn, block.mlp
            qkv, o = attention.qkv_proj, attention.o_proj
            gate_up, down = mlp.gate_up_proj, mlp.down_proj
            after = None if following is None else following.self_attn.qkv_proj.codec
            constants = [qkv.bias] if c.qkv_bias else []
            constants += [attention.q_norm.weight, attention.k_norm.weight] if c.qk_norm else []
            self._steps.append(
                LayerStep(
                    qkv=qkv.product,
                    rotate=self._shared(rotated(qkv.codec, heads)),
                    constants=tuple(cast("list[Tensor]", constants)),
                    encode=self._shared(encoded(o.codec, c.num_heads * c.head_dim)),
                    o=o.product,
                    to_mlp=self._shared(added_and_normed(o.codec, gate_up.codec, c.width, c.norm_eps)),
                    mlp_norm=block.post_attention_layernorm.weight,
                    gate_up=gate_up.product,
                    gate=self._shared(gated(gate_up.codec, down.codec, c.hidden_width)),
                    down=down.product,
                    leave=self._shared(added_and_normed(down.codec, after, c.width, c.norm_eps)),
                    next_norm=(self.norm if following is None else following.input_layernorm).weight,
                )
            )
        self._to_logits = self._shared(encoded(self.lm_head.codec, c.width))
        return list(self._regions.values())

    def forward(self, token_ids_T: Tensor, batch: BatchView) -> Tensor:
        x_TE = self.embed_tokens(token_ids_T)
        cos, sin = self.rotary.tables(batch.positions_T)
        codes, *sides = self._enter(x_TE, cast(Block, self.layers[0]).input_layernorm.weight)
        for layer, step in enumerate(self._steps):
            raw = step.qkv(codes)
            q_THD, k_TKD, v_TKD = step.rotate(cos, sin, *step.constants, raw, *sides)
            attended_THD = batch.attend(layer, q_THD, k_TKD, v_TKD)
            codes, *sides = step.encode(attended_THD.flatten(1))
            x_TE, codes, *sides = step.to_mlp(x_TE, step.mlp_norm, step.o(codes), *sides)
            codes, *sides = step.gate(step.gate_up(codes), *sides)
            x_TE, codes, *sides = step.leave(x_TE, step.next_norm, step.down(codes), *sides)
        return codes  # of the last layer: the final norm

    def logits(self, hidden_RE: Tensor) -> Tensor:
        codes, *sides = self._to_logits(hidden_RE)
        return self.lm_head.codec.decode(self.lm_head.product(codes), *sides)

    def _shared(self, region: Region) -> Region:
        return self._regions.setdefault(region.name, region)


class LayerStep(NamedTuple):
    """A layer as it is computed, looked up once: attribute chains cost as much as small operations."""

    qkv: Callable[[Tensor], Tensor]
    rotate: Region
    constants: tuple[Tensor, ...]
    encode: Region
    o: Callable[[Tensor], Tensor]
    to_mlp: Region
    mlp_norm: Tensor
    gate_up: Callable[[Tensor], Tensor]
    gate: Region
    down: Callable[[Tensor], Tensor]
    leave: Region
    next_norm: Tensor
