"""The prefix tree beside a plain dictionary of prefixes."""

from __future__ import annotations

import random

import pytest

from devipc.errors import UsageError
from devipc.hicache.reference.handles import CacheExtentRef, PageRun
from devipc.hicache.reference.prefixtree import PrefixTree


def extent(pages: list[int]) -> CacheExtentRef:
    return CacheExtentRef.of("r", 1, pages)


def keys(text: str) -> list[bytes]:
    """Keys as pages have them: each stands for everything before it, too."""
    return [text[: end + 1].encode() for end in range(len(text))]


def test_extents_are_the_longest_runs_and_split_in_order() -> None:
    whole = extent([4, 5, 6, 9, 10, 2])
    assert whole.page_runs == (PageRun(4, 3), PageRun(9, 2), PageRun(2, 1))
    head, rest = whole.split(4)
    assert (head.pages, rest.pages) == ([4, 5, 6, 9], [10, 2])
    for at in (0, 6):
        with pytest.raises(UsageError):
            whole.split(at)


def test_a_node_is_split_where_prompts_part() -> None:
    tree = PrefixTree()
    root, done = tree.match(keys("abcdef"))
    assert done == 0
    tree.insert(keys("abcdef"), extent([1, 2, 3, 4, 5, 6]), behind=root)
    node, done = tree.match(keys("abcxyz"))
    assert done == 3
    tree.insert(keys("abcxyz")[3:], extent([7, 8, 9]), behind=node)
    assert [one.pages for one in tree.extents(tree.match(keys("abcdefg"))[0])] == [[1, 2, 3], [4, 5, 6]]
    assert [one.pages for one in tree.extents(tree.match(keys("abcxyz"))[0])] == [[1, 2, 3], [7, 8, 9]]
    assert len(tree) == 9


def test_pages_that_are_there_come_back_as_double() -> None:
    tree = PrefixTree()
    root, _ = tree.match([])
    tree.insert(keys("abc"), extent([1, 2, 3]), behind=root)
    _, double = tree.insert(keys("abcde"), extent([11, 12, 13, 14, 15]), behind=root)
    assert double is not None
    assert double.pages == [11, 12, 13]
    _, double = tree.insert(keys("ab"), extent([21, 22]), behind=root)
    assert double is not None
    assert double.pages == [21, 22]
    assert tree.extents(tree.match(keys("abcde"))[0])[-1].pages == [14, 15]


def test_locked_prefixes_stay_and_the_oldest_leaf_goes_first() -> None:
    tree = PrefixTree()
    root, _ = tree.match([])
    for text, first in (("ax", 1), ("ay", 11), ("b", 21)):
        tree.insert(keys(text), extent(list(range(first, first + len(text)))), behind=tree.match([])[0])
    locked, _ = tree.match(keys("ax"))
    tree.lock(locked)
    tree.match(keys("b"))
    gone = [page for one in tree.evict(100) for page in one.pages]
    assert 1 not in gone
    assert 2 not in gone
    assert set(gone) == {12, 21}
    assert gone[0] == 12  # used longest ago
    tree.unlock(locked)
    assert [page for one in tree.evict(1) for page in one.pages] == [2]
    assert tree.match(keys("ax"))[1] == 1
    assert root.children


@pytest.mark.parametrize("seed", range(8))
def test_the_longest_prefix_is_found_whatever_happened_before(seed: int) -> None:
    rng = random.Random(seed)
    tree, page = PrefixTree(), 1
    model: dict[bytes, int] = {}
    locks = []
    for _ in range(300):
        text = "".join(rng.choice("ab") for _ in range(rng.randint(1, 9)))
        wanted = keys(text)
        node, done = tree.match(wanted)
        longest = next((length for length in range(len(wanted), 0, -1) if wanted[length - 1] in model), 0)
        assert done == longest
        assert [one for ext in tree.extents(node) for one in ext.pages] == [model[key] for key in wanted[:done]]
        if done < len(wanted):
            pages = list(range(page, page + len(wanted) - done))
            page += len(pages)
            tree.insert(wanted[done:], extent(pages), behind=node)
            model.update(zip(wanted[done:], pages, strict=True))
        if rng.random() < 0.2:
            tree.lock(node)
            locks.append(node)
        if rng.random() < 0.2 and locks:
            tree.unlock(locks.pop())
        if rng.random() < 0.15:
            gone = {one for ext in tree.evict(rng.randint(1, 6)) for one in ext.pages}
            model = {key: one for key, one in model.items() if one not in gone}
        assert len(tree) == len(model)
