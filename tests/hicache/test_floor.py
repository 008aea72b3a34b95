"""The speed of a contiguous copy, measured when an engine begins, and what of it each direction reaches."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from devipc.errors import DriverError, ResourceExhausted
from devipc.hicache.api import UNFENCED
from devipc.hicache.engine.localcopies import LocalCarrier
from devipc.hicache.moving.arena import HostArena
from devipc.hicache.moving.floor import contiguous_nbytes_per_s, measured_costs
from devipc.hicache.planning.strips import CostModel
from devipc.interfaces.backend import Device
from devipc.registry import load_backend
from devipc.undoing import note_left
from tests.hicache.faulty import Failing, FaultyDevice
from tests.hicache.pools import TIMEOUT_S
from tests.hicache.world import world


@pytest.fixture
def device() -> Iterator[Device]:
    opened = load_backend("host").open_device()
    yield opened
    opened.close()


def test_status_says_what_share_of_a_contiguous_copy_each_direction_reached(device: Device) -> None:
    with world(device) as it:
        memory = it.attention_pool()
        client = it.client()
        handle = it.register(client, memory)
        keys = it.keys(handle, 12)
        before: Any = it.engine.status()
        assert before["floor_nbytes_per_s"] > 0
        assert [lane["share_of_floor"] for lane in before["lanes"].values()] == [None, None]
        client.backup(handle, range(1, 13), keys, ready=UNFENCED).result(TIMEOUT_S)
        client.restore(handle, keys, range(13, 25), ready=UNFENCED).result(TIMEOUT_S)
        after: Any = it.engine.status()
        moved = 12 * memory.layout.page_nbytes
        for lane in after["lanes"].values():
            assert lane["moved_nbytes"] == moved
            assert lane["busy_s"] > 0
            # Both are rounded, the share to four digits.
            assert lane["share_of_floor"] == pytest.approx(
                moved / (lane["busy_s"] * after["floor_nbytes_per_s"]), abs=1e-4, rel=0.01
            )
        assert after["plans"]["backup"]["strided"] + after["plans"]["backup"]["plain"] > 0


@pytest.fixture
def arena(device: Device) -> Iterator[HostArena]:
    made = HostArena(2**20)
    registration = device.transfer.register_host(made.address, made.nbytes)  # type: ignore[union-attr]
    yield made
    device.transfer.unregister_host(registration)  # type: ignore[union-attr]
    made.close()


def test_measuring_only_reads_host_memory(device: Device, arena: HostArena) -> None:
    """It may hold the pages that an engine which died has left."""
    assert device.transfer is not None
    content = np.random.default_rng(1).bytes(arena.nbytes)
    arena.view[:] = content
    stream = device.transfer.create_stream()
    assert contiguous_nbytes_per_s(device, stream, arena.address, arena.nbytes) > 0
    assert arena.view.tobytes() == content
    device.transfer.destroy_stream(stream)


def test_copies_that_fail_leave_it_open(device: Device, arena: HostArena) -> None:
    faulty: Any = FaultyDevice(device)
    faulty.transfer.fault = Failing(2, more=100)
    stream = faulty.transfer.create_stream()
    assert contiguous_nbytes_per_s(faulty, stream, arena.address, arena.nbytes) == 0.0
    assert contiguous_nbytes_per_s(faulty, stream, arena.address, 3) == 0.0
    faulty.transfer.destroy_stream(stream)


def test_memory_that_is_touched_for_the_first_time_is_not_measured(device: Device, arena: HostArena) -> None:
    class Cold:
        def __init__(self) -> None:
            self.transfer, self.memory, self.copies = self, device.memory, 0

        def __getattr__(self, name: str) -> Any:
            return getattr(device.transfer, name)

        def copy(self, *arguments: Any) -> None:
            self.copies += 1
            if self.copies <= 2:  # more than all of it may take
                time.sleep(0.05)
            device.transfer.copy(*arguments)  # type: ignore[union-attr]

    cold: Any = Cold()
    stream = cold.create_stream()
    found = contiguous_nbytes_per_s(cold, stream, arena.address, arena.nbytes)
    assert found > 1e9  # 3/4 MiB in 50 ms would be .016e9
    cold.destroy_stream(stream)


class Slow:
    """Passes everything on; strided copies and batches take a while more for each copy, row and entry."""

    def __init__(self, device: Device, *, call_s: float = 0.0, row_s: float = 0.0, entry_s: float = 0.0) -> None:
        self._device, self._costs = device, (call_s, row_s, entry_s)
        self.transfer = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device if name in ("memory", "info") else self._device.transfer, name)

    def copy_strided(self, stream: Any, copies: Any) -> None:
        self._device.transfer.copy_strided(stream, copies)  # type: ignore[union-attr]
        _spin(len(copies) * self._costs[0] + int(copies[:, 5].sum()) * self._costs[1])

    def copy_batch(self, stream: Any, dst: Any, src: Any, nbytes: Any) -> None:
        self._device.transfer.copy_batch(stream, dst, src, nbytes)  # type: ignore[union-attr]
        _spin(len(dst) * self._costs[2])


def _spin(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def costs(device: Any, arena: HostArena, nbytes: int | None = None) -> CostModel:
    stream = device.transfer.create_stream()
    try:
        return measured_costs(
            device, stream, arena.address, arena.nbytes if nbytes is None else nbytes, floor_nbytes_per_s=10e9
        )
    finally:
        device.transfer.destroy_stream(stream)


@pytest.mark.timing
def test_costs_of_small_copies_are_those_of_the_device(device: Device, arena: HostArena) -> None:
    """Eight times the default is the most that is believed; what is near it changes one step at most."""
    default = CostModel(byte_s=1e-10)
    content = arena.view.tobytes()
    assert costs(Slow(device, call_s=20 * default.call_s), arena).call_s == 8 * default.call_s
    assert costs(Slow(device, row_s=20 * default.row_s), arena).row_s == 8 * default.row_s
    slow = costs(Slow(device, entry_s=20 * default.entry_s), arena)
    assert slow.entry_s == 8 * default.entry_s
    assert slow.byte_s == default.byte_s
    near = costs(Slow(device, entry_s=0.6 * default.entry_s), arena).entry_s  # and its own, which is less than a us
    assert near in (default.entry_s, 2 * default.entry_s)
    assert arena.view.tobytes() == content


def test_costs_that_cannot_be_told_are_the_defaults(device: Device, arena: HostArena) -> None:
    faulty: Any = FaultyDevice(device)
    faulty.transfer.fault = Failing(2, more=100)
    assert costs(faulty, arena) == CostModel(byte_s=1e-10)
    assert costs(device, arena, nbytes=4096) == CostModel(byte_s=1e-10)
    stream = faulty.transfer.create_stream()
    assert measured_costs(device, stream, arena.address, arena.nbytes, floor_nbytes_per_s=0.0) == CostModel()
    faulty.transfer.destroy_stream(stream)


def test_memory_that_is_neither_had_nor_given_back_is_no_small_matter(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused as usual it leaves the speed unknown; with something of it left, whoever begins an engine hears it."""
    refused = ResourceExhausted("full")

    def refuse(*_: object, **__: object) -> Any:
        raise refused

    monkeypatch.setattr(type(device.memory), "allocate", refuse)
    assert device.transfer is not None
    stream = device.transfer.create_stream()
    assert contiguous_nbytes_per_s(device, stream, 4096, 1 << 21) == 0.0
    assert measured_costs(device, stream, 4096, 1 << 21, floor_nbytes_per_s=1e9).byte_s == 1e-9
    note_left(refused, DriverError("unmap failed"))
    with pytest.raises(ResourceExhausted, match="unmap failed"):
        contiguous_nbytes_per_s(device, stream, 4096, 1 << 21)
    with pytest.raises(ResourceExhausted, match="unmap failed"):
        measured_costs(device, stream, 4096, 1 << 21, floor_nbytes_per_s=1e9)
    device.transfer.destroy_stream(stream)


@pytest.mark.parametrize("failing", ["contiguous_nbytes_per_s", "measured_costs", "submitting"])
def test_what_was_made_before_a_failure_is_given_back(
    device: Device, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, destroyed = list[Any](), list[Any]()
    create, destroy = device.transfer.create_stream, device.transfer.destroy_stream  # type: ignore[union-attr]

    def counted_create(*, priority: int = 0) -> Any:
        made.append(create(priority=priority))
        return made[-1]

    def counted_destroy(stream: Any) -> None:
        destroyed.append(stream)
        destroy(stream)

    def fail(*_: object, **__: object) -> Any:
        raise DriverError("the driver refused", remedy="none: it was asked to")

    monkeypatch.setattr(device.transfer, "create_stream", counted_create)
    monkeypatch.setattr(device.transfer, "destroy_stream", counted_destroy)
    monkeypatch.setattr(f"devipc.hicache.engine.localcopies.{failing}", fail)
    arena = HostArena(2**20)
    with pytest.raises(DriverError):
        LocalCarrier(device, arena)
    assert set(map(id, made)) == set(map(id, destroyed))
    assert made
    monkeypatch.undo()
    carrier = LocalCarrier(device, arena)  # refused as registered twice, if it still were
    carrier.abandon()
    arena.close()
