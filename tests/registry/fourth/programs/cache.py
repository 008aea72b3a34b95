"""Pages of an Acorn pool go to the cache daemon and come back, each with its own bytes."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile

import numpy as np

from devipc.hicache.api import connect
from devipc.hicache.builders import TensorView, mla_token_pool
from devipc.hicache.keys import Namespace, page_keys
from devipc.registry import load_backend

ROWS, ROW_NBYTES, PAGE = 64 * 16, 256, 16
PAGE_NBYTES = PAGE * ROW_NBYTES

with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "cache.sock")
    command = [sys.executable, "-m", "devipc", "hicache", "serve", "--json", "--socket", path]
    daemon = subprocess.Popen([*command, "--tier-nbytes", "16MiB", "--backend", "acorn"], stdout=subprocess.PIPE)
    assert daemon.stdout is not None
    ready = json.loads(daemon.stdout.readline())
    try:
        device = load_backend(ready["backend"]).open_device(ready["device"])
        assert device.memory is not None
        assert device.transfer is not None
        memory = device.memory.allocate(ROWS * ROW_NBYTES)
        pool = mla_token_pool(
            [TensorView.contiguous(memory.ptr, (ROWS, ROW_NBYTES), 1)],
            page_tokens=PAGE,
            allocations=[device.memory.describe(memory.ptr)],
        )
        compute = device.transfer.create_stream()
        for number in range(1, 9):
            ctypes.memset(memory.ptr + number * PAGE_NBYTES, number, PAGE_NBYTES)
        with connect(f"unix:{path}", device=device) as cache:
            name = Namespace.of(pool.layout, model="a model", revision="1", dtype="u8")
            handle = cache.register_pool(pool, namespace=name)
            keys = page_keys(np.arange(8 * PAGE), page_tokens=PAGE, parent=handle.namespace)
            cache.backup(handle, range(1, 9), keys, ready=compute).result(timeout_s=10)
            cache.restore(handle, keys, range(20, 28), ready=compute).result(timeout_s=10)
            cache.unregister(handle)
        for number in range(1, 9):
            start = (19 + number) * PAGE_NBYTES
            assert ctypes.string_at(memory.ptr + start, PAGE_NBYTES) == bytes([number]) * PAGE_NBYTES
        device.transfer.destroy_stream(compute)
        device.memory.free(memory)
        device.close()
    finally:
        daemon.terminate()
        assert daemon.wait(20) == 0
        daemon.stdout.close()
    print(f"8 pages through {ready['backend']} and back")
