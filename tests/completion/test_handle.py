"""Handles and pages from elsewhere: what cannot be trusted is refused, and nothing is mapped or left open for it."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devipc.completion import (
    FenceHandle,
    create_fence,
    decode_fence_handle,
    encode_fence_handle,
    open_fence,
    poison_page,
)
from devipc.errors import HandleError, StaleError, WireError
from devipc.interfaces.backend import Device
from devipc.memfd import create_memfd
from devipc.spi import close_fds
from devipc.types import PoisonReason, Strategy
from devipc.wire import Reader
from tests.completion.rig import ALL, open_exported

HANDLE = FenceHandle(Strategy.EVENT, b"p" * 16, 3, 9, (b"secret-1", b"secret-2"), (0,))


def test_a_handle_survives_its_bytes_and_hides_its_payload() -> None:
    again = decode_fence_handle(Reader(encode_fence_handle(HANDLE)), (0,))
    assert again == HANDLE
    assert "secret" not in repr(HANDLE)


@pytest.mark.parametrize(
    "wrong",
    [
        replace(HANDLE, line=0),
        replace(HANDLE, line=33),
        replace(HANDLE, payloads=()),
        replace(HANDLE, strategy=Strategy.POLLING),
    ],
)
def test_lying_handles_are_refused(wrong: FenceHandle) -> None:
    with pytest.raises(WireError):
        decode_fence_handle(Reader(encode_fence_handle(wrong)), (0,))


@pytest.mark.parametrize("count", [0, 2, 5])
def test_the_number_of_descriptors_is_checked(count: int) -> None:
    with pytest.raises(WireError, match="descriptors"):
        decode_fence_handle(Reader(encode_fence_handle(HANDLE)), (0,) * count)


@given(st.data())
def test_broken_bytes_end_in_a_handle_error(data: st.DataObject) -> None:
    good = encode_fence_handle(HANDLE)
    if data.draw(st.booleans()):
        body = data.draw(st.binary(max_size=200))
    else:
        at = data.draw(st.integers(0, len(good) - 1))
        body = good[:at] + data.draw(st.binary(max_size=8)) + good[at + data.draw(st.integers(0, 8)) :]
    try:
        handle = decode_fence_handle(Reader(body), (0,))
    except HandleError:
        return
    assert 1 <= handle.line <= 32
    assert len(handle.payloads) <= 128


@pytest.mark.parametrize("strategy", ALL)
def test_a_handle_opens_once(device: Device, strategy: Strategy) -> None:
    with create_fence(device, strategy) as producer:
        handle = producer.export()
        first = open_fence(device, handle)
        with pytest.raises(StaleError, match="open"):
            open_fence(device, handle)
        first.close()
        with pytest.raises(StaleError, match="closed"):
            open_fence(device, handle)
        # The line is given away again; the old handle must not take the new consumer's place.
        again = producer.export()
        assert again.line == handle.line
        with pytest.raises(StaleError):
            open_fence(device, handle)
        open_exported(device, again).close()
        close_fds(handle.fds)


def test_withdrawn_handles_are_stale(device: Device) -> None:
    with create_fence(device, Strategy.POLLING) as producer:
        handle = producer.export()
        producer.drop_consumer(handle.line)
        with pytest.raises(StaleError, match="dropped"):
            open_fence(device, handle)
        close_fds(handle.fds)


def test_files_that_are_no_page_are_refused(device: Device) -> None:
    with create_fence(device, Strategy.POLLING) as producer:
        handle = producer.export()
        foreign = create_memfd("foreign", 4096)
        small = create_memfd("small", 100)
        unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
        os.ftruncate(unsealed, 4096)
        reading, writing = os.pipe()
        for fd in (foreign, small, unsealed, reading, writing, 10**6):
            with pytest.raises(HandleError) as caught:
                open_fence(device, replace(handle, fds=(fd,)))
            assert caught.value.remedy
            with pytest.raises(HandleError):
                poison_page(fd, PoisonReason.PEER_DIED, until=lambda: True)
        with pytest.raises(HandleError):
            open_fence(device, replace(handle, fds=()))
        open_exported(device, handle).close()
        close_fds((foreign, small, unsealed, reading, writing))


def test_a_forged_event_is_refused_and_its_line_given_back(device: Device) -> None:
    with create_fence(device, Strategy.EVENT, ring=2) as producer:
        handle = producer.export()
        with pytest.raises(HandleError):
            open_fence(device, replace(handle, payloads=(b"nonsense", b"nonsense")))
        assert producer.consumers == ()
        close_fds(handle.fds)
