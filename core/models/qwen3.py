"""Qwen3: each query and key head is normalised before it is rotated.

Source: `transformers` `models/qwen3`. GGUF keeps the rows of this family in their published order.
"""

from collections.abc import Mapping
from typing import cast

from core.layers import Decoder, DecoderConfig
from core.layers.config_fields import Fields
from core.layers.decoder_files import (
    DEFAULT_THETA,
    computed_on_the_fly,
    gguf_name,
    hub_name,
    hub_ties,
    read_gguf_config,
    read_hub_config,
)
from core.models import ModelSpec, StoredAs


def from_gguf(metadata: Mapping[str, object], max_model_len: int) -> DecoderConfig:
    config = read_gguf_config("qwen3", metadata, max_model_len, default_theta=DEFAULT_THETA)
    return config._replace(qk_norm=True)


def from_hub(metadata: Mapping[str, object], max_model_len: int) -> DecoderConfig:
    Fields(metadata).require("attention_bias", False)
    return read_hub_config(metadata, max_model_len)._replace(qk_norm=True)


MODEL = ModelSpec(
    build=lambda config: Decoder(cast(DecoderConfig, config)),
    stored={
        "gguf": StoredAs(from_gguf, gguf_name, ties=lambda _metadata, *, has_own: not has_own),
        "safetensors": StoredAs(from_hub, hub_name, ties=hub_ties, ignored=computed_on_the_fly),
    },
    tied=("lm_head", "embed_tokens"),
)
