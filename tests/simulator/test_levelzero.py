"""The Level Zero front by itself: its tables, what an older loader gets, handles as a program would misuse them."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.simulator import build
from tests.simulator.control import Simulator
from tests.simulator.harness import Parent, Simulation
from tests.simulator.needs import LIBRARIES, need

pytestmark = pytest.mark.simulator

DRIVER = build.LIBRARIES["levelzero"]
LOADER, _ = LIBRARIES["levelzero"]
HANDLE = ctypes.c_ubyte * 64


@pytest.fixture(scope="module")
def folder() -> Path:
    return build.build("levelzero")


@pytest.fixture
def machine(folder: Path) -> Simulation:
    need("levelzero")
    return Simulation(folder)


def test_every_table_is_exported_and_nothing_else(folder: Path) -> None:
    listing = ["nm", "-D", "--defined-only", str(folder / DRIVER)]
    done = subprocess.run(listing, capture_output=True, text=True, timeout=30, check=True)
    names = [line.split()[-1] for line in done.stdout.splitlines()]
    tables = [name for name in names if re.fullmatch(r"ze[st]?Get\w+ProcAddrTable", name)]
    assert len(tables) == 75
    assert [name for name in names if name not in tables and not name.startswith("devsim_")] == []


def test_an_older_loader_gets_a_shorter_table(folder: Path) -> None:
    """An entry that a version does not have is left alone: the table on the loader's stack ends before it."""
    library = ctypes.CDLL(str(folder / DRIVER))
    fill = library.zeGetMemProcAddrTable
    newest, oldest = (ctypes.c_void_p * 13)(*[7] * 13), (ctypes.c_void_p * 13)(*[7] * 13)
    assert fill(0x10011, newest) == 0
    assert fill(0x10004, oldest) == 0
    assert [at for at, entry in enumerate(newest) if entry == 7] == [9, 11]  # what the simulator does not have
    assert [at for at, entry in enumerate(oldest) if entry == 7] == [9, 10, 11, 12]
    assert fill(0x20000, newest) == 0x78000002
    assert fill(0x10011, None) == 0x78000007


def test_the_readme_lists_the_switches_of_this_front() -> None:
    readme = (build.HERE / "README.md").read_text()
    definitions = (build.HERE / "levelzero" / "own_switches.def").read_text()
    names = re.findall(r"^SWITCH\((\w+),", definitions, re.MULTILINE)
    assert len(names) == 10
    assert [name for name in names if f"`{name}`" not in readme] == []


class Calls:
    """The real loader, used as carelessly as C allows."""

    def __init__(self) -> None:
        self.sim = Simulator.loaded(DRIVER)
        self.loader = ctypes.CDLL(LOADER)
        self.count = ctypes.c_uint32(1)
        self.driver, self.device, self.context = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        assert self("zeInit", ctypes.c_uint32(0)) == 0
        assert self("zeDriverGet", ctypes.byref(self.count), ctypes.byref(self.driver)) == 0
        assert self("zeDeviceGet", self.driver, ctypes.byref(self.count), ctypes.byref(self.device)) == 0
        desc = (ctypes.c_uint64 * 3)(0xD)
        assert self("zeContextCreate", self.driver, desc, ctypes.byref(self.context)) == 0

    def __call__(self, name: str, *arguments: Any) -> int:
        return int(getattr(self.loader, name)(*arguments)) & 0xFFFFFFFF

    def allocate(self, nbytes: int) -> int:
        out, desc = ctypes.c_void_p(), (ctypes.c_uint64 * 3)(0x15)
        size = ctypes.c_size_t(nbytes)
        assert (
            self("zeMemAllocDevice", self.context, desc, size, ctypes.c_size_t(0), self.device, ctypes.byref(out)) == 0
        )
        return int(out.value or 0)

    def get(self, address: int) -> bytes:
        raw = HANDLE()
        assert self("zeMemGetIpcHandle", self.context, ctypes.c_uint64(address), raw) == 0
        return bytes(raw)

    def open(self, raw: bytes) -> tuple[int, int]:
        class ByValue(ctypes.Structure):
            _fields_ = (("bytes", HANDLE),)

        out = ctypes.c_void_p()
        handle = ByValue.from_buffer_copy(raw)
        status = self("zeMemOpenIpcHandle", self.context, self.device, handle, ctypes.c_uint32(0), ctypes.byref(out))
        return status, int(out.value or 0)


def export_raw(parent: Parent) -> object:
    """Allocate 5000 bytes and 4 MiB; give their handles away as bytes, without descriptors."""
    calls = Calls()
    parent.send([calls.get(calls.allocate(5000)).hex(), calls.get(calls.allocate(4 << 20)).hex()])
    return parent.receive()


def open_raw(parent: Parent) -> object:
    """Open handles whose bytes alone came; return statuses and sizes."""
    calls, found = Calls(), []
    own = calls.allocate(6 << 20)
    calls.get(own)  # one descriptor of our own may have the number that a handle names
    for text in parent.receive():
        status, address = calls.open(bytes.fromhex(text))
        nbytes = ctypes.c_size_t(0)
        if not status:
            calls("zeMemGetAddressRange", calls.context, ctypes.c_uint64(address), None, ctypes.byref(nbytes))
        found.append([status, nbytes.value])
    return found


def exchange(machine: Simulation, **switches: Any) -> list[list[int]]:
    with machine.start(export_raw, **switches) as exporter, machine.start(open_raw, **switches) as importer:
        importer.send(exporter.receive())
        found: list[list[int]] = importer.result()
        exporter.send("end")
        exporter.result()
    return found


@pytest.mark.long
def test_opaque_handles_open_by_their_bytes_where_the_exporter_can_be_traced(machine: Simulation) -> None:
    """The small one opens the driver's pool, at its own place in it."""
    assert exchange(machine) == [[0, 2 << 20], [0, 4 << 20]]
    refused = 0x78000004
    assert exchange(machine, pidfd=0) == [[refused, 0], [refused, 0]]


@pytest.mark.long
def test_older_handles_open_whatever_has_that_number(machine: Simulation) -> None:
    """The trap behind the number: without its descriptor a handle opens nothing, or other memory, without a word."""
    found = exchange(machine, handle_format=0)
    assert all(status == 0x78000004 or nbytes in (2 << 20, 6 << 20) for status, nbytes in found), found
    assert [0, 4 << 20] not in found


@pytest.mark.long
def test_what_an_address_is(machine: Simulation) -> None:
    """Answers of a real driver (compute-runtime 26.27, which needs no device for them)."""
    answers = machine.run(ask_addresses)
    assert answers == {
        "range": [0, 5000],
        "unknown": 0x78000021,
        "free_unknown": 0x78000004,
        "too_much": 0x78000009,
        "nothing": 0x78000009,
        "bad_event": 0x78000004,
        "pool_not_shared": 0x78000003,
        "high": True,
    }


def ask_addresses(_parent: Parent) -> dict[str, Any]:
    calls, nbytes, out = Calls(), ctypes.c_size_t(0), ctypes.c_void_p()
    block = calls.allocate(5000)
    desc, zero = (ctypes.c_uint64 * 3)(0x15), ctypes.c_size_t(0)
    sizes = {"too_much": ctypes.c_size_t(1 << 50), "nothing": zero}
    pool, pool_desc = ctypes.c_void_p(), (ctypes.c_uint64 * 3)(0x10, 0, 1 | 4 << 32)
    event_desc = (ctypes.c_uint64 * 4)(0x11, 0, 4)
    assert calls("zeEventPoolCreate", calls.context, pool_desc, ctypes.c_uint32(0), None, ctypes.byref(pool)) == 0
    answers: dict[str, Any] = {
        "range": [
            calls("zeMemGetAddressRange", calls.context, ctypes.c_uint64(block), None, ctypes.byref(nbytes)),
            nbytes.value,
        ],
        "unknown": calls("zeMemGetAddressRange", calls.context, ctypes.c_uint64(4096), None, ctypes.byref(nbytes)),
        "free_unknown": calls("zeMemFree", calls.context, ctypes.c_uint64(4096)),
        "bad_event": calls("zeEventCreate", pool, event_desc, ctypes.byref(out)),
        "pool_not_shared": calls("zeEventPoolGetIpcHandle", pool, HANDLE()),
        "high": block > 2**63,
    }
    for name, size in sizes.items():
        answers[name] = calls("zeMemAllocDevice", calls.context, desc, size, zero, calls.device, ctypes.byref(out))
    return answers
