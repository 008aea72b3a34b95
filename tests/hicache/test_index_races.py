"""Readers of the index never return what was not whole and published, whatever the writer does between two loads."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from devipc.hicache.tier import index as index_module
from devipc.hicache.tier.index import ATTEMPTS, IndexReader, IndexWriter
from devipc.memfd import SharedMap, create_memfd
from tests.hicache.index_peer import KEY_COUNT, STOP_AT, all_keys
from tests.hicache.test_index import KEY, look

# --- nothing between two stores, nothing between two loads -----------------------------------------------------------


class Observed:
    """The writer's words, with a look at the index before and after each store."""

    def __init__(self, words: memoryview, look: Callable[[], None]) -> None:
        self.words, self.look, self.stores = words, look, 0

    def __getitem__(self, at: int) -> int:
        value: int = self.words[at]
        return value

    def __setitem__(self, at: int, value: int) -> None:
        self.look()
        self.words[at] = value
        self.stores += 1
        self.look()


def test_between_any_two_stores_there_is_the_old_the_new_or_nothing(writer: IndexWriter, reader: IndexReader) -> None:
    allowed: dict[bytes, set[int | None]] = {}
    other = KEY[::-1]

    def check() -> None:
        for key, values in allowed.items():
            assert look(reader, key) in values

    words = writer._words
    observed: Any = Observed(words, check)
    writer._words = observed
    try:
        allowed = {KEY: {None, 1}, other: {None}}
        writer.publish(KEY, 1)
        allowed = {KEY: {None, 1, 2}, other: {None}}
        writer.publish(KEY, 2)
        allowed = {KEY: {2, None}}
        writer.evict(KEY)
        allowed = {KEY: {None}, other: {None, 3}}
        writer.publish(other, 3)
    finally:
        writer._words = words
    assert observed.stores == 5 + 5 + 2 + 5
    assert look(reader, other) == 3


def test_between_any_two_stores_of_many_entries_each_is_old_new_or_nothing(
    writer: IndexWriter, reader: IndexReader
) -> None:
    keys = all_keys()[:300]
    names = [key.tobytes() for key in keys]
    allowed = np.zeros((len(keys), 2), np.uint64)  # beside nothing

    def check() -> None:
        found = reader.find(keys)
        assert (~found.hit | (found.value[:, None] == allowed).any(axis=1)).all()

    array = writer._array
    observed: Any = Observed(array, check)  # type: ignore[arg-type]
    writer._array = observed
    try:
        allowed[:, 1] = np.arange(1000, 1300)
        assert writer.publish_all(names, 1000) == 300
        allowed = np.stack((allowed[:, 1], np.arange(2000, 2300, dtype=np.uint64)), axis=1)
        assert writer.publish_all(names, 2000) == 300
        allowed[:, 0] = allowed[:, 1]
        assert writer.evict_all(names[:200]) == 200
    finally:
        writer._array = array
    assert observed.stores == 5 + 5 + 2
    found = reader.find(keys)
    assert found.hit.tolist() == [False] * 200 + [True] * 100
    assert found.value[200:].tolist() == list(range(2200, 2300))
    assert writer.publish_all(names, 7) == 300
    assert reader.find(keys).value.tolist() == list(range(7, 307))


class Interrupted:
    """The reader's words, with a step of the writer before the load of one number."""

    def __init__(self, words: npt.NDArray[np.uint64], at: int, act: Callable[[], object]) -> None:
        self.words, self.left, self.act = words, at, act

    def __getitem__(self, at: int) -> Any:
        return self.words[at]

    def take(self, *args: Any, **options: Any) -> Any:
        if self.left == 0:
            self.act()
        self.left -= 1
        return self.words.take(*args, **options)


LOADS = 5


@pytest.mark.parametrize("at", range(LOADS * ATTEMPTS + 1))
@pytest.mark.parametrize("change", ["evict", "replace", "other"])
@pytest.mark.parametrize("guard", ["checksum and version", "version alone"])
def test_between_any_two_loads_the_writer_may_do_anything(
    writer: IndexWriter, reader: IndexReader, monkeypatch: pytest.MonkeyPatch, guard: str, change: str, at: int
) -> None:
    if guard == "version alone":
        monkeypatch.setattr(index_module, "checksums", lambda *_: np.uint64(0))
        monkeypatch.setattr(index_module, "checksum", lambda *_: 0)
    bucket_twin = KEY[:8] + bytes(7) + b"\1"  # the same first half: it will stand where KEY stood
    writer.publish(KEY, 1)

    def act() -> None:
        if change == "replace":
            writer.publish(KEY, 2)
            return
        writer.evict(KEY)
        if change == "other":
            writer.publish(bucket_twin, 3)

    words = reader._words
    interrupted: Any = Interrupted(words, at, act)  # type: ignore[arg-type]
    reader._words = interrupted
    try:
        seen = look(reader, KEY)
    finally:
        reader._words = words
    assert seen in ({1, 2} if change == "replace" else {1, None})
    acted = interrupted.left < 0
    if not acted:
        assert seen == 1
    assert look(reader, KEY) == ((2 if change == "replace" else None) if acted else 1)


def test_an_entry_that_never_rests_is_a_miss(writer: IndexWriter, reader: IndexReader) -> None:
    writer.publish(KEY, 1)
    loads = 0

    class Restless(Interrupted):
        def take(self, *args: Any, **options: Any) -> Any:
            nonlocal loads
            loads += 1
            writer.publish(KEY, loads)
            return self.words.take(*args, **options)

    words = reader._words
    reader._words = Restless(words, 0, lambda: None)  # type: ignore[arg-type, assignment]
    try:
        assert look(reader, KEY) is None
    finally:
        reader._words = words
    assert loads == LOADS * ATTEMPTS
    assert look(reader, KEY) == loads


# --- two processes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("many", [1, 64])
def test_no_torn_and_no_evicted_entry_with_the_writer_at_full_speed(many: int) -> None:
    """The writer publishes, replaces and evicts as fast as it can; another process searches all the time."""
    keys = [key.tobytes() for key in all_keys()]
    progress_fd = create_memfd("progress", 8 * (KEY_COUNT + 1))
    progress = SharedMap(progress_fd, 8 * (KEY_COUNT + 1))
    gone = progress.view.cast("Q")
    room = KEY_COUNT // 4
    with IndexWriter(max_entries=room) as writer:
        command = [sys.executable, "-m", "tests.hicache.index_peer"]
        command += [str(writer.fileno()), str(progress_fd), str(writer.epoch)]
        root = Path(__file__).resolve().parents[2]
        with subprocess.Popen(
            command, pass_fds=(writer.fileno(), progress_fd), stdout=subprocess.PIPE, text=True, cwd=root
        ) as peer:
            try:
                assert peer.stdout is not None
                assert peer.stdout.readline() == "ready\n"
                count, latest = 0, [0] * KEY_COUNT
                end = time.monotonic() + 2.0
                while many > 1 and time.monotonic() < end:
                    for begin in range(0, KEY_COUNT, many):
                        old = (begin - room) % KEY_COUNT
                        if latest[old]:
                            assert writer.evict_all(keys[old : old + many]) == many
                            for number in range(old, old + many):
                                gone[number], latest[number] = latest[number], 0
                        count += 1
                        latest[begin : begin + many] = [count] * many
                        assert writer.publish_all(keys[begin : begin + many], count << 32 | begin) == many
                while time.monotonic() < end:
                    for number in range(KEY_COUNT):
                        old = (number - room) % KEY_COUNT
                        if latest[old]:
                            writer.evict(keys[old])
                            gone[old], latest[old] = latest[old], 0
                        count += 1
                        latest[number] = count
                        assert writer.publish(keys[number], count << 32 | number)
                        if number % 3 == 0:
                            count += 1
                            latest[number] = count
                            assert writer.publish(keys[number], count << 32 | number)
                gone[STOP_AT] = 1
                searches, hits, torn, evicted = map(int, peer.communicate(timeout=30)[0].split())
            finally:
                if peer.poll() is None:
                    peer.kill()
    gone.release()
    progress.close()
    os.close(progress_fd)
    print(f"{count} calls, {searches} searches, {hits} hits")
    assert peer.returncode == 0
    assert (torn, evicted) == (0, 0)
    assert count * many > 10_000
    assert hits > 1_000
