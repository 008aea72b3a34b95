"""Host memory of the tier: sealed, there as a whole, registered as a whole or through a small buffer."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from devipc.errors import CapabilityError, ResourceExhausted, UsageError
from devipc.hicache.moving import arena as module
from devipc.hicache.moving.arena import HostArena, Pinned, budget_nbytes
from devipc.host.meminfo import memory_info
from devipc.interfaces.backend import Device
from devipc.interfaces.transfer import HostRegistration
from devipc.memfd import REQUIRED_SEALS
from devipc.registry import load_backend
from devipc.types import MemoryInfo

MIB = 2**20


@pytest.fixture
def device() -> Iterator[Device]:
    opened = load_backend("host").open_device()
    yield opened
    opened.close()


class Limited:
    """A device's transfer with a limit on what may be registered: in one piece, and in all."""

    def __init__(self, device: Device, *, total: int = 2**40, error: type[Exception] = ResourceExhausted) -> None:
        assert device.transfer is not None
        self._transfer: Any = device.transfer
        self.total = total
        self.error = error
        self.live: list[int] = []
        self.asked: list[int] = []

    def register_host(self, address: int, nbytes: int) -> HostRegistration:
        self.asked.append(nbytes)
        if sum(self.live) + nbytes > self.total:
            raise self.error("too much", remedy="ask for less")  # type: ignore[call-arg]
        found: HostRegistration = self._transfer.register_host(address, nbytes)
        self.live.append(nbytes)
        return found

    def unregister_host(self, registration: HostRegistration) -> None:
        self._transfer.unregister_host(registration)
        self.live.remove(registration.nbytes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transfer, name)


def test_the_memory_is_sealed_whole_and_exact() -> None:
    before = _shared_nbytes()
    arena = HostArena(200 * MIB + 1, threads=3)
    assert arena.nbytes == 200 * MIB + mmap.PAGESIZE
    assert fcntl.fcntl(arena.fileno(), fcntl.F_GET_SEALS) & REQUIRED_SEALS == REQUIRED_SEALS
    assert os.fstat(arena.fileno()).st_size == arena.nbytes
    assert os.fstat(arena.fileno()).st_blocks * 512 >= arena.nbytes
    assert abs(_shared_nbytes() - before - arena.nbytes) < arena.nbytes * 0.05
    arena.view[:] = bytes(1) * arena.nbytes
    arena.close()
    arena.close()
    assert _shared_nbytes() - before < 10 * MIB


def _shared_nbytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssShmem"))


def test_the_budget_refuses_before_the_kernel_kills() -> None:
    small = MemoryInfo(100 * MIB, 200 * MIB)
    assert budget_nbytes(info=lambda: small) == 90 * MIB
    with pytest.raises(ResourceExhausted) as caught:
        HostArena(91 * MIB, info=lambda: small)
    assert caught.value.code == "host_budget"
    assert str(90 * MIB) in caught.value.message
    with pytest.raises(UsageError):
        HostArena(0)


def test_the_budget_follows_the_tightest_control_group(tmp_path: Any) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 8388608 kB\nMemAvailable: 6291456 kB\n")
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text("0::/outer/inner\n")
    for folder, limit, used in (("outer", 1000 * MIB, 600 * MIB), ("outer/inner", 900 * MIB, 100 * MIB)):
        group = tmp_path / "groups" / folder
        group.mkdir(parents=True)
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text(f"{used}\n")
    found = budget_nbytes(info=lambda: memory_info(proc=tmp_path, cgroups=tmp_path / "groups"))
    assert found == 400 * MIB * 9 // 10 // mmap.PAGESIZE * mmap.PAGESIZE


@pytest.mark.parametrize("code", [errno.ENOMEM, errno.EFAULT])
def test_a_kernel_that_refuses_leaves_nothing(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr(module, "_libc", SimpleNamespace(madvise=lambda *_: -1))
    monkeypatch.setattr(ctypes, "get_errno", lambda: code)
    with pytest.raises(ResourceExhausted) as caught:
        HostArena(MIB)
    assert caught.value.code == "host_memory"


def test_an_old_kernel_reserves_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_libc", SimpleNamespace(madvise=lambda *_: -1))
    monkeypatch.setattr(ctypes, "get_errno", lambda: errno.EINVAL)
    arena = HostArena(MIB)
    assert os.fstat(arena.fileno()).st_blocks * 512 >= MIB
    arena.close()


def test_registration_in_chunks(device: Device) -> None:
    limited: Any = Limited(device)
    arena = HostArena(5 * MIB)
    pinned = Pinned(arena, limited, chunk_nbytes=2 * MIB)
    assert pinned.pinned
    assert pinned.reason == ""
    assert limited.live == [2 * MIB, 2 * MIB, MIB]
    pinned.close()
    assert limited.live == []
    arena.close()


@pytest.mark.parametrize("error", [ResourceExhausted, CapabilityError])
def test_a_chunk_that_fails_takes_all_back(device: Device, error: type[Exception]) -> None:
    limited: Any = Limited(device, total=5 * MIB, error=error)
    arena = HostArena(6 * MIB)
    with pytest.raises(error):
        Pinned(arena, limited, chunk_nbytes=2 * MIB, required=True)
    assert limited.live == []
    pinned = Pinned(arena, limited, chunk_nbytes=2 * MIB, bounce_nbytes=16 * MIB, least_nbytes=MIB)
    assert not pinned.pinned
    assert "too much" in pinned.reason
    assert "ask for less" in pinned.reason
    assert limited.live == [4 * MIB]
    pinned.close()
    assert limited.live == []
    arena.close()


def test_where_nothing_can_be_registered_nothing_is_kept(device: Device) -> None:
    limited: Any = Limited(device, total=0)
    arena = HostArena(2 * MIB)
    with pytest.raises(ResourceExhausted):
        Pinned(arena, limited, bounce_nbytes=4 * MIB, least_nbytes=MIB)
    assert limited.asked == [2 * MIB, 4 * MIB, 2 * MIB, MIB]
    arena.close()
