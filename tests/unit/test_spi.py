"""What every backend gets: the whole contract from one module, and helpers that cannot make things worse."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from devipc import spi
from devipc.calltrace import observe, report
from devipc.errors import BoundsError, HandleError
from devipc.types import Chunk


def test_everything_named_is_there_and_nothing_else_is_public() -> None:
    assert sorted(spi.__all__) == sorted(set(spi.__all__))
    assert all(hasattr(spi, name) for name in spi.__all__)
    contracts = {"Backend", "Device", "DeviceMemoryIPC", "DeviceSyncIPC", "DeviceTransfer", "hookimpl", "Chunk"}
    assert contracts <= set(spi.__all__)


def test_importing_it_touches_no_array_library() -> None:
    code = "import sys, devipc.spi; print(sorted({'numpy', 'torch', 'click', 'rich'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout == "[]\n"


def test_descriptors_are_closed_once_each_whatever_happened_to_them() -> None:
    read, write = os.pipe()
    os.close(read)
    spi.close_fds((read, write, -1, 10**6))
    for fd in (read, write):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    spi.close_fds(())


@pytest.mark.parametrize(
    ("offset", "nbytes", "driver_nbytes", "fits"),
    [
        (0, 4096, 4096, True),
        (4095, 1, 4096, True),
        (8640, 4096, 2**21, True),
        (0, 4097, 4096, False),
        (4096, 1, 4096, False),
        (0, 0, 4096, False),
        (0, -1, 4096, False),
        (-1, 10, 4096, False),
        (2**64 - 1, 4096, 4096, False),
        (0, 1, 0, False),
    ],
)
def test_a_chunk_must_lie_inside_what_the_driver_reports(
    offset: int, nbytes: int, driver_nbytes: int, *, fits: bool
) -> None:
    chunk = Chunk(driver_nbytes, offset, nbytes)
    if fits:
        spi.check_chunk(chunk, driver_nbytes=driver_nbytes)
    else:
        with pytest.raises(BoundsError) as caught:
            spi.check_chunk(chunk, driver_nbytes=driver_nbytes)
        assert isinstance(caught.value, HandleError)
        assert caught.value.remedy


def test_an_allocation_is_not_larger_than_the_driver_reports() -> None:
    with pytest.raises(BoundsError, match="announced 8192"):
        spi.check_chunk(Chunk(8192, 0, 1), driver_nbytes=8191)
    spi.check_chunk(Chunk(8192, 0, 1), driver_nbytes=8193)  # rounded up


def test_a_trace_sees_calls_until_its_block_ends() -> None:
    seen: list[str] = []
    report("before")
    with observe(seen.append):
        report("one")
        with observe(seen.append):
            report("twice")
    report("after")
    assert seen == ["one", "twice", "twice"]


def test_an_observer_may_stop_the_call() -> None:
    def stop(call: str) -> None:
        raise KeyError(call)

    with observe(stop), pytest.raises(KeyError, match="driverCall"):
        report("driverCall")
    report("driverCall")


def test_observers_come_and_go_on_many_threads() -> None:
    failed: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(300):
                seen: list[str] = []
                with observe(seen.append):
                    report("mine")
                assert "mine" in seen
        except BaseException as error:
            failed.append(error)

    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(switch)
    assert not failed
    from devipc import calltrace

    assert calltrace._observers == ()
