"""What a checkpoint holds and what it would cost to serve, without loading it. Torch-free."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from core.errors import CheckpointError
from core.execution.host_memory import HostMemory, read_host_memory
from core.weights import Checkpoint, MetadataValue, open_gguf

KV_VALUE_BYTES = 2
"""Keys and values are float16, except under `numerics=reference`."""
MODELS_FOLDER = Path(__file__).parents[1] / "models"


class StoredType(msgspec.Struct, frozen=True, kw_only=True):
    """All tensors of one stored type."""

    num_tensors: int = 0
    num_elements: int = 0
    num_bytes: int = 0


class TokenizerSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What the file says of its vocabulary. Empty text: it says nothing."""

    kind: str = ""
    pre_tokenizer: str = ""
    vocab_size: int = 0
    has_chat_template: bool = False


class CheckpointSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A model file's own account of itself, checked against its size. None: it does not say.

    Invariant: `num_weight_bytes` is the sum over `types`.
    """

    path: str
    file_bytes: int
    name: str
    architecture: str
    is_supported: bool
    """There is a model of that architecture here."""
    supported: tuple[str, ...]
    num_layers: int | None
    width: int | None
    num_heads: int | None
    num_kv_heads: int | None
    head_dim: int | None
    context_tokens: int | None
    types: dict[str, StoredType]
    num_tensors: int
    num_parameters: int
    num_weight_bytes: int
    tokenizer: TokenizerSummary
    kv_bytes_per_token: int | None
    host: HostMemory
    """This machine at this moment."""

    @classmethod
    def read(cls, path: str) -> "CheckpointSummary":
        """Open a model file, check its structure, and sum it up. No tensor data is read.

        Raises:
            CheckpointError: the file is missing, truncated or lying, or gives an impossible size.
            UnsupportedModel: a version or tensor type that is not built; lists those that are.
        """
        checkpoint = open_gguf(path)
        try:
            return _summary(checkpoint, file_bytes=checkpoint.file_bytes)
        finally:
            checkpoint.close()


def _summary(checkpoint: Checkpoint, *, file_bytes: int) -> CheckpointSummary:
    metadata = checkpoint.metadata
    architecture = _text(metadata, "general.architecture")
    sizes = _Sizes(checkpoint.path, metadata, architecture)
    layers, width, heads = (
        sizes.get("block_count"), sizes.get("embedding_length"), sizes.get("attention.head_count"),
    )  # fmt: skip
    kv_heads = sizes.get("attention.head_count_kv") or heads
    head_dim = sizes.get("attention.key_length") or (width // heads if width and heads else None)
    value_dim = sizes.get("attention.value_length") or head_dim
    types = _by_type(checkpoint)
    supported = tuple(sorted(file.stem for file in MODELS_FOLDER.glob("*.py") if file.stem != "__init__"))
    per_token = None
    if layers and kv_heads and head_dim and value_dim:
        per_token = layers * kv_heads * (head_dim + value_dim) * KV_VALUE_BYTES
    return CheckpointSummary(
        path=checkpoint.path,
        file_bytes=file_bytes,
        name=_text(metadata, "general.name"),
        architecture=architecture,
        is_supported=architecture in supported,
        supported=supported,
        num_layers=layers,
        width=width,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        context_tokens=sizes.get("context_length"),
        types=types,
        num_tensors=len(checkpoint.tensors),
        num_parameters=sum(stored.num_elements for stored in types.values()),
        num_weight_bytes=sum(stored.num_bytes for stored in types.values()),
        tokenizer=_tokenizer(metadata),
        kv_bytes_per_token=per_token,
        host=read_host_memory(),
    )


class _Sizes:
    """The architecture's numbers. A number that cannot be one is refused, a missing one is None."""

    def __init__(self, path: str, metadata: Mapping[str, MetadataValue], architecture: str) -> None:
        self._path, self._metadata, self._architecture = path, metadata, architecture

    def get(self, key: str) -> int | None:
        name = f"{self._architecture}.{key}"
        value = self._metadata.get(name)
        if value is None or isinstance(value, list):  # a list: one number per layer, no single answer
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1 << 32:
            raise CheckpointError(
                self._path, f"{name} is {value!r:.60}; it must be a whole number, at least 1"
            )
        return value


def _by_type(checkpoint: Checkpoint) -> dict[str, StoredType]:
    """Largest first."""
    found: dict[str, StoredType] = {}
    for tensor in checkpoint.tensors.values():
        so_far = found.get(tensor.ggml_type, StoredType())
        found[tensor.ggml_type] = StoredType(
            num_tensors=so_far.num_tensors + 1,
            num_elements=so_far.num_elements + tensor.num_elements,
            num_bytes=so_far.num_bytes + tensor.nbytes,
        )
    return dict(sorted(found.items(), key=lambda item: -item[1].num_bytes))


def _tokenizer(metadata: Mapping[str, MetadataValue]) -> TokenizerSummary:
    tokens = metadata.get("tokenizer.ggml.tokens")
    return TokenizerSummary(
        kind=_text(metadata, "tokenizer.ggml.model"),
        pre_tokenizer=_text(metadata, "tokenizer.ggml.pre"),
        vocab_size=len(tokens) if isinstance(tokens, list) else 0,
        has_chat_template=isinstance(metadata.get("tokenizer.chat_template"), str),
    )


def _text(metadata: Mapping[str, MetadataValue], key: str) -> str:
    value = metadata.get(key)
    return value if isinstance(value, str) else ""
