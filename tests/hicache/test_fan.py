"""Side streams: all pieces arrive, behind what came before and before what comes after, after an error too."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from devipc.errors import DriverError, UsageError
from devipc.hicache.moving.fan import Fan
from devipc.hicache.moving.mover import MarkerPool
from devipc.hicache.planning.expand import CopyList
from devipc.host.backend import HostBackend, HostDevice
from devipc.probe.stage import Stage

PIECES, WIDTH = 2500, 64
NBYTES = PIECES * WIDTH


class Rig:
    """A fan of two side streams, and memory to copy between."""

    def __init__(self, device: HostDevice, threads: int) -> None:
        self.transfer = device.transfer
        self.markers = MarkerPool(self.transfer)
        self.stream = self.transfer.create_stream()
        self.fan = Fan(self.transfer, self.markers, count=2, priority=0, threads=threads)
        self.source, self.target = Stage(device, NBYTES), Stage(device, NBYTES)
        self.source.view[:NBYTES] = np.random.default_rng(2).integers(0, 255, NBYTES, np.uint8).tobytes()

    def copy(self, dst: Any, src: Any, nbytes: Any) -> None:
        """Put all pieces on the fan, as movers do: some plain, some as rows of one."""
        rows = np.stack([column[:99] for column in (dst, src, nbytes, nbytes, nbytes, np.ones_like(nbytes))], axis=1)
        self.fan.put(self.stream, CopyList(rows, dst[99:], src[99:], nbytes[99:]))

    def pieces(self) -> list[Any]:
        at = np.random.default_rng(3).permutation(PIECES).astype(np.uint64) * np.uint64(WIDTH)
        return [at + np.uint64(self.target.ptr), at + np.uint64(self.source.ptr), np.full(PIECES, WIDTH, np.uint64)]

    def close(self) -> None:
        self.fan.close()
        self.markers.close()
        self.transfer.destroy_stream(self.stream)
        self.source.close()
        self.target.close()


@pytest.fixture(params=[1, 2, 3])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    device = HostBackend().open_device()
    made = Rig(device, request.param)
    yield made
    made.close()
    device.close()


def test_side_streams_run_between_earlier_and_later_work(rig: Rig) -> None:
    rig.copy(*rig.pieces())  # makes the side streams
    rig.transfer.synchronize_stream(rig.stream)
    assert bytes(rig.target.view[:NBYTES]) == bytes(rig.source.view[:NBYTES])
    side: Any = rig.fan._sides[-1]
    for first, then in ((rig.stream, side), (side, rig.stream)):
        rig.target.view[:NBYTES] = bytes(NBYTES)
        first.stall()
        rig.transfer.copy(rig.stream, rig.source.ptr, rig.source.ptr, 8)  # earlier work
        rig.copy(*rig.pieces())
        end = rig.markers.record(rig.stream)
        if first is rig.stream:  # nothing of the side streams before what the stream was given before
            other = rig.markers.record(then)
            assert not rig.transfer.query_marker(other)
            assert not any(rig.target.view[:NBYTES])
            rig.markers.give_back(other)
        assert not rig.transfer.query_marker(end)
        first.resume()
        rig.transfer.synchronize_stream(rig.stream)
        assert bytes(rig.target.view[:NBYTES]) == bytes(rig.source.view[:NBYTES])
        rig.markers.give_back(end)


def test_what_began_before_an_error_is_waited_for(rig: Rig) -> None:
    rig.copy(*rig.pieces())
    rig.transfer.synchronize_stream(rig.stream)
    side: Any = rig.fan._sides[0]
    dst, src, nbytes = rig.pieces()
    dst[-1] = 4096
    side.stall()
    with pytest.raises(UsageError):
        rig.copy(dst, src, nbytes)
    end = rig.markers.record(rig.stream)
    assert not rig.transfer.query_marker(end)
    side.resume()
    rig.transfer.synchronize_stream(rig.stream)
    assert rig.transfer.query_marker(end)
    rig.markers.give_back(end)


def test_few_pieces_need_no_side_streams(rig: Rig) -> None:
    rig.copy(*(column[: 99 + 512] for column in rig.pieces()))
    rig.transfer.synchronize_stream(rig.stream)
    assert rig.fan._sides == []


def test_no_side_stream_waits_that_gets_no_piece(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[Any] = []
    wait = rig.transfer.wait_marker

    def counted(stream: Any, marker: Any) -> None:
        waits.append(stream)
        wait(stream, marker)

    monkeypatch.setattr(rig.transfer, "wait_marker", counted)
    for pieces, sides in ((2 * 512, 1), (PIECES - 99, 1 if rig.fan.threads == 2 else 2), (2 * 512, 1)):
        waits.clear()
        rig.copy(*(column[: 99 + pieces] for column in rig.pieces()))
        # Each side waits for the stream, and the stream for each.
        assert [stream is rig.stream for stream in waits].count(True) == sides == len(waits) // 2
    rig.transfer.synchronize_stream(rig.stream)
    assert bytes(rig.target.view[:NBYTES]) == bytes(rig.source.view[:NBYTES])


def test_each_stream_has_one_thread_and_beside_another_lane_there_are_fewer(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = rig.transfer.copy_batch
    copies = CopyList(CopyList.empty().strided, *rig.pieces())
    for alone, most in ((True, 3), (False, 2)):
        by = dict[int, set[int]]()
        expected = min(rig.fan.threads, most)
        meeting = threading.Barrier(expected, timeout=30)  # or one thread might do it all

        def counted(stream: Any, *columns: Any, by: Any = by, meeting: threading.Barrier = meeting) -> None:
            first = threading.get_ident() not in set().union(*by.values())
            by.setdefault(id(stream), set()).add(threading.get_ident())
            if first:
                meeting.wait()
            batch(stream, *columns)

        monkeypatch.setattr(rig.transfer, "copy_batch", counted)
        rig.fan.put(rig.stream, copies, alone=alone)
        rig.transfer.synchronize_stream(rig.stream)
        assert [len(threads) for threads in by.values()] == [1] * (3 if expected == 1 else expected)
        assert len(set().union(*by.values())) == expected
        assert bytes(rig.target.view[:NBYTES]) == bytes(rig.source.view[:NBYTES])


def test_something_else_is_done_meanwhile_where_there_are_threads_and_a_list_is_long(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    did: list[str] = []
    rig.fan.meanwhile = lambda: did.append("")
    rig.copy(*rig.pieces())
    assert not did
    monkeypatch.setattr("devipc.hicache.moving.fan._MEANWHILE_PIECES", PIECES - 99)
    rig.copy(*rig.pieces())
    rig.transfer.synchronize_stream(rig.stream)
    assert len(did) == (rig.fan.threads > 1)


@pytest.mark.parametrize("refused", [1, 2])
def test_a_side_that_cannot_be_joined_is_waited_for(rig: Rig, monkeypatch: pytest.MonkeyPatch, refused: int) -> None:
    """The stream's marker would say that all is over, and the pages would be given back under a running copy."""
    rig.copy(*rig.pieces())
    rig.transfer.synchronize_stream(rig.stream)
    rig.target.view[:NBYTES] = bytes(NBYTES)
    record, sides = rig.markers.record, list(rig.fan._sides)
    stalled: Any = sides[-1]

    def refusing(stream: Any) -> Any:
        if stream in sides[:refused]:
            raise DriverError("the driver refused a marker", remedy="none: it was asked to")
        return record(stream)

    monkeypatch.setattr(rig.markers, "record", refusing)
    stalled.stall()
    threading.Timer(0.2, stalled.resume).start()
    with pytest.raises(DriverError):
        rig.copy(*rig.pieces())
    monkeypatch.undo()
    end = rig.markers.record(rig.stream)
    while not rig.transfer.query_marker(end):
        pass
    assert bytes(rig.target.view[:NBYTES]) == bytes(rig.source.view[:NBYTES])
    rig.markers.give_back(end)


def test_nothing_is_over_while_it_is_not_known_whether_a_side_is(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither joined nor waited for: whoever marks the stream is told, until one of them is possible again."""
    rig.copy(*rig.pieces())
    rig.transfer.synchronize_stream(rig.stream)
    rig.target.view[:NBYTES] = bytes(NBYTES)
    record, sides = rig.markers.record, list(rig.fan._sides)
    stalled: Any = sides[-1]

    def refusing(stream: Any) -> Any:
        if stream in sides:
            raise DriverError("the driver refused a marker", remedy="none: it was asked to")
        return record(stream)

    def refused(_stream: Any) -> None:
        raise DriverError("the driver refused to wait", remedy="none: it was asked to")

    monkeypatch.setattr(rig.markers, "record", refusing)
    monkeypatch.setattr(rig.transfer, "synchronize_stream", refused)
    stalled.stall()
    with pytest.raises(DriverError):
        rig.copy(*rig.pieces())
    for _ in range(2):
        with pytest.raises(DriverError):
            rig.fan.settle(rig.stream)
    monkeypatch.undo()
    rig.fan.settle(rig.stream)
    end = rig.markers.record(rig.stream)
    assert not rig.transfer.query_marker(end)  # the stream waits for the side
    stalled.resume()
    rig.transfer.synchronize_stream(rig.stream)
    assert bytes(rig.target.view[:NBYTES]) == bytes(rig.source.view[:NBYTES])
    rig.markers.give_back(end)


@pytest.mark.parametrize("soon", [True, False])
def test_plain_copies_go_first_while_the_stream_has_something_to_do(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, *, soon: bool
) -> None:
    """And the strided ones behind all of them, or the device would wait for what is submitted late."""
    dst, src, nbytes = rig.pieces()
    rows = np.stack([column[:99] for column in (dst, src, nbytes, nbytes, nbytes, np.ones_like(nbytes))], axis=1)
    strided = rig.transfer.copy_strided
    before = list[bool]()

    def looked(stream: Any, copies: Any) -> None:
        rig.transfer.synchronize_stream(rig.stream)  # the sides were joined, if they have anything
        done = bytes(rig.target.view[:NBYTES]), bytes(rig.source.view[:NBYTES])
        before.append(sum(one == other for one, other in zip(*done, strict=True)) >= (PIECES - 99) * WIDTH)
        strided(stream, copies)

    monkeypatch.setattr(rig.transfer, "copy_strided", looked)
    rig.target.view[:NBYTES] = bytes(NBYTES)
    rig.fan.put(rig.stream, CopyList(rows, dst[99:], src[99:], nbytes[99:]), soon=soon)
    rig.transfer.synchronize_stream(rig.stream)
    assert before == [not soon]
    assert bytes(rig.target.view[:NBYTES]) == bytes(rig.source.view[:NBYTES])
