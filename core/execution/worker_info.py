"""What a loaded worker tells the engine about itself. Torch-free, so that both ends can read it."""

import msgspec


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts fixed once the weights are loaded and the KV pool is allocated. Sizes in bytes."""

    num_blocks: int
    block_size: int
    max_model_len: int
    """Longest context in tokens, prompt and output together."""
    vocab_size: int
    device: str
    numerics: str
    architecture: str
    kernels: dict[str, int] = {}
    """Linear kernel -> how many weights use it."""
    num_threads: int = 1
    model_file_bytes: int = 0
    packed_weight_bytes: int = 0
    """Sum of all tensors the kernels read."""
    kv_bytes: int = 0
    kv_bytes_per_token: int = 0
    load_s: float = 0.0
    namespace: bytes = b""
    """Tagged digest of model, numerics and KV dtype: the root of every cache key."""


class WorkerMemory(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's own view of its memory, in bytes, from /proc/self/smaps_rollup (0: unknown)."""

    rss_bytes: int = 0
    pss_bytes: int = 0
    anonymous_bytes: int = 0
    file_bytes: int = 0
