"""The index finds what is published, outlives nobody, and takes no memory that is not its own."""

from __future__ import annotations

import mmap
import os

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from devipc.errors import CapabilityError, ClosedError, HandleError, UsageError
from devipc.hicache.tier import indexwords
from devipc.hicache.tier.index import IndexReader, IndexWriter
from devipc.memfd import SharedMap, create_memfd, create_published_memfd
from tests.hicache.index_peer import all_keys


def array(*keys: bytes) -> npt.NDArray[np.uint8]:
    return np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), 16)


def look(reader: IndexReader, key: bytes) -> int | None:
    found = reader.find(array(key))
    return int(found.value[0]) if found.hit[0] else None


KEY = b"0123456789abcdef"


def test_publish_find_evict(writer: IndexWriter, reader: IndexReader) -> None:
    assert look(reader, KEY) is None
    assert writer.publish(KEY, 7)
    assert look(reader, KEY) == 7
    assert writer.publish(KEY, 2**64 - 1)
    assert look(reader, KEY) == 2**64 - 1
    assert len(writer) == 1
    assert writer.evict(KEY)
    assert look(reader, KEY) is None
    assert not writer.evict(KEY)
    assert reader.find(np.empty((0, 16), np.uint8)).hit.shape == (0,)


def test_match_counts_the_prefix(writer: IndexWriter, reader: IndexReader) -> None:
    keys = all_keys()[:20]
    for key in (*keys[:7], *keys[8:]):
        writer.publish(key.tobytes(), 1)
    assert reader.match(keys) == 7
    assert reader.match(keys[:5]) == 5
    assert reader.match(keys[7:]) == 0
    assert reader.match(keys[::2]) == 10
    assert reader.match(keys[:0]) == 0


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3)), max_size=120), st.integers(1, 24))
def test_the_index_is_a_dictionary(steps: list[tuple[int, int]], room: int) -> None:
    """Small keys: all first halves are below the table's size, many are equal or zero, and buckets overflow."""
    keys = [(i % 7).to_bytes(8, "little") + (i // 7).to_bytes(8, "little") for i in range(41)]
    model: dict[bytes, int] = {}
    with IndexWriter(max_entries=room) as writer, IndexReader(writer.fileno(), epoch=writer.epoch) as reader:
        for number, action in steps:
            key = keys[number]
            if action:
                if writer.publish(key, number * action):
                    model[key] = number * action
                else:
                    assert key not in model
            else:
                assert writer.evict(key) == (model.pop(key, None) is not None)
        assert len(writer) == len(model) <= room
        found = reader.find(array(*keys))
        for key, hit, value in zip(keys, found.hit.tolist(), found.value.tolist(), strict=True):
            # Keys that share a first half may hide each other, which a digest's do not do: a miss, never a wrong hit.
            assert not hit or model.get(key) == value
        apart = [key for key in model if sum(other[:8] == key[:8] for other in model) == 1 and any(key[:8])]
        assert all(look(reader, key) == model[key] for key in apart)


def test_a_full_index_takes_half_of_its_places_and_says_no() -> None:
    keys = np.random.default_rng(5).integers(0, 256, (4097, 16), np.uint8)
    with IndexWriter(max_entries=4096) as writer, IndexReader(writer.fileno(), epoch=writer.epoch) as reader:
        assert sum(writer.publish(key.tobytes(), i) for i, key in enumerate(keys)) == 4096
        assert os.fstat(writer.fileno()).st_size >= 4096 * 2 * 32
        found = reader.find(keys)
        assert found.hit[:4096].all()
        assert np.array_equal(found.value[:4096], np.arange(4096))
        assert not found.hit[4096]
        assert writer.publish(keys[0].tobytes(), 9)  # what is there may be replaced
        assert writer.evict(keys[1].tobytes())
        assert writer.publish(keys[4096].tobytes(), 1)


@pytest.mark.parametrize("line", range(4))
@pytest.mark.parametrize("bit", [0, 31, 32, 63])
def test_a_flipped_bit_is_a_miss(writer: IndexWriter, reader: IndexReader, line: int, bit: int) -> None:
    writer.publish(KEY, 5)
    place = writer._places[KEY] + 8 * line
    writer._words[place] ^= 1 << bit
    assert look(reader, KEY) is None
    writer._words[place] ^= 1 << bit
    assert look(reader, KEY) == 5


# --- lives ------------------------------------------------------------------------------------------------------------


def test_another_epoch_is_all_misses(writer: IndexWriter, reader: IndexReader) -> None:
    writer.publish(KEY, 1)
    for epoch in (0, writer.epoch ^ 2):
        with IndexReader(writer.fileno(), epoch=epoch) as other:
            assert look(other, KEY) is None
    assert look(reader, KEY) == 1
    reader.expire()
    assert look(reader, KEY) is None


def test_a_closed_index_is_all_misses_and_refuses_to_be_written(writer: IndexWriter, reader: IndexReader) -> None:
    writer.publish(KEY, 1)
    writer.close()
    writer.close()
    assert look(reader, KEY) is None
    for call in (lambda: writer.publish(KEY, 1), lambda: writer.evict(KEY), writer.fileno):
        with pytest.raises(ClosedError):
            call()
    reader.close()
    reader.close()
    assert look(reader, KEY) is None


def test_two_lives_never_have_one_epoch() -> None:
    with IndexWriter(max_entries=1) as one, IndexWriter(max_entries=1) as two:
        assert 0 < one.epoch != two.epoch > 0


# --- hostile or foreign memory ----------------------------------------------------------------------------------------


def test_nobody_else_can_write_or_resize(writer: IndexWriter) -> None:
    fd = writer.fileno()
    assert not os.get_inheritable(fd)
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    try:
        for target in (fd, again):
            with pytest.raises(PermissionError):
                os.pwrite(target, b"x", 0)
            with pytest.raises(PermissionError):
                os.ftruncate(target, 0)
            with pytest.raises(PermissionError):
                mmap.mmap(target, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            with pytest.raises(HandleError):
                SharedMap(target, 4096)
    finally:
        os.close(again)
    assert writer.publish(KEY, 1)


def test_a_kernel_that_cannot_seal_against_writers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("devipc.memfd.F_SEAL_FUTURE_WRITE", 1 << 30)  # a seal that no kernel knows
    with pytest.raises(CapabilityError) as caught:
        IndexWriter(max_entries=1)
    assert caught.value.code == "future_write"


def test_memory_that_is_no_index_is_refused() -> None:
    fd, mapping = create_published_memfd("test", 8 * (512 + 32))
    header = mapping.view.cast("Q")
    try:
        magic, version = indexwords.MAGIC, indexwords.INDEX_VERSION
        for words in ([0, 0, 0, 0], [magic, version - 1, 1, 1], [magic, version + 1, 1, 1], [magic, version, 1, 2]):
            for at, word in enumerate(words):
                header[at] = word
            with pytest.raises(HandleError) as caught:
                IndexReader(fd, epoch=1)
            assert caught.value.code == "index"
        header[3] = 1
        IndexReader(fd, epoch=1).close()
    finally:
        header.release()
        mapping.close()
        os.close(fd)


def test_short_or_unsealed_memory_is_refused() -> None:
    fd = create_memfd("test", 4096)
    loose = os.memfd_create("test", os.MFD_CLOEXEC)
    try:
        os.ftruncate(loose, 1 << 20)
        for bad, code in ((fd, "too_small"), (loose, "unsealed")):
            with pytest.raises(HandleError) as caught:
                IndexReader(bad, epoch=1)
            assert caught.value.code == code
    finally:
        os.close(fd)
        os.close(loose)


def test_wrong_arguments_are_refused(writer: IndexWriter, reader: IndexReader, monkeypatch: pytest.MonkeyPatch) -> None:
    for call in (
        lambda: writer.publish(b"short", 1),
        lambda: writer.publish(KEY, -1),
        lambda: writer.publish(KEY, 2**64),
        lambda: IndexWriter(max_entries=0),
        lambda: reader.find(np.zeros((1, 15), np.uint8)),
        lambda: reader.find(np.zeros((1, 16), np.int8)),
    ):
        with pytest.raises(UsageError):
            call()
    monkeypatch.setattr("platform.machine", lambda: "other")
    with pytest.raises(CapabilityError):
        IndexWriter(max_entries=1)
    with pytest.raises(CapabilityError):
        IndexReader(writer.fileno(), epoch=1)


def test_many_keys_are_published_at_once_with_values_that_count_up(writer: IndexWriter, reader: IndexReader) -> None:
    keys = [bytes([number] * 16) for number in range(1, 40)]
    assert writer.publish_all(keys[:20], 7) == 20
    assert writer.publish_all([*keys[10:], keys[0], keys[0]], 100) == 31
    found = reader.find(np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 16))
    expected = [*range(7, 17), *range(100, 129)]
    expected[0] = 130
    assert found.hit.all()
    assert found.value.tolist() == expected
    assert writer.publish_all([], 1) == 0
    with pytest.raises(UsageError):
        writer.publish_all(keys[:2], 2**64 - 1)
    assert look(reader, keys[1]) == 8
    for some in (keys[:5], keys):
        assert writer.publish_all(some, 2**64 - 1, step=0) == len(some)
        assert {look(reader, key) for key in some} == {2**64 - 1}
    with IndexWriter(max_entries=5) as small:
        assert small.publish_all(keys, 1) == 5
