"""One index and one reader of it, and a look at a single key."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from devipc.hicache.index import IndexReader, IndexWriter


@pytest.fixture
def writer() -> Iterator[IndexWriter]:
    with IndexWriter(max_entries=1000) as writer:
        yield writer


@pytest.fixture
def reader(writer: IndexWriter) -> Iterator[IndexReader]:
    with IndexReader(writer.fileno(), epoch=writer.epoch) as reader:
        yield reader
