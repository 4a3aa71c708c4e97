"""A worker without tensors whose answers still depend on every slot of the KV cache.

Each slot stores the token written there and a digest of everything that token could attend to.
The next token is a digest of all slots from position 0 to the sampled row, read through the block
table. So a block shared wrongly, evicted too early, or written at the wrong place changes the
output, and `generate_alone`, which knows no blocks, says what the output should have been. Scores
of the prompt and pooled sums are digests of the same slots (`score_alone`, `pool_alone`); a history
that is not what the slots hold makes the output wrong, too.

Options come in `EngineConfig.checkpoint`, for example "fake:vocab=100,raise_on_step=3".
"""

import hashlib
import os
import threading
import time
from array import array
from collections.abc import Iterable, Sequence

from core.config import EngineConfig
from core.errors import CheckpointError
from core.execution.worker_info import WorkerInfo, WorkerMemory
from core.request import SamplingParams, TokenLogprob
from core.scheduler.plan import BlockCopy, PlannedTokens, SampledTokens, StepPlan, StepResult

SLOT_BYTES = 8
"""4 bytes of token id, 4 bytes of context digest."""

DEFAULT_VOCAB_SIZE = 100

INTEGER_OPTIONS = {
    "vocab": "how many token ids there are",
    "raise_on_step": "the step with this id raises RuntimeError",
    "hang_on_step": "the step with this id waits for `hang_s`, or until close()",
    "die_on_step": "the step with this id ends the process (use it in a child process only)",
    "sample_error_on_step": "in the step with this id the first sampled row fails alone",
    "raise_on_load": "1: loading raises RuntimeError",
    "die_on_load": "1: loading ends the process",
    "max_len": "longest context, where the config leaves it open",
}
FLOAT_OPTIONS = {
    "step_s": "how long each step takes",
    "load_s": "how long loading takes",
    "hang_s": "how long a hanging step waits",
}


def load_worker(config: EngineConfig) -> "KVWorker":
    """The `WorkerFactory`: "tests.fakes.kv_worker:load_worker".

    Raises:
        CheckpointError: `config.checkpoint` is not "fake:" and known options.
    """
    options = parse_options(config.checkpoint)
    time.sleep(options.get("load_s", 0.0))
    if options.get("raise_on_load"):
        raise RuntimeError("the fake worker was told to fail while loading")
    if options.get("die_on_load"):
        os._exit(13)
    return KVWorker(config, options)


def parse_options(checkpoint: str) -> dict[str, float]:
    """Read "fake:name=value,...". Step options are compared with `StepPlan.step_id`."""
    kind, _, tail = checkpoint.partition(":")
    if kind != "fake":
        raise CheckpointError(checkpoint, "a fake checkpoint starts with 'fake:'")
    options: dict[str, float] = {}
    for part in filter(None, tail.split(",")):
        name, _, value = part.partition("=")
        if name not in INTEGER_OPTIONS and name not in FLOAT_OPTIONS:
            raise CheckpointError(checkpoint, f"{name!r} is not an option of the fake worker")
        try:
            options[name] = int(value) if name in INTEGER_OPTIONS else float(value)
        except ValueError:
            raise CheckpointError(checkpoint, f"{name} has the value {value!r}, not a number") from None
    return options


class KVWorker:
    """Satisfies `core.engine.executor.Worker`. `close()` also wakes a hanging step."""

    def __init__(self, config: EngineConfig, options: dict[str, float]) -> None:
        self._options = options
        self._block_size = config.block_size
        num_blocks = config.num_blocks or 64
        self._slots = bytearray(num_blocks * config.block_size * SLOT_BYTES)
        self._closed = threading.Event()
        self.info = WorkerInfo(
            num_blocks=num_blocks,
            block_size=config.block_size,
            max_model_len=config.max_model_len or int(options.get("max_len", 4096)),
            vocab_size=int(options.get("vocab", DEFAULT_VOCAB_SIZE)),
            device="cpu",
            numerics=config.numerics,
            architecture="fake",
            kv_bytes=len(self._slots),
            kv_bytes_per_token=SLOT_BYTES,
            namespace=b"fake",
        )

    def execute(self, plan: StepPlan) -> StepResult:
        """Write every item's tokens, then sample: as a real forward does, all rows in one step."""
        self._misbehave(plan.step_id)
        self._copy(plan.block_copies)
        for item in plan.items:
            self._write(item)
        samples = [self._answer(item) for item in plan.items if item.answers]
        if plan.step_id == self._options.get("sample_error_on_step") and samples:
            failed = SampledTokens(request_id=samples[0].request_id, error="this row was told to fail")
            samples[0] = failed
        return StepResult(step_id=plan.step_id, samples=tuple(samples))

    def clear_slots(self) -> None:
        """Forget all KV, as a restarted worker does."""
        self._slots[:] = bytes(len(self._slots))

    def memory(self) -> WorkerMemory:
        return WorkerMemory(anonymous_bytes=len(self._slots))

    def close(self) -> None:
        self._closed.set()

    def _misbehave(self, step_id: int) -> None:
        self._closed.wait(self._options.get("step_s", 0.0))
        if step_id == self._options.get("die_on_step"):
            os._exit(13)
        if step_id == self._options.get("hang_on_step"):
            self._closed.wait(self._options.get("hang_s", 3600.0))
        if step_id == self._options.get("raise_on_step"):
            raise RuntimeError(f"the fake worker was told to fail in step {step_id}")

    def _copy(self, copies: Sequence[BlockCopy]) -> None:
        targets = {copy.target for copy in copies}
        assert len(targets) == len(copies), "a block is copied into twice"
        assert targets.isdisjoint(copy.source for copy in copies), "a copy of a copy"
        for copy in copies:
            assert 0 < copy.num_tokens <= self._block_size
            source, target = (block * self._block_size * SLOT_BYTES for block in (copy.source, copy.target))
            num_bytes = copy.num_tokens * SLOT_BYTES
            self._slots[target : target + num_bytes] = self._slots[source : source + num_bytes]

    def _write(self, item: PlannedTokens) -> None:
        table = array("i", item.block_table)
        end = item.first_position + len(item.token_ids)
        assert end <= len(table) * self._block_size, f"{item.request_id} has too few blocks for {end} tokens"
        assert len(set(table)) == len(table), f"{item.request_id} names a block twice"
        context = hashlib.blake2b(self._read(table, item.first_position), digest_size=8)
        for position, token_id in enumerate(item.token_ids, item.first_position):
            assert 0 <= token_id < self.info.vocab_size, f"token {token_id} is not in the vocabulary"
            slot = table[position // self._block_size] * self._block_size + position % self._block_size
            entry = slot_entry(context.digest(), token_id)
            self._slots[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES] = entry
            context.update(entry)

    def _answer(self, item: PlannedTokens) -> SampledTokens:
        table = array("i", item.block_table)
        first, end = item.first_position, item.first_position + len(item.token_ids)
        slots = self._read(table, end)
        token_ids: list[int] = []
        logprobs: list[TokenLogprob] = []
        if item.num_samples:
            token_ids, logprobs = self._sample(item, slots)
        scored: tuple[TokenLogprob, ...] = ()
        if item.scoring is not None:
            scored = tuple(
                score(slots[: (first + row + 1) * SLOT_BYTES], token_id, item.scoring.num_top)
                for row, token_id in enumerate(item.scoring.token_ids)
            )
        pooled = b"" if item.pooling is None else pool_slots(slots, item.pooling, first=first)
        return SampledTokens(
            request_id=item.request_id,
            token_ids=tuple(token_ids),
            logprobs=tuple(logprobs),
            scored=scored,
            pooled=pooled,
        )

    def _sample(self, item: PlannedTokens, slots: bytes) -> tuple[list[int], list[TokenLogprob]]:
        sampling = item.sampling
        assert sampling is not None
        assert sampling.seed is not None
        error = 0 if history_is_right(item, slots) else 1
        end = item.first_position + len(item.token_ids)
        lengths = range(end - item.num_samples + 1, end + 1)
        seen = [slots[: length * SLOT_BYTES] for length in lengths]
        vocab_size = self.info.vocab_size
        token_ids = [
            (next_token(slots, sampling, vocab_size=vocab_size) + error) % vocab_size for slots in seen
        ]
        if sampling.num_logprobs is None:
            return token_ids, []
        pairs = zip(seen, token_ids, strict=True)
        return token_ids, [score(slots, token_id, sampling.num_logprobs) for slots, token_id in pairs]

    def _read(self, table: "array[int]", length: int) -> bytes:
        """The first `length` slots of a request, joined."""
        width = self._block_size * SLOT_BYTES
        used = table[: -(-length // self._block_size)]
        return b"".join(self._slots[b * width : (b + 1) * width] for b in used)[: length * SLOT_BYTES]


def history_is_right(item: PlannedTokens, slots: bytes) -> bool:
    """Whether penalties look back on exactly the tokens that the slots hold; others bring none along."""
    sampling = item.sampling
    assert sampling is not None
    if not sampling.looks_back:
        return item.history is None or not item.history.token_ids
    held = b"".join(slots[place : place + 4] for place in range(0, len(slots), SLOT_BYTES))
    return item.history is not None and item.history.token_ids == held


def score(slots: bytes, token_id: int, num_top: int) -> TokenLogprob:
    """A stand-in for a log-probability: a function of all readable slots and the token."""
    digest = hashlib.blake2b(slots + token_id.to_bytes(4, "little"), digest_size=2).digest()
    logprob = -int.from_bytes(digest) / 1024
    return TokenLogprob(token_id, logprob, tuple((rank, logprob - rank) for rank in range(num_top)))


def pool_slots(slots: bytes, total: bytes, *, first: int) -> bytes:
    """Add what the slots from `first` on stand for, in an order that shows: floats do not associate."""
    assert bool(total) == bool(first), "a sum that does not begin where this item does"
    sums = array("d", total or bytes(8))
    for end in range(first + 1, len(slots) // SLOT_BYTES + 1):
        digest = hashlib.blake2b(slots[: end * SLOT_BYTES], digest_size=8).digest()
        sums[0] += int.from_bytes(digest) / 3.0
    return sums.tobytes()


def slot_entry(context_digest: bytes, token_id: int) -> bytes:
    """What a token leaves in its slot: itself, and a mark of all it could see."""
    mark = hashlib.blake2b(context_digest + token_id.to_bytes(4, "little"), digest_size=4)
    return token_id.to_bytes(4, "little") + mark.digest()


def next_token(slots: bytes, sampling: SamplingParams, *, vocab_size: int) -> int:
    """A function of all readable slots; of the seed as well unless greedy."""
    seed = b"" if sampling.temperature == 0 else str(sampling.seed).encode()
    return int.from_bytes(hashlib.blake2b(slots, digest_size=8, salt=seed[:16]).digest()) % vocab_size


def generate_alone(
    prompt_ids: Sequence[int],
    sampling: SamplingParams,
    *,
    vocab_size: int = DEFAULT_VOCAB_SIZE,
    max_model_len: int = 1 << 30,
) -> list[int]:
    """The oracle: what a request gives with nobody beside it and no cache, computed without blocks."""
    slots = _slots_of(prompt_ids, b"")
    output: list[int] = []
    while len(output) < sampling.max_tokens and len(prompt_ids) + len(output) < max_model_len:
        output.append(next_token(slots, sampling, vocab_size=vocab_size))
        if output[-1] in sampling.stop_token_ids:
            break
        slots = _slots_of(output[-1:], slots)
    return output


def score_alone(prompt_ids: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """The oracle of prompt scores: one for each token but the first."""
    slots = _slots_of(prompt_ids, b"")
    return [
        score(slots[: place * SLOT_BYTES], prompt_ids[place], num_top) for place in range(1, len(prompt_ids))
    ]


def pool_alone(prompt_ids: Sequence[int]) -> bytes:
    """The oracle of pooled sums."""
    return pool_slots(_slots_of(prompt_ids, b""), b"", first=0)


def _slots_of(token_ids: Iterable[int], slots: bytes) -> bytes:
    context = hashlib.blake2b(slots, digest_size=8)
    for token_id in token_ids:
        entry = slot_entry(context.digest(), token_id)
        context.update(entry)
        slots += entry
    return slots
