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


class RegionStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How many parts of a model run compiled (`core.compiled`)."""

    num_regions: int = 0
    num_compiled: int = 0
    num_waiting: int = 0
    """Compiled while serving, with other bits than now: used from the next start on."""
    num_refused: int = 0
    """That did not compile, or whose results were not close enough or not row-invariant."""
    num_compilations: int = 0
    """Regions compiled since the start, by the background child. None is compiled twice, none here."""
    compiling: bool = False
    note: str = ""
    """What keeps regions from being compiled, in words."""

    @property
    def num_eager(self) -> int:
        """That run eagerly and are not waiting."""
        return self.num_regions - self.num_compiled - self.num_waiting

    def describe(self) -> str:
        """In words, for a person; empty where a worker has no regions."""
        if not self.num_regions:
            return ""
        text = f"{self.num_compiled} of {self.num_regions} parts of the model run compiled"
        if self.num_waiting:
            text += f", {self.num_waiting} are compiled for the next start"
        if self.compiling:
            text += ", others are being compiled"
        return f"{text}; {self.note}" if self.note else text


class WorkerMemory(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's own view of its memory, in bytes, from /proc/self/smaps_rollup (0: unknown)."""

    rss_bytes: int = 0
    pss_bytes: int = 0
    anonymous_bytes: int = 0
    file_bytes: int = 0
    regions: RegionStatus = RegionStatus()
    """Looked at on the same occasion."""
