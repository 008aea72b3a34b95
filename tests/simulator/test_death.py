"""Late writes: what a killed process's queued work does, and when it is over."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import time
from typing import Any

import pytest

from tests.simulator.control import Simulator
from tests.simulator.harness import Parent, Simulation
from tests.simulator.programs import MIB, code, fetch, shared_words, world
from tests.simulator.test_handles import export, load

pytestmark = [pytest.mark.simulator, pytest.mark.chaos]
NBYTES = 16 * MIB


def victim(parent: Parent, handle: str, words: int, link: int, held: bool) -> object:
    """Queues a copy into the peer's memory and a value into the shared page, then waits for its end."""
    from cuda.bindings import driver as cu

    from tests.simulator.trace_cases.world import need

    w, sim = world(), Simulator.loaded()
    _, pointer = load(handle)
    _area, address = shared_words(words)
    need(cu.cuMemHostRegister(address, 4096, 3))
    source = w.pinned(NBYTES)
    ctypes.memset(source, 7, NBYTES)
    need(cu.cuMemsetD8(pointer, 0, NBYTES))
    sim.stall()
    if held:
        need(cu.cuStreamWaitValue64(w.stream, address + 64, 1, 0))  # nobody ever writes it
    need(cu.cuMemcpyHtoDAsync(pointer, source, NBYTES, w.stream))
    need(cu.cuStreamWriteValue64(w.stream, address, 99, 0))
    socket.socket(fileno=link)  # its end of the link goes with the process
    parent.send("queued")
    parent.receive()
    return code(cu.cuStreamQuery(w.stream))


def watcher(parent: Parent, words: int) -> object:
    """Owns the memory; looks at it, at the link and at the pidfd around the peer's death."""
    w = world()
    pointer = w.alloc(NBYTES)
    area, _ = shared_words(words)
    parent.send(export(pointer))
    pid = parent.receive()
    handle = os.pidfd_open(pid)

    def landed() -> int:
        return fetch(pointer, NBYTES).count(7)

    before = landed()
    os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    first = landed()
    gone_at_first = bool(select.select([handle], [], [], 0)[0])
    select.select([handle], [], [], 10)
    gone_after = time.monotonic() - began
    last, word = landed(), int.from_bytes(area[:8], "little")
    area[:8] = bytes(8)
    time.sleep(0.05)
    silent = landed() == last and area[:8] == bytes(8)
    os.close(handle)
    return {
        "before": before, "first": first, "gone_at_first": gone_at_first, "gone_after": gone_after,
        "last": last, "word": word, "silent": silent,
    }  # fmt: skip


def act(sim: Simulation, held: bool = False, **switches: int) -> dict[str, Any]:
    """Plays the death; adds how soon the link hung up."""
    words = os.memfd_create("words")
    os.ftruncate(words, 4096)
    near, far = socket.socketpair()
    variables = {f"DEVSIM_{name.upper()}": str(value) for name, value in switches.items()}
    try:
        with sim.start(watcher, words, fds=(words,)) as owner:
            handle = owner.receive()
            descriptors = (words, far.fileno())
            with sim.start(victim, handle, words, far.fileno(), held, fds=descriptors, variables=variables) as child:
                far.close()
                assert child.receive() == "queued"
                owner.send(child.pid)
                near.settimeout(10)
                assert near.recv(1) == b""
                hung_up = time.monotonic()
                found = dict(owner.result())
                assert child.status() == -signal.SIGKILL
                found["link_before_gone"] = time.monotonic() - hung_up
    finally:
        os.close(words)
        near.close()
    return found


def test_queued_writes_land_after_the_kill(sim: Simulation) -> None:
    """The link hangs up at once, bytes land later, only the pidfd ends it."""
    found = act(sim, late_ms=150, late_quiet_ms=100)
    assert found["before"] == 0
    assert found["first"] < NBYTES
    assert not found["gone_at_first"]
    assert found["last"] == NBYTES
    assert found["word"] == 99
    assert found["silent"]
    assert found["gone_after"] >= 0.2
    assert found["link_before_gone"] >= 0.1


def test_without_the_switch_nothing_lands(sim: Simulation) -> None:
    found = act(sim)
    assert (found["before"], found["last"], found["word"], found["silent"]) == (0, 0, 0, True)


def test_a_wait_nobody_satisfies_holds_the_rest_back(sim: Simulation) -> None:
    found = act(sim, held=True, late_ms=50, late_quiet_ms=0)
    assert (found["last"], found["word"], found["silent"]) == (0, 0, True)


def clean_exit(parent: Parent) -> object:
    world()
    return None


def test_a_clean_exit_is_quick_and_leaves_no_helper(sim: Simulation) -> None:
    with sim.start(clean_exit, late_ms=5000, late_quiet_ms=5000) as child:
        began = time.monotonic()
        child.result()
        assert time.monotonic() - began < 4
    time.sleep(0.1)
    assert helpers(sim.room) == []


def helpers(room: str) -> list[str]:
    """Processes that still carry this room in their environment."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                if f"DEVSIM_ROOM={room}".encode() in file.read():
                    found.append(pid)
        except OSError:
            continue
    return found


def test_a_killed_process_leaves_no_helper(sim: Simulation) -> None:
    act(sim, late_ms=20, late_quiet_ms=0)
    deadline = time.monotonic() + 2
    while helpers(sim.room) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert helpers(sim.room) == []


def dies_at(parent: Parent) -> object:
    """A little of everything, to be killed anywhere in it."""
    from cuda.bindings import driver as cu

    w = world()
    pointer, pinned = w.alloc(4 * MIB), w.pinned(4096)
    cu.cuMemcpyAsync(pinned, pointer, 4096, w.stream)
    cu.cuEventRecord(w.event(6), w.stream)
    w.mapped(2)
    w.pooled(4096, w.pool())
    return code(cu.cuStreamSynchronize(w.stream))


@pytest.mark.parametrize("n", [2, 7, 11, 19])
def test_memory_of_a_process_killed_at_any_call_comes_back(sim: Simulation, n: int) -> None:
    with sim.start(dies_at, fault=f"*@{n}=kill", late_ms=10) as child:
        assert child.status() == -signal.SIGKILL
    assert sim.run(used) == 0


def used(parent: Parent) -> object:
    world()
    return Simulator.loaded().used_bytes()
