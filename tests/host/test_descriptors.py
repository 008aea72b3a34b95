"""Without a descriptor left, every call of the host backend says so, and works again when there is one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = """
import os, resource
from devipc.completion import create_fence
from devipc.errors import ResourceExhausted
from devipc.memfd import SharedMap, create_memfd
from devipc.registry import load_backend
from devipc.types import Strategy
backend = load_backend("host")
device = backend.open_device()
page = SharedMap(create_memfd("page", 4096), 4096)
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

def fence():
    create_fence(device, Strategy.STREAM_MEMOP).close()

def allocate():
    device.memory.free(device.memory.allocate(4096))

def register():
    device.transfer.unregister_host(device.transfer.register_host(page.address, 4096))

def info():
    device.transfer.memory_info()

refused = 0
for call in (fence, allocate, register, info, backend.devices):
    call()
    for spare in range(4):
        used = max(int(name) for name in os.listdir("/proc/self/fd")[:-1]) + 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + spare, hard))
        try:
            call()
        except ResourceExhausted as error:
            assert error.code == "fds" and error.remedy, error
            refused += 1
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    call()
assert refused > 5, refused
print("fine")
"""


def test_no_descriptor_left_is_said_by_every_call() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True, timeout=50, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "fine"), done.stderr
