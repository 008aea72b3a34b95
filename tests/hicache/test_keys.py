"""Keys are the same everywhere, chained, and apart wherever a page's bytes could differ."""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from devipc.errors import DevIPCError, UsageError, WireError
from devipc.hicache import keys as keys_module
from devipc.hicache.keys import KEY_NBYTES, SELF_TEST_KEY, Namespace, page_keys, self_test
from devipc.hicache.layout import Component, Plane, PoolChunk, PoolLayout, Rule
from devipc.types import HandleKind

SPACE = Namespace("model", "revision", "dtype", b"layout", 4, 1, 2, ("kv", "side"), b"salt")
TOKENS = [0, 1, 2**31, 2**40, -1, 5, 6, 7, 8]


def by_hand(parent: bytes, tokens: list[int]) -> bytes:
    return hashlib.blake2b(
        parent + struct.pack(f"<{len(tokens)}q", *tokens), digest_size=16, person=b"devipc-page"
    ).digest()


def test_the_self_test_key_can_be_computed_by_hand() -> None:
    def field(value: bytes) -> bytes:
        return struct.pack("<I", len(value)) + value

    layout = hashlib.blake2b(b"layout", digest_size=16).digest()
    encoded = struct.pack("<H", 1) + field(b"model") + field(b"revision") + field(b"dtype") + layout
    encoded += struct.pack("<IIII", 4, 1, 2, 2) + field(b"kv") + field(b"side") + field(b"salt")
    assert SPACE.encode() == encoded
    root = hashlib.blake2b(encoded, digest_size=16, person=b"devipc-names").digest()
    assert SPACE.digest() == root
    first = by_hand(root, TOKENS[:4])
    assert by_hand(first, TOKENS[4:8]) == SELF_TEST_KEY
    assert page_keys(TOKENS, page_tokens=4, parent=root).tobytes() == first + SELF_TEST_KEY
    self_test()


def test_a_wrong_key_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys_module, "SELF_TEST_KEY", bytes(16))
    with pytest.raises(DevIPCError) as caught:
        self_test()
    assert caught.value.code == "self_test"


@pytest.mark.parametrize("seed", ["0", "4242"])
def test_keys_do_not_depend_on_the_hash_seed(seed: str) -> None:
    code = (
        "from devipc.hicache.keys import Namespace, page_keys;"
        "print(hash('model') % 1000, page_keys(range(64), page_tokens=4,"
        " parent=Namespace('m', 'r', 'd', b'l', 4).digest())[-1].tobytes().hex())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
    )
    here = page_keys(range(64), page_tokens=4, parent=Namespace("m", "r", "d", b"l", 4).digest())[-1].tobytes()
    assert done.stdout.split()[1] == here.hex()


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40), st.integers(1, 5))
def test_keys_are_chained_and_can_be_continued(tokens: list[int], page_tokens: int) -> None:
    root = SPACE.digest()
    keys = page_keys(np.array(tokens, np.int64), page_tokens=page_tokens, parent=root)
    assert keys.shape == (len(tokens) // page_tokens, KEY_NBYTES)
    parent = root
    for page, key in enumerate(keys):
        part = tokens[page * page_tokens : (page + 1) * page_tokens]
        assert key.tobytes() == by_hand(parent, part)
        assert np.array_equal(page_keys(np.array(part, np.int64), page_tokens=page_tokens, parent=parent), [key])
        parent = key.tobytes()


def test_integer_types_make_no_difference() -> None:
    root = SPACE.digest()
    expected = page_keys(range(8), page_tokens=4, parent=root)
    for dtype in (np.int8, np.uint16, np.int32, np.uint32, np.uint64, ">i4"):
        assert np.array_equal(page_keys(np.arange(8, dtype=dtype), page_tokens=4, parent=root), expected)
    assert np.array_equal(page_keys(np.arange(16)[::2] // 2, page_tokens=4, parent=root), expected)


def test_every_part_of_a_namespace_matters() -> None:
    changes: list[dict[str, object]] = [
        {"model": "other"},
        {"model": "modelr", "revision": "evision"},
        {"revision": "other"},
        {"dtype": "other"},
        {"layout": b"other"},
        {"page_tokens": 8},
        {"rank": 0},
        {"ranks": 4},
        {"pools": ("kv",)},
        {"pools": ("kvside",)},
        {"salt": b""},
    ]
    digests = {replace(SPACE, **change).digest() for change in changes}  # type: ignore[arg-type]
    assert len(digests | {SPACE.digest()}) == len(changes) + 1


def test_another_version_is_another_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    before = SPACE.digest()
    monkeypatch.setattr(keys_module, "KEY_VERSION", 2)
    assert SPACE.digest() != before


def test_pools_at_other_places_share_pages() -> None:
    def pool(offset: int, pages: int) -> PoolLayout:
        planes = (Plane(0, 0, offset, 8, 8, 32),)
        component = Component("kv", Rule.FULL_ATTENTION, 4, 4, planes)
        return PoolLayout(pages, (PoolChunk(4096, HandleKind.LEGACY),), (component,))

    spaces = {Namespace.of(made, model="m", revision="r", dtype="d").digest() for made in (pool(0, 4), pool(64, 8))}
    assert len(spaces) == 1


@pytest.mark.parametrize(
    ("tokens", "page_tokens", "parent"),
    [([1], 0, bytes(16)), ([1], 1, bytes(15)), ([[1]], 1, bytes(16)), ([1.5], 1, bytes(16)), ([True], 1, bytes(16))],
)
def test_what_is_no_list_of_tokens_is_refused(tokens: list[object], page_tokens: int, parent: bytes) -> None:
    with pytest.raises(UsageError):
        page_keys(np.array(tokens), page_tokens=page_tokens, parent=parent)


def test_limits() -> None:
    with pytest.raises(UsageError):
        page_keys(np.array([2**63], np.uint64), page_tokens=1, parent=bytes(16))
    with pytest.raises(UsageError):
        replace(SPACE, rank=2).digest()
    with pytest.raises(WireError):
        replace(SPACE, model="m" * 5000).digest()
