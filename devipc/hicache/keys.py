"""Names of pages: 16 bytes that stand for a page's tokens, all tokens before it, and what its bytes mean.

Owns the canonical encoding of a namespace and the chain of digests. It knows nothing of where a page is kept.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from devipc.errors import DevIPCError, UsageError
from devipc.hicache.layout import PoolLayout
from devipc.wire import Writer

__all__ = ["KEY_NBYTES", "KEY_VERSION", "SELF_TEST_KEY", "Namespace", "page_keys", "self_test"]

KEY_NBYTES = 16
"""Bytes of a page key and of a namespace digest."""

KEY_VERSION = 1
"""Version of both encodings; another one gives other keys, so that pages of both never mix."""

SELF_TEST_KEY = bytes.fromhex("615442afac0df16bd00fb59befb9159d")
"""Key of the second of the two pages that :func:`self_test` makes."""

_NAMESPACE_TAG = b"devipc-names"
_PAGE_TAG = b"devipc-page"
_MAX_TEXT_NBYTES = 4096
_MAX_POOLS = 64
_TOKEN = np.dtype("<i8")

Keys = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything beside tokens that decides a page's bytes. Pages of unequal namespaces are never taken for another.

    Parameters
    ----------
    model, revision : str
        Which weights.
    dtype : str
        Element type and any scaling of the cache.
    layout : bytes
        :meth:`PoolLayout.content_bytes`: what stands where inside a page.
    page_tokens : int
        Tokens in a page.
    rank, ranks : int
        Which share of the model, of how many. Where all ranks hold equal bytes, 0 of 1 lets them share pages.
    pools : tuple of str
        All pools that a page is a bundle of, in order.
    salt : bytes
        Set by a tenant that shares with nobody else.
    """

    model: str
    revision: str
    dtype: str
    layout: bytes
    page_tokens: int
    rank: int = 0
    ranks: int = 1
    pools: tuple[str, ...] = ("kv",)
    salt: bytes = b""

    @classmethod
    def of(
        cls, layout: PoolLayout, *, model: str, revision: str, dtype: str, rank: int = 0, ranks: int = 1
    ) -> Namespace:
        """Make the namespace of one pool, named by its components."""
        pools = tuple(component.name for component in layout.components)
        return cls(model, revision, dtype, layout.content_bytes(), layout.page_tokens, rank, ranks, pools)

    def encode(self) -> bytes:
        """Return the canonical bytes: fixed order, every field with its length."""
        if not 0 <= self.rank < self.ranks or len(self.pools) > _MAX_POOLS:
            raise UsageError(
                f"rank {self.rank} of {self.ranks}, {len(self.pools)} pools", remedy="correct the namespace"
            )
        writer = Writer().u16(KEY_VERSION)
        for text in (self.model, self.revision, self.dtype):
            writer.text(text, limit=_MAX_TEXT_NBYTES)
        layout = hashlib.blake2b(self.layout, digest_size=KEY_NBYTES).digest()
        writer.raw(layout, KEY_NBYTES).u32(self.page_tokens).u32(self.rank).u32(self.ranks).u32(len(self.pools))
        for pool in self.pools:
            writer.text(pool, limit=_MAX_TEXT_NBYTES)
        return writer.blob(self.salt, limit=_MAX_TEXT_NBYTES).done()

    def digest(self) -> bytes:
        """Return 16 bytes that stand for the namespace: the parent of every first page."""
        return hashlib.blake2b(self.encode(), digest_size=KEY_NBYTES, person=_NAMESPACE_TAG).digest()


def page_keys(tokens: npt.ArrayLike, *, page_tokens: int, parent: bytes) -> Keys:
    """Return the keys of all full pages of ``tokens``; a rest that fills no page has none.

    The key of a page is a digest of its parent's key and its tokens, each as 64 bits, little-endian. It is the same in
    every process and on every machine. Costs about a microsecond a page.

    Parameters
    ----------
    tokens : array of integers
        Token ids, ``(n,)``.
    page_tokens : int
        Tokens in a page.
    parent : bytes
        Key of the page before, or :meth:`Namespace.digest` for the first page.

    Returns
    -------
    numpy.ndarray
        uint8 ``(pages, 16)``, owned by the caller.
    """
    ids = np.asarray(tokens)
    if page_tokens < 1 or len(parent) != KEY_NBYTES or ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
        raise UsageError(
            f"tokens {ids.dtype} of shape {ids.shape} in pages of {page_tokens}, parent of {len(parent)} bytes",
            code="shape",
            remedy="pass integers of one dimension, and a key or a namespace digest as parent",
        )
    if ids.dtype == np.uint64 and len(ids) and int(ids.max()) >= 2**63:
        raise UsageError("token id beyond 63 bits", code="range", remedy="pass the tokenizer's ids")
    count = len(ids) // page_tokens
    raw = memoryview(np.ascontiguousarray(ids[: count * page_tokens], _TOKEN).tobytes())
    step, keys = page_tokens * _TOKEN.itemsize, []
    for start in range(0, len(raw), step):
        state = hashlib.blake2b(parent, digest_size=KEY_NBYTES, person=_PAGE_TAG)
        state.update(raw[start : start + step])
        parent = state.digest()
        keys.append(parent)
    return np.frombuffer(bytearray().join(keys), np.uint8).reshape(count, KEY_NBYTES)


def self_test() -> None:
    """Check that this process makes the keys that all others make.

    Raises
    ------
    DevIPCError
        When it does not: its pages would never be found, or worse.
    """
    namespace = Namespace("model", "revision", "dtype", b"layout", 4, 1, 2, ("kv", "side"), b"salt")
    keys = page_keys([0, 1, 2**31, 2**40, -1, 5, 6, 7, 8], page_tokens=4, parent=namespace.digest())
    if keys[-1].tobytes() != SELF_TEST_KEY or len(keys) != 2:
        raise DevIPCError(
            f"page keys are computed wrongly: {keys[-1].tobytes().hex()}",
            code="self_test",
            remedy="check the installation's hashlib and numpy",
        )
