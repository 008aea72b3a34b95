"""Many shares opened at once: one round trip, side by side, all or none, and each given back on its own."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from devipc.calltrace import observe
from devipc.capabilities import Verdict
from devipc.errors import HandleError, UsageError
from devipc.host.backend import HostBackend
from devipc.interfaces.memory import SideBySide
from devipc.opening import placement
from devipc.probe.stage import Stage
from devipc.session import Importer
from devipc.session import peer as peer_module
from devipc.session.remote import RemoteMemory
from devipc.types import HandleKind
from tests.session.processes import Worker, eventually, worker
from tests.session.worker import NBYTES, TIMEOUT_S

BLOCKS = 20
SHARED = NBYTES - 512


def names() -> list[str]:
    return [f"block/{number}" for number in range(BLOCKS)]


def lent(other: Worker) -> int:
    other.tell("tell")
    return int(other.hear("lent"))


def column(session: Importer, opened: list[RemoteMemory], offset: int, width: int) -> bytes:
    """Read ``width`` bytes at the same place of every block with one strided copy."""
    transfer = session.device.transfer
    assert transfer is not None
    pitch = opened[1].ptr - opened[0].ptr
    with Stage(session.device, width * len(opened)) as stage:
        copy = (stage.ptr, opened[0].ptr + offset, width, pitch, width, len(opened))
        transfer.copy_strided(stage.stream, np.array([copy], np.uint64))
        stage.synchronize()
        return bytes(stage.view[: width * len(opened)])


def test_blocks_of_a_peer_lie_side_by_side_and_one_copy_spans_them() -> None:
    with worker("pool", blocks=BLOCKS, count=False) as other:
        with Importer(other.hear("path"), strategy="stream_memop", timeout_s=TIMEOUT_S) as session:
            assert placement(session.device.memory, HandleKind.MEMFD).verdict is Verdict.YES  # type: ignore[arg-type]
            calls: list[str] = []
            with observe(calls.append):
                opened = session.open_all(names())
            assert [call for call in calls if "open" in call] == ["host_open"]
            assert {memory.region for memory in opened} == {opened[0].region}
            assert opened[0].region != 0
            assert {b.ptr - a.ptr for a, b in pairwise(opened)} == {NBYTES}
            expected = b"".join(bytes([number]) * 96 for number in range(BLOCKS))
            assert column(session, opened, 1000, 96) == expected
            assert column(session, opened, SHARED - 96, 96) == expected, "to the very last shared byte"
            with pytest.raises(UsageError):  # a row that leaves what was shared
                column(session, opened, SHARED - 95, 96)
            opened[7].close()
            session.peer.mappings.set_idle_limit(0)
            with pytest.raises(UsageError):  # a row in what is not open any more
                column(session, opened, 1000, 96)
            assert column(session, opened[:7], 1000, 96) == expected[: 7 * 96]
            for memory in opened:
                memory.close()
        assert eventually(lambda: lent(other) == 0), "what was closed is told after the session has ended"
        other.tell("end")


def test_it_is_all_or_none_and_hits_are_counted() -> None:
    with worker("pool", blocks=BLOCKS, count=False) as other:
        with Importer(other.hear("path"), strategy="stream_memop", timeout_s=TIMEOUT_S) as session:
            with pytest.raises(HandleError, match="nothing is shared as 'block/x'"):
                session.open_all([*names(), "block/x"])
            assert session.peer.mappings.stats()["open"] == 0
            single = session.open("block/3")
            assert single.region == 0
            twice = session.open_all(["block/3", "block/4", "block/4", "block/5"])
            assert [memory.ptr for memory in twice[:1]] == [single.ptr]
            assert twice[1].ptr == twice[2].ptr
            assert (twice[0].region, twice[1].region) == (0, twice[3].region)
            single.close()
            twice[1].close()
            assert column(session, [twice[2], twice[3]], 0, 8) == b"\x04" * 8 + b"\x05" * 8
            for memory in twice:
                memory.close()
            assert session.open_all([]) == []
            session.peer.mappings.set_idle_limit(0)
            assert session.peer.mappings.stats()["open"] == 0
        assert eventually(lambda: lent(other) == 0), "what was closed is told after the session has ended"
        other.tell("end")


def test_an_answer_holds_as_many_as_fit(exporter: Any, importer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_module, "_MAX_ANSWER_FDS", 3)
    for number in range(8):
        exporter.share(f"block/{number}", exporter.allocate(4096))
    opened = importer.open_all([f"block/{number}" for number in range(8)])
    assert [memory.name for memory in opened] == [f"block/{number}" for number in range(8)]
    for memory in opened:
        memory.close()
    assert eventually(lambda: not exporter.shares._tokens)


def test_no_extent_stays_when_one_of_many_cannot_be_opened() -> None:
    device = HostBackend().open_device()
    memory = device.memory
    blocks = [memory.allocate(4096) for _ in range(3)]
    extents = [memory.export(block.ptr, 4096) for block in blocks]
    assert isinstance(memory, SideBySide)
    assert memory.side_by_side(HandleKind.LEGACY).verdict is Verdict.NO
    damaged = dataclasses.replace(extents[1].chunks[0], allocation_nbytes=8192)
    with pytest.raises((HandleError, UsageError)):
        memory.open_side_by_side([extents[0], dataclasses.replace(extents[1], chunks=(damaged,)), extents[2]])
    opened = memory.open_side_by_side(extents)
    assert [b.ptr - a.ptr for a, b in pairwise(opened)] == [4096, 4096]
    for one in (opened[1], opened[0], opened[2]):  # the addresses go with the last, whichever it is
        memory.close(one)
    assert memory.describe(opened[0].ptr).base == 0
    for extent, block in zip(extents, blocks, strict=True):
        memory.release(extent)
        memory.free(block)
    device.close()
