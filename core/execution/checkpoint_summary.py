"""What a checkpoint holds and what it would cost to serve, without loading it. Torch-free."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from core.errors import CheckpointError
from core.execution.host_memory import HostMemory, read_host_memory
from core.weights import Checkpoint, MetadataValue, open_checkpoint
from core.weights.json_file import read_json_file

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
        """Open a GGUF file or a folder of safetensors, check it and sum it up. No tensor data is read.

        Raises:
            CheckpointError: the file is missing, truncated or lying, or gives an impossible size.
            UnsupportedModel: a version or tensor type that is not built; lists those that are.
        """
        checkpoint = open_checkpoint(path)
        try:
            return _summary(checkpoint)
        finally:
            checkpoint.close()


def _summary(checkpoint: Checkpoint) -> CheckpointSummary:
    metadata, architecture = checkpoint.metadata, checkpoint.architecture
    sizes = _Sizes(checkpoint.path, metadata, architecture)
    layers, width, heads = sizes.get("layers"), sizes.get("width"), sizes.get("heads")
    kv_heads = sizes.get("kv_heads") or heads
    head_dim = sizes.get("key_dim") or (width // heads if width and heads else None)
    value_dim = sizes.get("value_dim") or head_dim
    types = _by_type(checkpoint)
    supported = tuple(sorted(file.stem for file in MODELS_FOLDER.glob("*.py") if file.stem != "__init__"))
    per_token = None
    if layers and kv_heads and head_dim and value_dim:
        per_token = layers * kv_heads * (head_dim + value_dim) * KV_VALUE_BYTES
    return CheckpointSummary(
        path=checkpoint.path,
        file_bytes=checkpoint.file_bytes,
        name=_text(metadata, "general.name"),
        architecture=architecture,
        is_supported=architecture in supported,
        supported=supported,
        num_layers=layers,
        width=width,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        context_tokens=sizes.get("context"),
        types=types,
        num_tensors=len(checkpoint.tensors),
        num_parameters=sum(stored.num_elements for stored in types.values()),
        num_weight_bytes=sum(stored.num_bytes for stored in types.values()),
        tokenizer=_tokenizer(Path(checkpoint.path), metadata, vocab_size=sizes.get("vocab")),
        kv_bytes_per_token=per_token,
        host=read_host_memory(),
    )


SIZE_KEYS = {
    "layers": ("{}.block_count", "num_hidden_layers"),
    "width": ("{}.embedding_length", "hidden_size"),
    "heads": ("{}.attention.head_count", "num_attention_heads"),
    "kv_heads": ("{}.attention.head_count_kv", "num_key_value_heads"),
    "key_dim": ("{}.attention.key_length", "head_dim"),
    "value_dim": ("{}.attention.value_length",),
    "context": ("{}.context_length", "max_position_embeddings"),
    "vocab": ("{}.vocab_size", "vocab_size"),
}
"""What the formats call each number; {} is the architecture's name.

Source: the GGUF specification; `config.json` of the Hugging Face hub.
"""


class _Sizes:
    """The architecture's numbers. A number that cannot be one is refused, a missing one is None."""

    def __init__(self, path: str, metadata: Mapping[str, MetadataValue], architecture: str) -> None:
        self._path, self._metadata, self._architecture = path, metadata, architecture

    def get(self, size: str) -> int | None:
        for key in SIZE_KEYS[size]:
            name = key.format(self._architecture)
            value = self._metadata.get(name)
            if value is None or isinstance(value, list):  # a list: one number per layer, no single answer
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1 << 32:
                raise CheckpointError(
                    self._path, f"{name} is {value!r:.60}; it must be a whole number, at least 1"
                )
            return value
        return None


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


def _tokenizer(
    path: Path, metadata: Mapping[str, MetadataValue], *, vocab_size: int | None
) -> TokenizerSummary:
    """What the file says, or, of a folder, which of the tokeniser's files it has."""
    if path.is_dir():
        config = path / "tokenizer_config.json"
        said = read_json_file(config) if config.is_file() else {}
        kinds = [name for name in ("tokenizer.json", "tokenizer.model") if (path / name).is_file()]
        return TokenizerSummary(
            kind=", ".join(kinds),
            vocab_size=vocab_size or 0,
            has_chat_template=bool(said.get("chat_template")) or (path / "chat_template.jinja").is_file(),
        )
    tokens = metadata.get("tokenizer.ggml.tokens")
    return TokenizerSummary(
        kind=_text(metadata, "tokenizer.ggml.model"),
        pre_tokenizer=_text(metadata, "tokenizer.ggml.pre"),
        vocab_size=len(tokens) if isinstance(tokens, list) else vocab_size or 0,
        has_chat_template=isinstance(metadata.get("tokenizer.chat_template"), str),
    )


def _text(metadata: Mapping[str, MetadataValue], key: str) -> str:
    value = metadata.get(key)
    return value if isinstance(value, str) else ""
