"""One index and one reader of it; what outlasts a single test on purpose: this process's sign of life, trials."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import pytest

from devipc.channel.liveness import own_life
from devipc.hicache.tier.index import IndexReader, IndexWriter


@pytest.fixture(scope="session", autouse=True)
def _lasting() -> None:
    os.environ.setdefault("DEVIPC_TRIAL_CACHE", tempfile.mkdtemp(prefix="trials"))
    own_life()


@pytest.fixture
def writer() -> Iterator[IndexWriter]:
    with IndexWriter(max_entries=1000) as writer:
        yield writer


@pytest.fixture
def reader(writer: IndexWriter) -> Iterator[IndexReader]:
    with IndexReader(writer.fileno(), epoch=writer.epoch) as reader:
        yield reader
