"""The tree against a dictionary of prefixes: what was inserted and not evicted is found, nothing else."""

import random
from array import array

from hypothesis import given
from hypothesis import strategies as st

from core.cache.radix_tree import Node, RadixTree
from tests.properties.profiles import budget

NAMESPACES = (b"a", b"b")


class PlainCache:
    """The oracle: (namespace, prefix of whole blocks) -> the block that holds its last tokens."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.blocks: dict[tuple[bytes, tuple[int, ...]], int] = {}

    def match(self, namespace: bytes, token_ids: list[int]) -> list[int]:
        found: list[int] = []
        for end in range(self.block_size, len(token_ids) + 1, self.block_size):
            block_id = self.blocks.get((namespace, tuple(token_ids[:end])))
            if block_id is None:
                break
            found.append(block_id)
        return found

    def insert(self, namespace: bytes, token_ids: list[int], block_ids: list[int]) -> list[int]:
        ends = range(self.block_size, len(token_ids) + 1, self.block_size)
        keys = [(namespace, tuple(token_ids[:end])) for end in ends]
        return [self.blocks.setdefault(key, block_id) for key, block_id in zip(keys, block_ids, strict=True)]

    def remove(self, block_ids: list[int]) -> None:
        gone = set(block_ids)
        self.blocks = {key: block_id for key, block_id in self.blocks.items() if block_id not in gone}


@budget(examples=400)
@given(seed=st.integers(0, 2**32 - 1))
def test_the_tree_gives_what_a_dictionary_of_all_prefixes_gives(seed: int) -> None:
    choose = random.Random(seed)
    block_size = choose.choice((1, 2, 5))
    tree, plain = RadixTree(block_size), PlainCache(block_size)
    locked: list[tuple[Node, list[int]]] = []
    next_block_id = 0
    for _ in range(40):
        namespace = choose.choice(NAMESPACES)
        token_ids = [choose.choice((0, 0, 1)) for _ in range(choose.randrange(6 * block_size))]
        match choose.choice(("insert", "insert", "match", "lock", "unlock", "evict")):
            case "insert":
                whole = token_ids[: len(token_ids) // block_size * block_size]
                block_ids = list(range(next_block_id, next_block_id + len(whole) // block_size))
                next_block_id += len(block_ids)
                _, kept = tree.insert(namespace, array("i", whole), block_ids)
                assert kept == plain.insert(namespace, whole, block_ids)
            case "match":
                _, found, num_tokens = tree.match(namespace, array("i", token_ids))
                assert found == plain.match(namespace, token_ids)
                assert num_tokens == len(found) * block_size
            case "lock":
                node, found, _ = tree.match(namespace, array("i", token_ids))
                tree.lock(node)
                locked.append((node, found))
            case "unlock" if locked:
                tree.unlock(locked.pop(choose.randrange(len(locked)))[0])
            case "evict":
                held = {block_id for _, block_ids in locked for block_id in block_ids}
                assert tree.num_evictable == len(plain.blocks) - len(held)
                freed = tree.evict(choose.randint(0, tree.num_evictable))
                assert held.isdisjoint(freed)
                plain.remove(freed)
        tree.check()
        assert tree.num_blocks == len(plain.blocks)


@budget(examples=60)
@given(token_lists=st.lists(st.lists(st.integers(0, 1), min_size=4, max_size=12), max_size=8))
def test_eviction_never_leaves_a_block_without_the_blocks_before_it(token_lists: list[list[int]]) -> None:
    tree = RadixTree(2)
    next_block_id = 0
    for token_ids in token_lists:
        num_blocks = len(token_ids) // 2
        block_ids = range(next_block_id, next_block_id + num_blocks)
        tree.insert(b"a", array("i", token_ids[: num_blocks * 2]), block_ids)
        next_block_id += num_blocks
    while tree.num_evictable:
        tree.evict(1)
        tree.check()
        reachable = {
            block_id for tokens in token_lists for block_id in tree.match(b"a", array("i", tokens))[1]
        }
        assert len(reachable) == tree.num_blocks
