"""The prefix tree of a scheduler: which prompts' pages a runtime still has.

Owns the search, splits, locks and the order of eviction. A node holds the keys of some pages and the extent that stands
for them; both are identifiers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from devipc.errors import UsageError
from devipc.hicache.reference.handles import CacheExtentRef

__all__ = ["Node", "PrefixTree"]


class Node:
    """Some pages, behind those of all nodes above. ``keys`` and ``extent`` have the same length."""

    __slots__ = ("children", "extent", "keys", "locks", "parent", "used")

    def __init__(self, keys: list[bytes], extent: CacheExtentRef | None, parent: Node | None) -> None:
        self.keys = keys
        self.extent = extent
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.locks = 0
        self.used = 0

    def path(self) -> Iterator[Node]:
        """Yield this node and those above it, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


class PrefixTree:
    """See the module. One thread."""

    def __init__(self) -> None:
        self._root = Node([], None, None)
        self._clock = 0

    def __len__(self) -> int:
        """Pages in the tree."""
        return sum(len(node.keys) for node in self._nodes())

    def match(self, keys: list[bytes]) -> tuple[Node, int]:
        """Return the node that ends the longest prefix of ``keys`` here, and its length in pages.

        The node is split where the prefix ends inside of it.
        """
        self._clock += 1
        node, done = self._below(self._root, keys)
        for one in node.path():
            one.used = self._clock
        return node, done

    def insert(self, keys: list[bytes], extent: CacheExtentRef, *, behind: Node) -> tuple[Node, CacheExtentRef | None]:
        """Add pages behind a node; return the node that ends them, and the part of the extent that was there already.

        The caller releases what was there: the tree keeps one extent for a page.
        """
        if len(keys) != extent.page_count:
            raise UsageError(f"{len(keys)} keys for {extent.page_count} pages")
        node, done = self._below(behind, keys)
        if done == len(keys):
            return node, extent
        double, rest = extent.split(done) if done else (None, extent)
        child = Node(keys[done:], rest, node)
        child.used = self._clock
        node.children[keys[done]] = child
        return child, double

    def _below(self, node: Node, keys: list[bytes]) -> tuple[Node, int]:
        done = 0
        while done < len(keys) and (child := node.children.get(keys[done])) is not None:
            common = sum(1 for _ in _common(child.keys, keys[done:]))
            if common < len(child.keys):
                child = self._split(child, common)
            node, done = child, done + common
        return node, done

    def _split(self, node: Node, at: int) -> Node:
        """Make the first ``at`` pages of a node a node of their own, above the rest; return it."""
        assert node.extent is not None
        assert node.parent is not None
        head_extent, node.extent = node.extent.split(at)
        head = Node(node.keys[:at], head_extent, node.parent)
        head.locks, head.used = node.locks, node.used
        node.keys = node.keys[at:]
        node.parent.children[head.keys[0]] = head
        head.children[node.keys[0]] = node
        node.parent = head
        return head

    def extents(self, node: Node) -> tuple[CacheExtentRef, ...]:
        """Return the extents of a prefix, in order."""
        return tuple(one.extent for one in reversed(list(node.path())) if one.extent is not None)

    def lock(self, node: Node) -> None:
        """Keep a prefix from being evicted."""
        for one in node.path():
            one.locks += 1

    def unlock(self, node: Node) -> None:
        """Undo one :meth:`lock`."""
        for one in node.path():
            one.locks -= 1

    def evict(self, pages: int, *, before: Callable[[Node], None] = lambda _node: None) -> list[CacheExtentRef]:
        """Take the least recently used leaves out until they hold ``pages`` pages; return their extents.

        Fewer when the rest is locked. ``before`` sees each node while it is still in the tree.
        """
        found: list[CacheExtentRef] = []
        freed = 0
        while freed < pages:
            leaves = [node for node in self._nodes() if not node.children and not node.locks]
            if not leaves:
                break
            victim = min(leaves, key=lambda node: node.used)
            before(victim)
            assert victim.extent is not None
            assert victim.parent is not None
            del victim.parent.children[victim.keys[0]]
            found.append(victim.extent)
            freed += len(victim.keys)
        return found

    def clear(self) -> None:
        """Forget everything: the runtime is gone."""
        self._root = Node([], None, None)

    def keys_to(self, node: Node) -> list[bytes]:
        """Return the keys from the first page to the last of ``node``."""
        return [key for one in reversed(list(node.path())) for key in one.keys]

    def _nodes(self) -> Iterator[Node]:
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


def _common(first: list[bytes], second: list[bytes]) -> Iterator[bytes]:
    for mine, theirs in zip(first, second, strict=False):
        if mine != theirs:
            return
        yield mine
