"""The mock's prefix memory: which prompts' beginnings it has seen, without a bound and without eviction."""

from collections.abc import Iterator, Sequence


class PrefixMemory:
    """Chains of hashes over blocks of words, as engines name their blocks."""

    def __init__(self, block_tokens: int) -> None:
        assert block_tokens > 0, "a block holds something"
        self._block_tokens = block_tokens
        self._seen: set[int] = set()

    def num_cached(self, words: Sequence[str]) -> int:
        """Words at the beginning that were seen before; never all of them: one must be computed."""
        most = (len(words) - 1) // self._block_tokens if words else 0
        num_blocks = 0
        for name in self._names(words):
            if num_blocks == most or name not in self._seen:
                break
            num_blocks += 1
        return num_blocks * self._block_tokens

    def add(self, words: Sequence[str]) -> None:
        self._seen.update(self._names(words))

    def clear(self) -> None:
        self._seen.clear()

    def _names(self, words: Sequence[str]) -> Iterator[int]:
        name = 0
        size = self._block_tokens
        for start in range(0, len(words) - size + 1, size):
            name = hash((name, *words[start : start + size]))
            yield name
