"""Devices, registered words and counts of what a process holds; shared by all tests of this folder."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from devipc.host.backend import HostBackend, HostDevice
from devipc.spi import PAGE_NBYTES, SharedMap, create_memfd
from tests.host.peer import Peer


class Words:
    """One page of registered 64-bit words, as a fence has them."""

    def __init__(self, device: HostDevice) -> None:
        self.fd = create_memfd("devipc-test-words", PAGE_NBYTES)
        self.map = SharedMap(self.fd, PAGE_NBYTES)
        self.words = self.map.view.cast("Q")
        self._transfer = device.transfer
        self.registration = device.transfer.register_host(self.map.address, PAGE_NBYTES)

    def at(self, index: int) -> int:
        return self.registration.device_ptr + 8 * index

    def close(self) -> None:
        self._transfer.unregister_host(self.registration)
        self.map.close()
        os.close(self.fd)


@pytest.fixture
def device() -> Iterator[HostDevice]:
    opened = HostBackend().open_device()
    yield opened
    opened.close()


@pytest.fixture
def words(device: HostDevice) -> Iterator[Words]:
    made = Words(device)
    yield made
    if not device.closed:
        device.lose("the test is over")  # ends waits that a failed test left, which would block the next line
        made.close()


@pytest.fixture
def peer() -> Iterator[Peer]:
    started = Peer()
    yield started
    started.end()


def held() -> tuple[int, int, int]:
    """Return how many descriptors, mappings of ours and threads this process has."""
    maps = sum("devipc" in line for line in Path("/proc/self/maps").read_text().splitlines())
    return len(os.listdir("/proc/self/fd")), maps, threading.active_count()
