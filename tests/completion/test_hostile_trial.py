"""A trial with a peer that lies: no step may take this side's thread away, and nothing that it sends is kept."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from devipc.completion import TrialResponder
from devipc.completion.handle import encode_fence_handle
from devipc.completion.roles import DATA_NBYTES, ConsumerRole, Op, ProducerRole
from devipc.completion.trial import RemoteRole, TrialFailed
from devipc.errors import DriverError, HandleError, WireError
from devipc.interfaces.backend import Device
from devipc.interfaces.transfer import Stream
from devipc.memfd import create_memfd
from devipc.spi import close_fds
from devipc.types import Strategy
from devipc.wire import Writer
from tests.completion.rig import host_device

DO, OPEN = 0, 1


@pytest.fixture
def device() -> Iterator[Device]:
    with host_device() as device:
        yield device


def send(responder: TrialResponder, op: Op, a: int, b: int) -> bytes:
    return responder.answer(Writer().u8(DO).u8(op).u64(a).u64(b).done(), ())[0]


@pytest.mark.parametrize("op", [Op.LOOK, Op.PASSED, Op.SIGNAL])
def test_no_step_is_endless(device: Device, op: Op) -> None:
    data_fd = create_memfd("test-data", DATA_NBYTES)
    producer = ProducerRole(device, Strategy.HOST_FLAG, data_fd=data_fd)
    responder = TrialResponder(device)
    if op is Op.SIGNAL:
        responder._role = producer
    else:
        handle = producer.export()
        body = Writer().u8(OPEN).blob(encode_fence_handle(handle), limit=65536).done()
        assert responder.answer(body, (*handle.fds, data_fd))[0] == b"\0"
        close_fds(handle.fds)
    start = time.monotonic()
    answer = send(responder, op, 5, 2**62)
    assert time.monotonic() - start < 1
    assert b"at most" in answer
    responder.close()
    if op is not Op.SIGNAL:
        producer.close()
    os.close(data_fd)


def test_a_data_file_that_is_none_costs_no_stream(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    transfer = device.transfer
    assert transfer is not None
    made: list[object] = []
    create = transfer.create_stream
    data_fd = create_memfd("test-data", DATA_NBYTES)
    producer = ProducerRole(device, Strategy.HOST_FLAG, data_fd=data_fd)
    handle = producer.export()
    reading, writing = os.pipe()

    def count(_: object, **options: Any) -> Stream:
        made.append(options)
        return create(**options)

    with monkeypatch.context() as patch:
        patch.setattr(type(transfer), "create_stream", count)
        for _ in range(3):
            with pytest.raises(HandleError):
                ConsumerRole(device, handle, reading)
    assert made == []
    close_fds((*handle.fds, reading, writing, data_fd))
    producer.close()


@pytest.mark.parametrize("error", [DriverError("no marker is left"), KeyboardInterrupt()])
def test_a_consumer_without_a_marker_keeps_no_stream(
    device: Device, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    transfer = device.transfer
    assert transfer is not None
    data_fd = create_memfd("test-data", DATA_NBYTES)
    producer = ProducerRole(device, Strategy.HOST_FLAG, data_fd=data_fd)
    handle = producer.export()
    streams: list[Stream] = []
    create, destroy = transfer.create_stream, transfer.destroy_stream

    def created(_: object, **options: Any) -> Stream:
        streams.append(create(**options))
        return streams[-1]

    def destroyed(_: object, stream: Stream) -> None:
        destroy(stream)
        streams.remove(stream)

    def refuse(_: object) -> None:
        raise error

    mapped = Path("/proc/self/maps").read_text().count("test-data")
    with monkeypatch.context() as patch:
        patch.setattr(type(transfer), "create_stream", created)
        patch.setattr(type(transfer), "destroy_stream", destroyed)
        patch.setattr(type(transfer), "create_marker", refuse)
        with pytest.raises(type(error)):
            ConsumerRole(device, handle, data_fd)
    assert streams == []
    assert Path("/proc/self/maps").read_text().count("test-data") == mapped
    close_fds((*handle.fds, data_fd))
    producer.close()


def test_descriptors_that_nobody_asked_for_are_closed() -> None:
    def answer(body: bytes, fds: Sequence[int], timeout_s: float) -> tuple[bytes, Sequence[int]]:
        sent.extend(os.pipe())
        return reply, sent[-2:]

    sent: list[int] = []
    role = RemoteRole(answer, timeout_s=1)
    reply = b"\0" + bytes(16)
    assert role.do(Op.LOOK, 1) == (0, 0)
    reply = b""
    with pytest.raises(WireError):
        role.do(Op.LOOK, 1)
    reply = Writer().u8(1).text("no").done()
    with pytest.raises(TrialFailed):
        role.do(Op.LOOK, 1)
    reply = b"\0"
    role.close()
    assert len(sent) == 8
    for fd in set(sent):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
