"""The memory under tensors: freed with its last holder, behind queued work, also while the process ends.

Tensors themselves need a torch that knows the device: see ``hardware/smoke.py``.
"""

from __future__ import annotations

import gc
import struct
import subprocess
import sys
import time
from typing import Any

import pytest

from backends.testing.helpers import staging

from .peers import environment, simulated


def wait_until_freed(pool: Any) -> None:
    deadline = time.monotonic() + 5.0
    while pool.live_nbytes and time.monotonic() < deadline:
        time.sleep(1e-3)
    assert pool.live_nbytes == 0


@simulated()
def test_the_memory_dies_with_its_holder(device: Any, sim: Any) -> None:
    from devipc_cuda.torch_pool import TorchPool

    pool = TorchPool(device)
    block = pool._block(3 * 2**20, zero=True)
    interface = block.__cuda_array_interface__
    assert interface["shape"] == (3 * 2**20,)
    assert pool.live_nbytes == 4 * 2**20
    ptr = interface["data"][0]
    extent = device.memory.export(ptr, 3 * 2**20)
    device.memory.release(extent)
    del block
    gc.collect()
    wait_until_freed(pool)
    assert sim.counter("live_maps") == 0


@simulated()
def test_the_memory_is_freed_behind_queued_work(device: Any, sim: Any) -> None:
    from devipc_cuda.torch_pool import TorchPool

    pool = TorchPool(device)
    block = pool._block(4096, zero=False)
    with staging(device) as host:
        host.transfer.copy(host.stream, block.__cuda_array_interface__["data"][0], host.device_ptr, 4096)
        del block
        host.transfer.synchronize_stream(host.stream)
        wait_until_freed(pool)
    assert sim.counter("writes_of_freed") == 0


@simulated()
def test_a_tensor_may_die_inside_the_locks_of_the_pool_and_the_device(device: Any, sim: Any) -> None:
    """A garbage collection can end it anywhere on this thread, while a stream waits for what this thread does next."""
    from devipc_cuda.torch_pool import TorchPool

    pool = TorchPool(device)
    blocks = [pool._block(4096, zero=False) for _ in range(2)]
    with staging(device) as host:
        device.sync.word_waits.wait(host.stream, host.device_ptr, 1)
        for lock in (pool._lock, device.memory._lock):
            with lock:
                blocks.pop()
        host.view[:8] = struct.pack("<Q", 1)
        host.transfer.synchronize_stream(host.stream)
    wait_until_freed(pool)


@pytest.mark.parametrize("why", ["captures", "threads"])
@simulated()
def test_memory_that_cannot_be_given_back_yet_is_not_forgotten(why: str, device: Any, sim: Any) -> None:
    """The driver does not wait for a device of which a stream captures a graph; or no thread is to be had."""
    import _thread

    from devipc_cuda.torch_pool import TorchPool

    def no_thread(*args: object) -> None:
        raise RuntimeError("can't start new thread")

    pool = TorchPool(device)
    block = pool._block(4096, zero=False)
    calls = sim.calls("cuCtxSynchronize")
    with pytest.MonkeyPatch.context() as patch:
        if why == "threads":
            patch.setattr(_thread, "start_new_thread", no_thread)
        else:
            sim.inject("cuCtxSynchronize*@1=900")
        del block
    deadline = time.monotonic() + 5.0
    while why == "captures" and sim.calls("cuCtxSynchronize") == calls:
        assert time.monotonic() < deadline
        time.sleep(1e-3)
    time.sleep(0.1)
    assert pool.live_nbytes == 2 * 2**20
    block = pool._block(4096, zero=False)
    while pool.live_nbytes > 2 * 2**20:
        assert time.monotonic() < deadline
        time.sleep(1e-3)
    assert sim.counter("live_maps") == 1
    del block
    wait_until_freed(pool)


AT_EXIT = """
from devipc_cuda.backend import CudaBackend
from devipc_cuda.torch_pool import TorchPool
device = CudaBackend().open_device()
kept = TorchPool(device)._block(4096, zero=True)
if {closed}:
    device.close()
"""


def test_a_process_may_end_with_tensors() -> None:
    for closed in (False, True):
        code = AT_EXIT.format(closed=closed)
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment({}), capture_output=True, text=True, timeout=40
        )
        assert (done.returncode, done.stderr) == (0, "")
