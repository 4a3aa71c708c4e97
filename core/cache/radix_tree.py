"""Cached prefixes: from token ids to the blocks that hold their keys and values.

    root("a") ── [ 1 2 | 3 4 | 5 6 ] ──┬── [ 7 8 ]            blocks of 2 tokens;
                  blocks 9   4   0     └── [ 7 9 | 1 1 ]      edges end at block borders only

Each namespace has its own root, so nothing is shared between two. A node is the edge that leads to
it: whole blocks, full, committed and never written again. Sisters differ in their first block.

Invariants (`check()` asserts them):
    - an edge is one or more whole blocks; a block id is in the tree once;
    - a node is locked at least as often as its children together, so below an unlocked node
      everything is unlocked and can be evicted, leaf by leaf;
    - `num_evictable` is the number of blocks in unlocked nodes;
    - exactly the unlocked leaves wait in the eviction queue;
    - a node's `order` is the sorted keys of its children, so that the sister most like some tokens
      is a neighbour of where they would stand.
"""

import heapq
from array import array
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence

from core.cache.content_key import TOKEN_BYTES, block_key, root_key
from core.cache.retention import RetentionPolicy, SupersededFirst
from core.cache.token_bytes import num_common_tokens, whole_blocks


class Node:
    """An edge of the tree and where it leads. Only `RadixTree` changes it.

    `token_bytes` holds the edge's ids as native 32-bit integers; `keys` the content keys
    computed so far (a root holds its namespace's key); `queue_seq` names its entry in the
    eviction queue, 0 for none. `namespace` is a root's own.
    """

    __slots__ = (
        "block_ids", "children", "keys", "last_used", "lock_count", "namespace", "order", "parent",
        "queue_seq", "sealed", "superseded", "token_bytes",
    )  # fmt: skip

    def __init__(
        self, parent: "Node | None", token_bytes: bytearray, block_ids: list[int], *, namespace: bytes = b""
    ) -> None:
        self.parent = parent
        self.namespace = namespace
        self.token_bytes = token_bytes
        self.block_ids = block_ids
        self.children: dict[bytes, Node] = {}
        self.order: list[bytes] = []
        self.keys: list[bytes] = []
        self.lock_count = 0
        self.last_used = 0
        self.queue_seq = 0
        self.sealed = False
        self.superseded = False

    def adopt(self, child: "Node") -> None:
        """Put a child below, in place of one with the same first block if there is one."""
        first_block = bytes(child.token_bytes[: len(child.token_bytes) // len(child.block_ids)])
        if first_block not in self.children:
            insort(self.order, first_block)
        self.children[first_block] = child
        child.parent = self

    def disown(self, first_block: bytes) -> None:
        del self.children[first_block]
        del self.order[bisect_left(self.order, first_block)]


class RadixTree:
    """Longest-prefix lookup over full blocks, with reference counts and eviction.

    Holds block ids but owns no pool: `evict` and `discard` return the ids that left the tree, and
    the caller releases them. Touched by the event loop alone.
    """

    def __init__(self, block_size: int, *, retention: RetentionPolicy | None = None) -> None:
        self._block_bytes = block_size * TOKEN_BYTES
        self.block_size = block_size
        self._retention = retention or SupersededFirst()
        self._roots: dict[bytes, Node] = {}
        self._queue: list[tuple[int, int, Node]] = []  # heap of (rank, seq, node); stale entries are skipped
        self._num_queued = 0
        self._last_seq = 0
        self._now = 0
        self._num_blocks = 0
        self._num_evictable = 0

    @property
    def num_blocks(self) -> int:
        """Blocks in the tree, locked or not."""
        return self._num_blocks

    @property
    def num_evictable(self) -> int:
        """Blocks that `evict` could free now."""
        return self._num_evictable

    def match(self, namespace: bytes, token_ids: "array[int]") -> tuple[Node, list[int], int]:
        """Find the longest cached prefix of whole blocks. Changes nobody's place in the eviction order.

        Returns:
            The node where the prefix ends (split off, if it ended inside an edge; the root if
            nothing matched), the prefix's block ids and its length in tokens.
        """
        node = self._root(namespace)
        wanted = whole_blocks(token_ids, self.block_size)
        block_ids: list[int] = []
        offset = 0
        while offset < len(wanted):
            child = node.children.get(wanted[offset : offset + self._block_bytes])
            if child is None:
                break
            num_common = self._num_common_blocks(child, wanted, offset)
            if num_common < len(child.block_ids):
                child = self._split(child, num_common)
            node = child
            block_ids += node.block_ids
            offset += len(node.token_bytes)
        return node, block_ids, offset // TOKEN_BYTES

    def nearest(self, node: Node, token_ids: "array[int]") -> tuple[Node | None, int]:
        """Among the blocks that may follow `node`, the one that shares most first tokens with `token_ids`.

        Looks at two of them, however many there are: sorted, the likest is a neighbour. Changes nothing.

        Returns:
            The child whose first block it is, and how many tokens are common; `(None, 0)` if not one is.
        """
        wanted = memoryview(token_ids[: self.block_size]).tobytes()
        place = bisect_left(node.order, wanted)
        neighbours = node.order[max(0, place - 1) : place + 1]
        num_common, first_block = max(
            ((num_common_tokens(key, wanted), key) for key in neighbours), default=(0, b"")
        )
        return (node.children[first_block], num_common) if num_common else (None, 0)

    def first_block(self, child: Node) -> Node:
        """A node of its own for the first block of an edge: what may be locked without the rest."""
        return child if len(child.block_ids) == 1 else self._split(child, 1)

    def match_length(self, namespace: bytes, token_ids: "array[int]") -> int:
        """How many first tokens are cached, to the token. Changes nothing, splits nothing."""
        return self.closest(namespace, token_ids)[0]

    def closest(self, namespace: bytes, token_ids: "array[int]") -> tuple[int, int | None]:
        """How many first tokens are cached, to the token, and the block with the last of them, if any.

        Changes nothing, splits nothing.
        """
        node = self._root(namespace)
        wanted = whole_blocks(token_ids, self.block_size)
        offset, block_id = 0, None
        while child := node.children.get(wanted[offset : offset + self._block_bytes]):
            num_common = self._num_common_blocks(child, wanted, offset)
            offset += num_common * self._block_bytes
            block_id = child.block_ids[num_common - 1]
            if num_common < len(child.block_ids):
                rest = memoryview(token_ids)[offset // TOKEN_BYTES :][: self.block_size].tobytes()
                begin = num_common * self._block_bytes
                edge_block = bytes(child.token_bytes[begin : begin + self._block_bytes])
                num_more = num_common_tokens(edge_block, rest)
                return offset // TOKEN_BYTES + num_more, child.block_ids[num_common] if num_more else block_id
            node = child
        num_tokens = offset // TOKEN_BYTES
        sister, num_more = self.nearest(node, token_ids[num_tokens : num_tokens + self.block_size])
        return num_tokens + num_more, block_id if sister is None else sister.block_ids[0]

    def insert(
        self, namespace: bytes, token_ids: "array[int]", block_ids: Sequence[int]
    ) -> tuple[Node, list[int]]:
        """Add a prefix from its beginning; see `extend`."""
        return self.extend(self._root(namespace), token_ids, block_ids)

    def extend(self, node: Node, token_ids: "array[int]", block_ids: Sequence[int]) -> tuple[Node, list[int]]:
        """Add the blocks that follow `node`, which the caller alone may have locked, once at most.

        Returns:
            The node where they end, and the tree's blocks for these tokens. Where one of them is
            not the caller's, the tree had the block already and keeps its own: the caller's is a duplicate.
        """
        added = whole_blocks(token_ids, self.block_size)
        assert len(added) == len(token_ids) * TOKEN_BYTES == len(block_ids) * self._block_bytes
        kept: list[int] = []
        while len(kept) < len(block_ids):
            offset = len(kept) * self._block_bytes
            child = node.children.get(added[offset : offset + self._block_bytes])
            if child is None:
                node = self._append(node, added[offset:], block_ids[len(kept) :], may_grow=not kept)
                kept += block_ids[len(kept) :]
                break
            num_common = self._num_common_blocks(child, added, offset)
            node = child if num_common == len(child.block_ids) else self._split(child, num_common)
            kept += node.block_ids
        return node, kept

    def lock(self, node: Node) -> None:
        """Keep the path to `node` from eviction until as many `unlock` calls."""
        step: Node | None = node
        while step is not None:
            step.superseded = False  # somebody came back to it after all
            if step.lock_count == 0:
                self._num_evictable -= len(step.block_ids)
                self._unqueue(step)
            step.lock_count += 1
            if step.parent is None:
                self._keep_root(step)
            step = step.parent

    def unlock(self, node: Node) -> None:
        """Undo one `lock(node)`; the path counts as used now."""
        self._now += 1
        step: Node | None = node
        while step is not None:
            assert step.lock_count > 0, "a node is unlocked more often than it was locked"
            step.lock_count -= 1
            step.last_used = self._now
            if step.lock_count == 0:
                self._num_evictable += len(step.block_ids)
                self._queue_if_evictable(step)
            if step.parent is None:
                self._drop_root_if_unused(step)
            step = step.parent

    def seal(self, node: Node) -> None:
        """Let whatever follows be a node of its own: somebody remembers this one as an end."""
        node.sealed = True

    def supersede(self, old: Node, new: Node) -> int:
        """Give up the end of the path to `old`: what the path to `new` has not, and nothing else follows on.

        Only its place in the eviction order changes. Returns how many blocks that are.
        """
        kept: set[Node] = set()
        step: Node | None = new
        while step is not None:
            kept.add(step)
            step = step.parent
        num_blocks, above = 0, old
        # An evicted node has no blocks; above it, a node is needed by the children it has left.
        while above.parent is not None and above not in kept and above.lock_count == 0:
            if any(not child.superseded for child in above.children.values()):
                break
            if above.block_ids:
                above.superseded = True
                num_blocks += len(above.block_ids)
                if above.queue_seq:
                    self._unqueue(above)
                    self._queue_if_evictable(above)
            above = above.parent
        return num_blocks

    def num_unlocked_blocks(self, node: Node) -> int:
        """Blocks on the path to `node` that locking it would take from `num_evictable`."""
        count = 0
        step: Node | None = node
        while step is not None and step.lock_count == 0:
            count += len(step.block_ids)
            step = step.parent
        return count

    def evict(self, num_blocks: int) -> list[int]:
        """Remove `num_blocks` blocks, lowest rank first and from the end of edges. O(log n) per leaf."""
        assert num_blocks <= self._num_evictable, f"{num_blocks} of {self._num_evictable} evictable blocks"
        freed: list[int] = []
        while len(freed) < num_blocks:
            _, seq, node = heapq.heappop(self._queue)
            if node.queue_seq == seq:
                node.queue_seq = 0
                self._num_queued -= 1
                freed += self._trim(node, num_blocks - len(freed))
        return freed

    def discard(self, node: Node, num_blocks: int) -> list[int]:
        """Remove the last `num_blocks` blocks of the path to `node`, except what others hold or follow on."""
        freed: list[int] = []
        while len(freed) < num_blocks and node.parent and not node.children and node.lock_count == 0:
            parent = node.parent
            self._unqueue(node)
            freed += self._trim(node, num_blocks - len(freed))
            node = parent
        return freed

    def content_keys(self, node: Node) -> list[bytes]:
        """The content keys of the node's blocks, computed now if nobody asked before."""
        path: list[Node] = []
        step = node
        while step.parent is not None:
            path.append(step)
            step = step.parent
        parent_key = step.keys[0]
        for step in reversed(path):
            for index in range(len(step.keys), len(step.block_ids)):
                block_bytes = step.token_bytes[index * self._block_bytes : (index + 1) * self._block_bytes]
                step.keys.append(block_key(step.keys[-1] if step.keys else parent_key, bytes(block_bytes)))
            parent_key = step.keys[-1]
        return list(node.keys)

    def nodes(self) -> Iterator[Node]:
        """Every node, roots first."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check(self) -> None:
        """Assert the invariants. Tests call this after every operation."""
        nodes = list(self.nodes())
        block_ids = [block_id for node in nodes for block_id in node.block_ids]
        assert len(block_ids) == len(set(block_ids)) == self._num_blocks
        unlocked = sum(len(node.block_ids) for node in nodes if node.lock_count == 0)
        assert unlocked == self._num_evictable, f"{unlocked} blocks are unlocked, not {self._num_evictable}"
        for node in nodes:
            self._check_node(node)
        live = [node for _, seq, node in self._queue if node.queue_seq == seq]
        assert len(live) == self._num_queued
        assert {id(node) for node in live} == {id(node) for node in nodes if _is_evictable(node)}
        assert len(self._queue) <= 2 * self._num_queued + 64, "stale entries pile up in the eviction queue"

    def _check_node(self, node: Node) -> None:
        assert len(node.token_bytes) == len(node.block_ids) * self._block_bytes
        assert not (node.superseded and node.lock_count), "a node in use is superseded"
        assert node.lock_count >= sum(child.lock_count for child in node.children.values())
        assert (node.parent is None) == (not node.block_ids), "only a root has an empty edge"
        assert node.parent or node.children or node.lock_count, "an unused root is kept"
        assert node.parent or self._roots[node.namespace] is node
        assert len(node.keys) <= max(1, len(node.block_ids))
        assert node.order == sorted(node.children), "the order of sisters is not that of the children"
        for first_block, child in node.children.items():
            assert child.parent is node
            assert child.token_bytes[: self._block_bytes] == first_block
            assert child.last_used <= node.last_used, "a node was used and its parent was not"

    def _root(self, namespace: bytes) -> Node:
        """A namespace's root. A new one enters the tree when it is first locked or extended."""
        root = self._roots.get(namespace)
        if root is None:
            root = Node(None, bytearray(), [], namespace=namespace)
            root.keys = [root_key(namespace)]
        return root

    def _keep_root(self, root: Node) -> None:
        kept = self._roots.setdefault(root.namespace, root)
        assert kept is root, "a root was looked up, and another one of its namespace kept meanwhile"

    def _drop_root_if_unused(self, root: Node) -> None:
        if not root.children and root.lock_count == 0:
            self._roots.pop(root.namespace, None)

    def _num_common_blocks(self, child: Node, wanted: bytes, offset: int) -> int:
        """How many blocks of `child`'s edge stand in `wanted` at `offset`; the first is known to."""
        edge = child.token_bytes
        if wanted.startswith(edge, offset):
            return len(child.block_ids)
        size = self._block_bytes
        low, high = 1, min(len(child.block_ids), (len(wanted) - offset) // size)
        while low < high:  # the first `low` blocks are equal, and no more than `high` are
            middle = (low + high + 1) // 2
            if wanted[offset + low * size : offset + middle * size] == edge[low * size : middle * size]:
                low = middle
            else:
                high = middle - 1
        return low

    def _split(self, node: Node, num_blocks: int) -> Node:
        """Give the first blocks of an edge to a new node above; whoever held `node` still does."""
        parent = node.parent
        assert parent is not None
        assert 0 < num_blocks < len(node.block_ids)
        cut = num_blocks * self._block_bytes
        upper = Node(parent, node.token_bytes[:cut], node.block_ids[:num_blocks])
        upper.keys = node.keys[:num_blocks]
        upper.lock_count = node.lock_count
        upper.last_used = node.last_used
        upper.superseded = node.superseded
        parent.adopt(upper)
        node.token_bytes = node.token_bytes[cut:]
        node.block_ids = node.block_ids[num_blocks:]
        node.keys = node.keys[num_blocks:]
        upper.adopt(node)
        return upper

    def _append(self, node: Node, token_bytes: bytes, block_ids: Sequence[int], *, may_grow: bool) -> Node:
        """Put new blocks below `node`, or at the end of its edge where nobody could tell the difference."""
        self._num_blocks += len(block_ids)
        if may_grow and node.parent and not (node.children or node.sealed) and node.lock_count <= 1:
            node.token_bytes += token_bytes
            node.block_ids += block_ids
            if node.lock_count == 0:
                self._num_evictable += len(block_ids)
            return node
        if node.parent is None:
            self._keep_root(node)
        self._unqueue(node)
        child = Node(node, bytearray(token_bytes), list(block_ids))
        child.last_used = node.last_used
        node.adopt(child)
        self._num_evictable += len(block_ids)
        self._queue_if_evictable(child)
        return child

    def _trim(self, node: Node, max_blocks: int) -> list[int]:
        """Remove up to `max_blocks` blocks from the end of an evictable edge that is not queued."""
        assert node.parent is not None
        count = min(max_blocks, len(node.block_ids))
        keep = len(node.block_ids) - count
        freed = node.block_ids[keep:]
        self._num_blocks -= count
        self._num_evictable -= count
        if keep:
            del node.block_ids[keep:], node.token_bytes[keep * self._block_bytes :], node.keys[keep:]
            self._queue_if_evictable(node)
        else:
            node.parent.disown(bytes(node.token_bytes[: self._block_bytes]))
            self._queue_if_evictable(node.parent)
            if node.parent.parent is None:
                self._drop_root_if_unused(node.parent)
            node.block_ids, node.token_bytes = [], bytearray()  # whoever remembers it can tell
        freed.reverse()
        return freed

    def _queue_if_evictable(self, node: Node) -> None:
        if not _is_evictable(node):
            return
        self._last_seq += 1
        node.queue_seq = self._last_seq
        self._num_queued += 1
        heapq.heappush(self._queue, (self._retention.rank(node, now=self._now), node.queue_seq, node))

    def _unqueue(self, node: Node) -> None:
        """Make the node's entry stale; clear stale entries away before they outnumber the others."""
        if node.queue_seq == 0:
            return
        node.queue_seq = 0
        self._num_queued -= 1
        if len(self._queue) > 2 * self._num_queued + 64:
            self._queue = [entry for entry in self._queue if entry[2].queue_seq == entry[1]]
            heapq.heapify(self._queue)


def _is_evictable(node: Node) -> bool:
    """An unlocked leaf; roots hold nothing to evict."""
    return node.parent is not None and node.lock_count == 0 and not node.children
