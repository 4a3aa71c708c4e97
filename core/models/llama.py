"""Llama and what is published under its name: SmolLM2, TinyLlama, Yi, many more.

Source: `transformers` `models/llama`; llama.cpp `convert_hf_to_gguf.py` for the order of rotated rows.
"""

from collections.abc import Mapping
from typing import cast

from torch import Tensor

from core.layers import Decoder, DecoderConfig
from core.layers.config_fields import Fields
from core.layers.decoder_files import (
    DEFAULT_THETA,
    ROPE_FACTORS,
    computed_on_the_fly,
    gguf_name,
    gguf_row_order,
    hub_name,
    hub_ties,
    read_gguf_config,
    read_hub_config,
)
from core.models import ModelConfig, ModelSpec, StoredAs


def from_gguf(metadata: Mapping[str, object], max_model_len: int) -> DecoderConfig:
    return read_gguf_config("llama", metadata, max_model_len, default_theta=DEFAULT_THETA)


def from_hub(metadata: Mapping[str, object], max_model_len: int) -> DecoderConfig:
    Fields(metadata).require("attention_bias", False)
    return read_hub_config(metadata, max_model_len)


def row_order(config: ModelConfig, module: str) -> Tensor | None:
    return gguf_row_order(config.num_heads, config.num_kv_heads, head_dim=config.head_dim, module=module)


MODEL = ModelSpec(
    build=lambda config: Decoder(cast(DecoderConfig, config)),
    stored={
        "gguf": StoredAs(
            from_gguf,
            gguf_name,
            ties=lambda _metadata, *, has_own: not has_own,
            row_order=row_order,
            config_tensors=(ROPE_FACTORS,),
        ),
        "safetensors": StoredAs(from_hub, hub_name, ties=hub_ties, ignored=computed_on_the_fly),
    },
    tied=("lm_head", "embed_tokens"),
)
