import hashlib
from array import array

import pytest

from core.cache.content_key import block_key, root_key
from core.cache.radix_tree import RadixTree


def ids(*token_ids: int) -> "array[int]":
    return array("i", token_ids)


def tree_with(*prefixes: tuple["array[int]", list[int]], block_size: int = 2) -> RadixTree:
    tree = RadixTree(block_size)
    for token_ids, block_ids in prefixes:
        tree.insert(b"a", token_ids, block_ids)
        tree.check()
    return tree


def matched(tree: RadixTree, token_ids: "array[int]", namespace: bytes = b"a") -> list[int]:
    _, block_ids, num_tokens = tree.match(namespace, token_ids)
    tree.check()
    assert num_tokens == len(block_ids) * tree.block_size
    return block_ids


def use(tree: RadixTree, token_ids: "array[int]") -> None:
    """Hold a prefix and let go of it, as a request does."""
    node, _, _ = tree.match(b"a", token_ids)
    tree.lock(node)
    tree.unlock(node)
    tree.check()


def test_nothing_matches_in_an_empty_tree():
    assert matched(RadixTree(2), ids(1, 2, 3, 4)) == []


def test_an_inserted_prefix_is_found_again():
    assert matched(tree_with((ids(1, 2, 3, 4), [7, 3])), ids(1, 2, 3, 4)) == [7, 3]


def test_only_whole_blocks_match():
    tree = tree_with((ids(1, 2, 3, 4), [7, 3]))
    assert matched(tree, ids(1, 2, 3)) == [7]
    assert matched(tree, ids(1, 2, 3, 5)) == [7]
    assert matched(tree, ids(1, 9, 3, 4)) == []


def test_prefixes_that_part_inside_a_block_share_only_the_blocks_before():
    tree = tree_with((ids(1, 2, 3, 4), [0, 1]), (ids(1, 2, 3, 9), [0, 2]))
    assert matched(tree, ids(1, 2, 3, 4)) == [0, 1]
    assert matched(tree, ids(1, 2, 3, 9)) == [0, 2]
    assert tree.num_blocks == tree.num_evictable == 3


def test_a_match_may_run_over_many_edges_and_end_inside_one():
    tree = tree_with((ids(1, 1, 2, 2, 3, 3, 4, 4), [0, 1, 2, 3]), (ids(1, 1, 5, 5), [0, 4]))
    assert matched(tree, ids(1, 1, 2, 2, 3, 3, 9, 9)) == [0, 1, 2]


def test_an_inserted_prefix_that_is_there_keeps_the_blocks_of_the_tree():
    tree = tree_with((ids(1, 2, 3, 4), [0, 1]))
    _, kept = tree.insert(b"a", ids(1, 2, 3, 4, 5, 6), [8, 1, 9])
    tree.check()
    assert kept == [0, 1, 9], "the caller's 8 is a duplicate"
    assert tree.num_blocks == 3


def test_namespaces_share_nothing():
    tree = tree_with((ids(1, 2), [0]))
    assert matched(tree, ids(1, 2), b"b") == []
    assert matched(tree, ids(1, 2), b"") == []
    tree.insert(b"b", ids(1, 2), [1])
    assert matched(tree, ids(1, 2), b"b") == [1]
    assert matched(tree, ids(1, 2), b"a") == [0]


def test_what_is_locked_is_not_evictable_and_becomes_so_when_unlocked():
    tree = tree_with((ids(1, 1, 2, 2, 3, 3), [0, 1, 2]))
    node, _, _ = tree.match(b"a", ids(1, 1, 2, 2))
    assert tree.num_unlocked_blocks(node) == 2
    tree.lock(node)
    tree.check()
    assert tree.num_evictable == 1
    assert tree.evict(1) == [2]
    with pytest.raises(AssertionError, match="1 of 0 evictable"):
        tree.evict(1)
    tree.unlock(node)
    tree.check()
    assert tree.num_evictable == 2


def test_a_node_locked_twice_needs_two_unlocks():
    tree = tree_with((ids(1, 1), [0]))
    node, _, _ = tree.match(b"a", ids(1, 1))
    tree.lock(node)
    tree.lock(node)
    tree.unlock(node)
    assert tree.num_evictable == 0
    tree.unlock(node)
    assert tree.num_evictable == 1
    with pytest.raises(AssertionError, match="more often"):
        tree.unlock(node)


def test_splitting_a_locked_edge_keeps_both_halves_locked():
    tree = tree_with((ids(1, 1, 2, 2), [0, 1]))
    node, _, _ = tree.match(b"a", ids(1, 1, 2, 2))
    tree.lock(node)
    tree.insert(b"a", ids(1, 1, 7, 7), [5, 6])
    tree.check()
    assert tree.num_evictable == 1
    tree.unlock(node)
    tree.check()
    assert tree.num_evictable == 3


def test_the_least_recently_used_leaf_goes_first():
    prefixes = [(ids(n, n), [n]) for n in range(4)]
    tree = tree_with(*prefixes)
    for n in (2, 0, 3, 1):
        use(tree, ids(n, n))
    assert [tree.evict(1) for _ in range(4)] == [[2], [0], [3], [1]]
    tree.check()


def test_looking_a_prefix_up_does_not_make_it_recent():
    tree = tree_with((ids(1, 1), [1]), (ids(2, 2), [2]))
    use(tree, ids(1, 1))
    use(tree, ids(2, 2))
    tree.match(b"a", ids(1, 1))
    assert tree.evict(1) == [1]


def test_an_edge_is_evicted_from_its_end_and_only_as_much_as_needed():
    tree = tree_with((ids(1, 1, 2, 2, 3, 3), [0, 1, 2]))
    assert tree.evict(2) == [2, 1]
    tree.check()
    assert matched(tree, ids(1, 1, 2, 2, 3, 3)) == [0]


def test_a_parent_is_evicted_after_its_children():
    tree = tree_with((ids(1, 1, 2, 2), [0, 1]), (ids(1, 1, 3, 3), [0, 2]))
    use(tree, ids(1, 1, 2, 2))
    assert tree.evict(3) == [2, 1, 0]
    tree.check()
    assert list(tree.nodes()) == [], "an empty namespace leaves nothing behind"


def test_extending_the_only_holders_leaf_makes_no_new_node():
    tree = tree_with((ids(1, 1), [0]))
    node, _, _ = tree.match(b"a", ids(1, 1))
    tree.lock(node)
    extended, kept = tree.extend(node, ids(2, 2), [5])
    tree.check()
    assert (extended, kept) == (node, [5])
    assert tree.num_evictable == 0


def test_extending_a_leaf_that_two_hold_leaves_the_other_ones_hold_as_it_was():
    tree = tree_with((ids(1, 1), [0]))
    node, _, _ = tree.match(b"a", ids(1, 1))
    tree.lock(node)
    tree.lock(node)
    extended, _ = tree.extend(node, ids(2, 2), [5])
    tree.check()
    assert extended is not node
    assert tree.num_evictable == 1


def test_discarding_the_end_of_a_path_stops_at_what_others_follow():
    tree = tree_with((ids(1, 1, 2, 2, 3, 3), [0, 1, 2]), (ids(1, 1, 9, 9), [0, 3]))
    node, _, _ = tree.match(b"a", ids(1, 1, 2, 2, 3, 3))
    assert tree.discard(node, 3) == [2, 1]
    tree.check()
    assert matched(tree, ids(1, 1, 9, 9)) == [0, 3]


def test_discarding_leaves_what_somebody_holds():
    tree = tree_with((ids(1, 1, 2, 2), [0, 1]))
    node, _, _ = tree.match(b"a", ids(1, 1, 2, 2))
    tree.lock(node)
    assert tree.discard(node, 1) == []
    tree.check()


def test_a_retention_policy_decides_who_goes_first():
    class KeepTheOldest:
        def rank(self, node, *, now):
            return -node.last_used

    tree = RadixTree(1, retention=KeepTheOldest())
    for n in range(3):
        tree.insert(b"a", ids(n), [n])
        use(tree, ids(n))
    assert [tree.evict(1) for _ in range(3)] == [[2], [1], [0]]


def test_stale_queue_entries_do_not_pile_up():
    tree = tree_with((ids(1, 1), [0]))
    for _ in range(1000):
        use(tree, ids(1, 1))  # check() bounds the queue


def test_a_content_key_is_a_chain_over_namespace_parent_and_tokens():
    tree = tree_with((ids(1, 2, 3, 4), [0, 1]))
    node, _, _ = tree.match(b"a", ids(1, 2, 3, 4))
    root = hashlib.sha256(b"N" + (1).to_bytes(8, "little") + b"a").digest()
    tokens = b"\1\0\0\0\2\0\0\0", b"\3\0\0\0\4\0\0\0"
    first = hashlib.sha256(b"B" + root + (8).to_bytes(8, "little") + tokens[0]).digest()
    second = hashlib.sha256(b"B" + first + (8).to_bytes(8, "little") + tokens[1]).digest()
    assert tree.content_keys(node) == [first, second]
    tree.check()


def test_content_keys_do_not_depend_on_how_the_tree_is_cut():
    token_ids = ids(1, 1, 2, 2, 3, 3, 4, 4)
    tree = tree_with((token_ids, [0, 1, 2, 3]))
    whole, _, _ = tree.match(b"a", token_ids)
    keys = tree.content_keys(whole)
    upper, _, _ = tree.match(b"a", token_ids[:4])
    assert tree.content_keys(upper) + tree.content_keys(whole) == keys
    tree.evict(1)
    assert tree.content_keys(whole) == keys[2:3]
    node, _ = tree.insert(b"a", token_ids, [0, 1, 2, 9])
    assert tree.content_keys(node)[-1:] == keys[3:]


def test_content_keys_of_other_namespaces_parents_and_block_sizes_differ():
    root_keys = [root_key(namespace) for namespace in (b"", b"a", b"b", b"ab")]
    token_bytes = ids(1, 2, 3, 4).tobytes()
    keys = [block_key(root, token_bytes) for root in root_keys]
    keys += [block_key(keys[0], token_bytes), block_key(keys[0], token_bytes[:8])]
    assert len(set(root_keys + keys)) == 10
