"""Parts that models share, and `BatchView`: all that a model sees of a step.

Models are plain single-device modules in float32. Quantising is a walk over the finished model
(`core.execution.loading`): model files never know which kernel computes their linears.

Shapes: T tokens of the step (all requests, flattened), E model width, H query heads, K key/value
heads, D head width, F feed-forward width, V vocabulary.
"""

from core.layers.absorber import Absorber
from core.layers.batch_view import BatchView
from core.layers.decoder import Decoder, DecoderConfig
from core.layers.embedding import Embedding
from core.layers.linear import Linear
from core.layers.norm import RMSNorm
from core.layers.region import Region
from core.layers.rotary import Rotary

__all__ = [
    "Absorber",
    "BatchView",
    "Decoder",
    "DecoderConfig",
    "Embedding",
    "Linear",
    "RMSNorm",
    "Region",
    "Rotary",
]
