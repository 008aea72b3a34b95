"""Transfers: copies in all their forms, streams and registered memory, inside one process."""
# ruff: noqa: D103 - the demand of a case is its documentation

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest

from devipc.conformance.catalogue import case
from devipc.conformance.rig import Latch, Rig
from devipc.conformance.sharing import allocated
from devipc.conformance.staging import attempt, compare, content, until
from devipc.errors import UsageError
from devipc.types import HandleKind

KIB, MIB = 1 << 10, 1 << 20
AREA = 256 * KIB
TRANSFER = "interfaces/transfer.py: DeviceTransfer"

Write = tuple[int, bytes]


def written(background: bytes, writes: Sequence[Write]) -> bytes:
    """Return the background with some pieces replaced."""
    area = bytearray(background)
    for place, data in writes:
        area[place : place + len(data)] = data
    return bytes(area)


def u64(*values: object) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    return np.ascontiguousarray(np.array(values, dtype=np.uint64))


@case("XFER-201", "A copy of zero bytes does nothing.", clause="interfaces/transfer.py: DeviceTransfer.copy")
def test_nothing(rig: Rig, any_kind: HandleKind) -> None:
    with allocated(rig, AREA, any_kind, seed=201) as area, rig.new_staging(AREA) as source:
        source.view[:] = content(1, AREA)
        rig.transfer.copy(rig.stream, area.ptr + 64, source.ptr, 0)
        rig.transfer.copy_batch(rig.stream, u64(), u64(), u64())
        rig.transfer.copy_strided(rig.stream, np.zeros((0, 6), dtype=np.uint64))
        rig.finish(rig.stream, "copies of nothing")
        rig.expect(area.ptr, AREA, 201, "memory after copies of nothing")


@case(
    "XFER-202",
    "A copy moves exactly its bytes, at any address and length, to, from and inside the device.",
    clause="interfaces/transfer.py: DeviceTransfer.copy",
)
@pytest.mark.parametrize("where", [(1, 0, 1), (4095, 1, 2), (7, 13, 64 * KIB + 1), (0, 0, AREA)])
def test_copy_is_exact(rig: Rig, any_kind: HandleKind, where: tuple[int, int, int]) -> None:
    dst, src, nbytes = where
    with (
        allocated(rig, AREA, any_kind, seed=1) as one,
        allocated(rig, AREA, any_kind, seed=2) as other,
        rig.new_staging(AREA) as host,
    ):
        host.view[:] = content(3, AREA)
        rig.transfer.copy(rig.stream, one.ptr + dst, host.ptr + src, nbytes)
        rig.transfer.copy(rig.stream, other.ptr + src, one.ptr + dst, nbytes)
        rig.finish(rig.stream, "copies")
        moved = content(3, AREA)[src : src + nbytes]
        compare(rig.read(one.ptr, AREA), written(content(1, AREA), [(dst, moved)]), "a copy to the device")
        compare(rig.read(other.ptr, AREA), written(content(2, AREA), [(src, moved)]), "a copy inside the device")
        host.view[:] = content(4, AREA)
        rig.transfer.copy(rig.stream, host.ptr + dst, other.ptr + src, nbytes)
        rig.finish(rig.stream, "a copy from the device")
        compare(bytes(host.view), written(content(4, AREA), [(dst, moved)]), "a copy from the device")


@case(
    "XFER-203",
    "A batch moves each of its ranges exactly, and nothing else.",
    clause="interfaces/transfer.py: DeviceTransfer.copy_batch",
)
def test_batch(rig: Rig, any_kind: HandleKind) -> None:
    ranges = [(0, 5000, 1), (100, 0, 4 * KIB), (64 * KIB + 3, 70_000, 1000), (AREA - 7, 200_001, 7)]
    with allocated(rig, AREA, any_kind, seed=1) as area, rig.new_staging(AREA) as host:
        host.view[:] = content(3, AREA)
        dst, src, nbytes = (u64(*column) for column in zip(*ranges, strict=True))
        rig.transfer.copy_batch(rig.stream, dst + np.uint64(area.ptr), src + np.uint64(host.ptr), nbytes)
        rig.finish(rig.stream, "a batch")
        moved = [(to, content(3, AREA)[start : start + length]) for to, start, length in ranges]
        compare(rig.read(area.ptr, AREA), written(content(1, AREA), moved), "memory after a batch")


@case(
    "XFER-204",
    "The arrays of a batch may be changed as soon as the call has returned.",
    clause="interfaces/transfer.py: DeviceTransfer.copy_batch",
)
def test_batch_is_a_snapshot(rig: Rig, any_kind: HandleKind) -> None:
    step = 4 * KIB
    with allocated(rig, AREA, any_kind, seed=1) as area, rig.new_staging(AREA) as host:
        host.view[:] = content(3, AREA)
        places = np.arange(0, AREA, step, dtype=np.uint64)
        dst, src, nbytes = places + np.uint64(area.ptr), places + np.uint64(host.ptr), np.full_like(places, step)
        rects = u64((area.ptr, host.ptr, 1024, 1024, 16, 4))
        with rig.latch(rig.stream):
            rig.transfer.copy_batch(rig.stream, dst, src, nbytes)
            rig.transfer.copy_strided(rig.stream, rects)
            for array in (dst, src, nbytes, rects):
                array[:] = 0
        compare(rig.read(area.ptr, AREA), content(3, AREA), "memory after a batch whose arrays were changed")


@case(
    "XFER-205",
    "A strided copy moves its rows exactly, whatever the two pitches, and leaves the gaps alone.",
    clause="interfaces/transfer.py: DeviceTransfer.copy_strided",
)
def test_strided(rig: Rig, any_kind: HandleKind) -> None:
    rects = [(0, 0, 512, 300, 300, 40), (40_001, 50_000, 70, 64, 33, 100), (100_000, 100_000, 1000, 1000, 1000, 9)]
    rects.append((150_000, 7, 1, 1, 5000, 1))  # of one row the pitches say nothing
    with allocated(rig, AREA, any_kind, seed=1) as area, rig.new_staging(AREA) as host:
        host.view[:] = content(3, AREA)
        array = np.array(rects, dtype=np.uint64)
        array[:, 0] += np.uint64(area.ptr)
        array[:, 1] += np.uint64(host.ptr)
        rig.transfer.copy_strided(rig.stream, array)
        rig.finish(rig.stream, "strided copies to the device")
        moved: list[Write] = []
        for dst, src, dst_pitch, src_pitch, width, height in rects:
            rows = [(dst + row * dst_pitch, src + row * src_pitch) for row in range(height)]
            moved += [(to, content(3, AREA)[start : start + width]) for to, start in rows]
        compare(rig.read(area.ptr, AREA), written(content(1, AREA), moved), "memory after strided copies")
        host.view[:] = content(4, AREA)
        rig.transfer.copy_strided(rig.stream, u64((host.ptr + 3, area.ptr, 100, 512, 90, 40)))
        rig.finish(rig.stream, "a strided copy from the device")
        back = written(content(1, AREA), moved)
        rows_back = [(3 + row * 100, back[row * 512 : row * 512 + 90]) for row in range(40)]
        compare(bytes(host.view), written(content(4, AREA), rows_back), "host memory after a strided copy")


@case(
    "XFER-206",
    "Arrays of another type, shape or order, and rows that overlap, are refused; the stream works on.",
    clause="interfaces/transfer.py: DeviceTransfer.copy_strided",
)
def test_malformed_arrays(rig: Rig, any_kind: HandleKind) -> None:
    transfer, stream = rig.transfer, rig.stream
    with allocated(rig, AREA, any_kind, seed=1) as area, rig.new_staging(4 * KIB) as host:
        one, to, of = u64(16), u64(area.ptr), u64(host.ptr)
        rect = np.array([[area.ptr, host.ptr, 64, 64, 16, 2]] * 2, dtype=np.uint64)
        overlapping = u64((area.ptr, host.ptr, 8, 64, 16, 2))
        wrong_batches: list[tuple[object, object, object]] = [
            (to, of, u64(16, 16)),
            (u64(area.ptr, area.ptr), of, one),
            (to.astype(np.int64), of, one),
            (to, of, one.astype(np.float64)),
            (to.reshape(1, 1), of, one),
        ]
        for dst, src, nbytes in wrong_batches:
            with pytest.raises(UsageError):
                transfer.copy_batch(stream, dst, src, nbytes)  # type: ignore[arg-type]
        for rects in (rect[:, :5], rect[0], rect.astype(np.int64), rect[:, ::-1], overlapping):
            with pytest.raises(UsageError):
                transfer.copy_strided(stream, rects)  # type: ignore[arg-type]
        rig.expect(area.ptr, AREA, 1, "memory after refused copies")


@case(
    "XFER-207",
    "A borrowed stream is the stream it was borrowed from, and forgetting it leaves that one usable.",
    clause="interfaces/transfer.py: DeviceTransfer.wrap_stream",
)
def test_borrowed_stream(rig: Rig, any_kind: HandleKind) -> None:
    transfer = rig.transfer
    with allocated(rig, 4 * KIB, any_kind, seed=1) as area, rig.new_stream() as stream, rig.new_staging(AREA) as host:
        borrowed = transfer.wrap_stream(stream.handle)
        assert borrowed.handle == stream.handle
        host.view[: 4 * KIB] = content(2, 4 * KIB)
        marker = transfer.create_marker()
        try:
            with rig.latch(stream) as latch:
                transfer.copy(borrowed, area.ptr, host.ptr, 4 * KIB)
                transfer.record(marker, borrowed)
                ran = until(lambda: transfer.query_marker(marker), 0.05)
                if not latch.held:
                    pytest.skip("the device was faster than its queue of copies; nothing was observed")
                assert not ran, "work of the borrowed stream did not stay behind that of its owner"
            assert until(lambda: transfer.query_marker(marker), rig.deadline_s)
        finally:
            transfer.destroy_marker(marker)
        transfer.destroy_stream(borrowed)
        assert rig.read(area.ptr, 4 * KIB, stream=stream) == content(2, 4 * KIB)


@case(
    "XFER-208",
    "Streams of any priority number are made, and run.",
    clause="interfaces/transfer.py: DeviceTransfer.create_stream",
)
@pytest.mark.parametrize("priority", [-100, -1, 0, 1, 100])
def test_priorities(rig: Rig, any_kind: HandleKind, priority: int) -> None:
    with allocated(rig, 4 * KIB, any_kind) as area:
        stream = rig.transfer.create_stream(priority=priority)
        try:
            rig.write(area.ptr, content(8, 4 * KIB), stream=stream)
        finally:
            rig.transfer.destroy_stream(stream)
        rig.expect(area.ptr, 4 * KIB, 8, "memory that such a stream wrote")


@case(
    "XFER-209",
    "Submitting returns at once while the stream is held back, and nothing of it runs before.",
    clause=TRANSFER,
)
def test_submitting_does_not_wait(rig: Rig, any_kind: HandleKind) -> None:
    if not rig.has_latches:
        pytest.skip("without word waits no stream can be held back for certain")
    transfer = rig.transfer
    with allocated(rig, MIB, any_kind, seed=1) as area, rig.new_staging(MIB) as host, rig.new_stream() as stream:
        host.view[:] = content(9, MIB)
        marker = transfer.create_marker()

        def submit() -> None:
            for part in range(16):
                place = part * 64 * KIB
                transfer.copy(stream, area.ptr + place, host.ptr + place, 64 * KIB)
            transfer.copy_strided(stream, u64((area.ptr, host.ptr, KIB, KIB, 512, 64)))
            transfer.record(marker, stream)

        latch = Latch(rig, stream)
        try:
            returned = attempt(submit, rig.deadline_s / 2)
            seen = bytes(host.view[:0]) if not returned else rig.read(area.ptr, MIB)
        finally:
            latch.close()
        assert returned, "a call that submits work waited for the work before it"
        compare(seen, content(1, MIB), "memory behind a stream that is held back")
        rig.finish(stream, "copies behind an opened latch")
        transfer.destroy_marker(marker)
        rig.expect(area.ptr, MIB, 9, "memory after copies behind an opened latch")


@case("XFER-210", "Free memory is never more than there is.", clause="interfaces/transfer.py: memory_info")
def test_memory_info(rig: Rig) -> None:
    info = rig.transfer.memory_info()
    assert 0 < info.free_nbytes <= info.total_nbytes


@case(
    "XFER-211",
    "The device reaches registered memory from its first byte to its last, in both directions.",
    clause="interfaces/transfer.py: HostRegistration.device_ptr",
)
def test_registration_is_reached(rig: Rig, any_kind: HandleKind) -> None:
    nbytes = 3 * MIB
    with allocated(rig, nbytes, any_kind) as area, rig.new_staging(nbytes) as host:
        host.view[:] = content(11, nbytes)
        rig.transfer.copy(rig.stream, area.ptr, host.ptr, nbytes)
        rig.finish(rig.stream, "a copy of a whole registration")
        rig.expect(area.ptr, nbytes, 11, "the device's copy")
        host.view[:] = bytes(nbytes)
        for place in (0, nbytes - 1):
            rig.transfer.copy(rig.stream, host.ptr + place, area.ptr + place, 1)
        rig.finish(rig.stream, "copies of single bytes")
        expected = content(11, nbytes)
        ends = written(bytes(nbytes), [(0, expected[:1]), (nbytes - 1, expected[-1:])])
        compare(bytes(host.view), ends, "host memory after its two ends were written")


@case("XFER-212", "A stream that is held back holds no other stream back.", clause="interfaces/transfer.py: Stream")
def test_streams_are_independent(rig: Rig, any_kind: HandleKind) -> None:
    if not rig.has_latches:
        pytest.skip("without word waits no stream can be held back for certain")
    with allocated(rig, 4 * KIB, any_kind, seed=1) as area, rig.new_stream() as other:
        with rig.latch(rig.stream):
            rig.write(area.ptr, content(12, 4 * KIB), stream=other)
            assert rig.read(area.ptr, 4 * KIB, stream=other) == content(12, 4 * KIB)


@case("XFER-213", "Several threads submit to streams of their own at once.", clause=TRANSFER)
def test_threads_submit(rig: Rig, any_kind: HandleKind) -> None:
    threads, times, nbytes = 4, 20, 64 * KIB
    failures: list[BaseException] = []
    with allocated(rig, threads * nbytes, any_kind) as area, rig.new_staging(threads * nbytes) as host:
        host.view[:] = content(13, threads * nbytes)

        def run(index: int) -> None:
            try:
                place = index * nbytes
                with rig.new_stream() as stream:
                    for _ in range(times):
                        rig.transfer.copy(stream, area.ptr + place, host.ptr + place, nbytes)
                    rig.finish(stream, "copies of one thread among several")
            except BaseException as error:
                failures.append(error)

        running = [threading.Thread(target=run, args=(index,)) for index in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        if failures:
            raise failures[0]
        rig.expect(area.ptr, threads * nbytes, 13, "what several threads copied")


@case(
    "LIFE-051",
    "A stream is destroyed after its work: the call returns when that is done, and not before.",
    clause="interfaces/transfer.py: DeviceTransfer.destroy_stream",
)
def test_stream_ends_after_its_work(rig: Rig, any_kind: HandleKind) -> None:
    with allocated(rig, MIB, any_kind, seed=1) as area, rig.new_staging(MIB) as host:
        host.view[:] = content(51, MIB)
        stream = rig.transfer.create_stream()
        latch = Latch(rig, stream)
        rig.transfer.copy(stream, area.ptr, host.ptr, MIB)
        failures: list[BaseException] = []

        def end() -> None:
            try:
                rig.transfer.destroy_stream(stream)
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=end, daemon=True)
        thread.start()
        thread.join(0.1)
        early = not thread.is_alive() and latch.held
        latch.close()
        thread.join(rig.deadline_s)
        assert not thread.is_alive(), "a stream whose work is done was not destroyed"
        if failures:
            raise failures[0]
        assert not early, "the stream was destroyed while its work was held back"
        rig.expect(area.ptr, MIB, 51, "memory that a destroyed stream wrote")
