"""How checkpoints describe a `Decoder`: its config and its tensors' names, in GGUF and on the hub."""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from core.layers.config_fields import Fields
from core.layers.decoder import DecoderConfig
from core.layers.rope_scaling import FactorPerPair, LinearScaling, Llama3Scaling, RopeScaling

MOST_POSITIONS = 1 << 24
"""Of a context, so that a lying file cannot ask for rotary tables that no machine holds."""
ROPE_FACTORS = "rope_freqs.weight"
DEFAULT_THETA = 10000.0

GGUF_NAMES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
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


def hub_name(parameter: str) -> str:
    """`layers.3.mlp.up_proj.weight` -> `model.layers.3.mlp.up_proj.weight`; the output layer stands alone."""
    return parameter if parameter.startswith("lm_head.") else f"model.{parameter}"


def computed_on_the_fly(tensor: str) -> bool:
    """Tables that old checkpoints saved although they follow from the config."""
    return re.fullmatch(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", tensor) is not None


def gguf_row_order(num_heads: int, num_kv_heads: int, *, head_dim: int, module: str) -> Tensor | None:
    """Llama's GGUF interleaves the two halves of each rotated head; this puts the rows of q and k back."""
    if not module.endswith(("q_proj", "k_proj")):
        return None
    rows = torch.arange((num_heads if module.endswith("q_proj") else num_kv_heads) * head_dim)
    return rows.view(-1, head_dim // 2, 2).transpose(1, 2).flatten()


def read_gguf_config(
    architecture: str, metadata: Mapping[str, object], max_model_len: int, *, default_theta: float
) -> DecoderConfig:
    """Raises `KeyError` or `ValueError` as `ModelSpec` says."""
    fields = Fields(metadata, f"{architecture}.")
    width, num_heads = fields.integer("embedding_length"), fields.integer("attention.head_count", 4096)
    head_dim = fields.integer("attention.key_length", 4096, default=max(1, width // num_heads))
    rotated = fields.integer("rope.dimension_count", 4096, default=head_dim)
    if head_dim % 2 or rotated != head_dim:
        raise ValueError(
            f"head width {head_dim} must be even and equal to {architecture}.rope.dimension_count"
        )
    tokens = metadata["tokenizer.ggml.tokens"]
    if not isinstance(tokens, list):
        raise ValueError("tokenizer.ggml.tokens is not a list")  # noqa: TRY004 -- the contract's error
    return _checked(
        DecoderConfig(
            vocab_size=len(tokens),
            width=width,
            hidden_width=fields.integer("feed_forward_length"),
            num_layers=fields.integer("block_count", 4096),
            num_heads=num_heads,
            num_kv_heads=fields.integer("attention.head_count_kv", 4096, default=num_heads),
            head_dim=head_dim,
            rope_theta=fields.number("rope.freq_base", low=1.0, high=1e12, default=default_theta),
            rope_scaling=_gguf_scaling(fields, metadata.get(ROPE_FACTORS), head_dim),
            norm_eps=fields.number("attention.layer_norm_rms_epsilon", low=0.0, high=1.0),
            max_position=max_model_len or fields.integer("context_length", MOST_POSITIONS),
        )
    )


def _gguf_scaling(fields: Fields, factors: object, head_dim: int) -> RopeScaling | None:
    fields.require("rope.scaling.type", "none", "linear")
    kind = fields.values.get(fields.prefix + "rope.scaling.type", "none")
    if factors is None:
        if kind == "none":
            return None
        return LinearScaling(fields.number("rope.scaling.factor", low=1e-3, high=1e6))
    if kind != "none":
        raise ValueError(f"{fields.prefix}rope.scaling.type {kind} and {ROPE_FACTORS} exclude each other")
    assert isinstance(factors, list), "the reader of tensors gives lists"
    if len(factors) != head_dim // 2 or not all(1e-6 <= factor <= 1e6 for factor in factors):
        raise ValueError(f"{ROPE_FACTORS} must hold {head_dim // 2} numbers between 1e-06 and 1e+06")
    return FactorPerPair(tuple(factors))


def read_hub_config(metadata: Mapping[str, object], max_model_len: int) -> DecoderConfig:
    """As `read_gguf_config`, from a `config.json`."""
    fields = Fields(metadata)
    fields.require("hidden_act", "silu")
    fields.require("mlp_bias", False)
    fields.require("partial_rotary_factor", 1, 1.0)
    fields.require("use_sliding_window", False)
    fields.require("layer_types", ["full_attention"] * fields.integer("num_hidden_layers", 4096))
    if fields.has("quantization_config"):
        raise ValueError("quantization_config is set; supported: F32, F16 and BF16 weights as they are")
    width, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads", 4096)
    # transformers 5 moved `rope_theta` and `rope_scaling` into one object.
    rope = metadata.get("rope_parameters") or metadata.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise ValueError(f"rope_scaling is {rope!r:.60}, not an object")  # noqa: TRY004 -- the contract's error
    theta = Fields(rope) if rope.get("rope_theta") is not None else fields
    return _checked(
        DecoderConfig(
            vocab_size=fields.integer("vocab_size", 1 << 24),
            width=width,
            hidden_width=fields.integer("intermediate_size"),
            num_layers=fields.integer("num_hidden_layers", 4096),
            num_heads=num_heads,
            num_kv_heads=fields.integer("num_key_value_heads", 4096, default=num_heads),
            head_dim=fields.integer("head_dim", 4096, default=max(1, width // num_heads)),
            rope_theta=theta.number("rope_theta", low=1.0, high=1e12, default=DEFAULT_THETA),
            rope_scaling=_hub_scaling(Fields(rope)),
            norm_eps=fields.number("rms_norm_eps", low=0.0, high=1.0),
            max_position=max_model_len or fields.integer("max_position_embeddings", MOST_POSITIONS),
        )
    )


def _hub_scaling(rope: Fields) -> RopeScaling | None:
    name = "rope_type" if rope.has("rope_type") else "type"
    kind = rope.values.get(name) or ("linear" if rope.has("factor") else "default")
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(rope.number("factor", low=1e-3, high=1e6))
    if kind != "llama3":
        raise ValueError(f"rope_scaling {name} {kind!r:.60} is not supported; supported: linear, llama3")
    scaling = Llama3Scaling(
        factor=rope.number("factor", low=1e-3, high=1e6),
        low_freq_factor=rope.number("low_freq_factor", low=1e-6, high=1e6),
        high_freq_factor=rope.number("high_freq_factor", low=1e-6, high=1e6),
        original_max_position=rope.number("original_max_position_embeddings", low=1, high=MOST_POSITIONS),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise ValueError("rope_scaling high_freq_factor must be above low_freq_factor")
    return scaling


def hub_ties(metadata: Mapping[str, object], *, has_own: bool) -> bool:  # noqa: ARG001 -- the contract's argument
    """Whether the output layer is the embedding: the config decides, not what the file happens to hold."""
    tied = metadata.get("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        raise ValueError(f"tie_word_embeddings is {tied!r:.60}; it must be true or false")  # noqa: TRY004
    return tied


def _checked(config: DecoderConfig) -> DecoderConfig:
    if config.num_heads % config.num_kv_heads:
        raise ValueError(
            f"{config.num_heads} query heads cannot share {config.num_kv_heads} key/value heads evenly"
        )
    if config.head_dim % 2:
        raise ValueError(f"head width {config.head_dim} must be even")
    return config
