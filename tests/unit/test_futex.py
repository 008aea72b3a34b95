"""Futex calls across processes, with deadlines, and addresses that lead nowhere."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from devipc.errors import UsageError
from devipc.futex import futex_wait, futex_wake
from devipc.memfd import PAGE_NBYTES, SharedMap, create_memfd

CHILD = """
import struct, sys
from devipc.futex import futex_wake
from devipc.memfd import SharedMap
page = SharedMap(int(sys.argv[1]), 8)
print("ready", flush=True)
sys.stdin.readline()
struct.pack_into("<I", page.view, 0, 1)
print(futex_wake(page.address))
"""


@pytest.fixture
def fd() -> Iterator[int]:
    fd = create_memfd("test", PAGE_NBYTES)
    yield fd
    os.close(fd)


@pytest.fixture
def page(fd: int) -> Iterator[SharedMap]:
    page = SharedMap(fd, PAGE_NBYTES)
    yield page
    page.close()


def test_another_process_wakes_a_waiter(fd: int, page: SharedMap) -> None:
    command = [sys.executable, "-c", CHILD, str(fd)]
    with subprocess.Popen(command, pass_fds=(fd,), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        woken: list[bool] = []

        def wait() -> None:
            while struct.unpack_from("<I", page.view)[0] == 0:
                woken.append(futex_wait(page.address, 0, timeout_s=30))

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.05)
        assert thread.is_alive()
        started = time.monotonic()
        process.stdin.write("\n")
        process.stdin.close()
        thread.join()
        assert time.monotonic() - started < 10
        assert woken
        assert all(woken)
        assert process.stdout.read() == "1\n"
    assert process.returncode == 0


def test_a_wait_ends_at_its_deadline(page: SharedMap) -> None:
    started = time.monotonic()
    assert futex_wait(page.address, 0, timeout_s=0.05) is False
    assert 0.05 <= time.monotonic() - started < 5


@pytest.mark.parametrize("timeout_s", [0, -1, -1e30])
def test_a_deadline_in_the_past_ends_at_once_as_a_timeout(page: SharedMap, timeout_s: float) -> None:
    """Not as a wake-up: a caller that loops until its deadline would spin for ever."""
    assert futex_wait(page.address, 0, timeout_s=timeout_s) is False


@pytest.mark.parametrize("timeout_s", [float("inf"), 1e30])
def test_a_deadline_beyond_all_bounds_is_a_long_one(page: SharedMap, timeout_s: float) -> None:
    waiter = threading.Thread(target=futex_wait, args=(page.address, 0), kwargs={"timeout_s": timeout_s})
    waiter.start()
    time.sleep(0.05)
    assert waiter.is_alive()
    while waiter.is_alive():
        futex_wake(page.address)
        waiter.join(0.01)


def test_a_word_that_differs_is_no_wait(page: SharedMap) -> None:
    assert futex_wait(page.address, 1, timeout_s=30) is True


def test_as_many_are_woken_as_asked_for(page: SharedMap) -> None:
    waiters = [threading.Thread(target=futex_wait, args=(page.address, 0), kwargs={"timeout_s": 30}) for _ in range(3)]
    for waiter in waiters:
        waiter.start()
    woken = 0
    while woken < 1:
        woken += futex_wake(page.address, count=1)
    assert woken == 1
    while woken < 3:
        woken += futex_wake(page.address)
    for waiter in waiters:
        waiter.join()
    assert futex_wake(page.address) == 0


def test_an_address_that_leads_nowhere_is_an_error_and_no_wake_up(page: SharedMap) -> None:
    for address in (0, 8, page.address + 1):
        with pytest.raises(UsageError):
            futex_wait(address, 0, timeout_s=1)
    with pytest.raises(UsageError):
        futex_wake(page.address + 2)
    with pytest.raises(UsageError):
        futex_wait(page.address, 0, timeout_s=float("nan"))
