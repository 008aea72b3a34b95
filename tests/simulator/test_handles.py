"""Classic handles: their variants, their leaks, and what a wrong open gives."""

from __future__ import annotations

import os
import signal

import pytest

from tests.simulator.control import Simulator
from tests.simulator.harness import ChildFailed, Parent, Simulation
from tests.simulator.programs import MIB, code, fetch, world

pytestmark = pytest.mark.simulator


def export(pointer: int) -> str:
    from cuda.bindings import driver as cu

    from tests.simulator.trace_cases.world import need, raw

    return raw(need(cu.cuIpcGetMemHandle(pointer))).hex()


def load(handle: str) -> tuple[str, int]:
    from cuda.bindings import driver as cu

    from tests.simulator.trace_cases.world import from_raw

    answer = cu.cuIpcOpenMemHandle(from_raw(cu.CUipcMemHandle, bytes.fromhex(handle)), 1)
    return code(answer), int(answer[1] or 0)


def exporter(parent: Parent) -> object:
    """Exports a big allocation of sixes and two small ones, as asked; frees on demand."""
    from cuda.bindings import driver as cu

    from tests.simulator.trace_cases.world import need, raw

    w, sim = world(), Simulator.loaded()
    big, first, second = (int(need(cu.cuMemAlloc(n))) for n in (4 * MIB, 1000, 1000))
    for pointer, nbytes, value in ((big, 4 * MIB, 6), (first, 1000, 1), (second, 1000, 2)):
        need(cu.cuMemsetD8(pointer, value, nbytes))
    names = {"big": big, "interior": big + 4096, "first": first, "second": second}
    names |= {"pinned": w.pinned(4096), "physical": w.mapped(1)}
    parent.send({"distance": second % (2 * MIB), "same_block": first // (2 * MIB) == second // (2 * MIB)})
    while (wish := parent.receive()) != "end":
        if wish == "free":
            parent.send([code(cu.cuMemFree(pointer)) for pointer in (big, first, second)])
        elif wish == "report":
            parent.send({**sim.report().counters, "used": sim.used_bytes()})
        elif wish in names:
            answer = cu.cuIpcGetMemHandle(names[wish])
            parent.send(raw(answer[1]).hex() if code(answer) == "SUCCESS" else code(answer))
    return None


def ask(child: object, wish: str) -> object:
    child.send(wish)  # type: ignore[attr-defined]
    return child.receive()  # type: ignore[attr-defined]


def importer(parent: Parent, handle: str, offset: int = 0) -> object:
    """Opens twice and tells all about it."""
    from cuda.bindings import driver as cu

    from tests.simulator.trace_cases.world import need

    world()
    sim = Simulator.loaded()
    first, pointer = load(handle)
    if first != "SUCCESS":
        return {"open": first}
    second, again = load(handle)
    _, size = need(cu.cuMemGetAddressRange(pointer))
    seen = [fetch(pointer, 1)[0], fetch(pointer + offset, 1)[0] if int(size) > offset else None]
    closes = [code(cu.cuIpcCloseMemHandle(pointer)), code(cu.cuIpcCloseMemHandle(again or pointer))]
    report = sim.report()
    return {
        "open": first,
        "second": [second, again == pointer],
        "size": int(size),
        "seen": seen,
        "closes": closes,
        "mappings": report["live_mappings"],
        "driver_opens": report["driver_opens"],
        "leaked": report["leaked"],
        "wrong": report["wrong_attaches"],
    }


def test_opening_twice(sim: Simulation) -> None:
    with sim.start(exporter) as owner:
        owner.receive()
        handle = ask(owner, "big")
        counted, refused, apart = (sim.run(importer, handle, second_open=mode) for mode in (0, 1, 2))
        owner.send("end")
    assert (counted["second"], counted["closes"], counted["driver_opens"]) == (["SUCCESS", True], ["SUCCESS"] * 2, 1)
    assert refused["second"] == ["ALREADY_MAPPED", False]
    assert refused["closes"] == ["SUCCESS", "INVALID_VALUE"]
    assert (apart["second"], apart["closes"], apart["driver_opens"]) == (["SUCCESS", False], ["SUCCESS"] * 2, 2)
    assert counted["mappings"] == refused["mappings"] == apart["mappings"] == 0


def test_where_a_small_allocation_opens(sim: Simulation) -> None:
    """At itself, neighbours out of bounds; with the switch at the block that it shares with them."""
    with sim.start(exporter) as owner:
        placed = owner.receive()
        handle = ask(owner, "second")
        itself = sim.run(importer, handle)
        block = sim.run(importer, handle, placed["distance"], small_open=1)
        owner.send("end")
    assert placed["same_block"]
    assert (itself["size"], itself["seen"]) == (1000, [2, 2])
    assert (block["size"], block["seen"]) == (2 * MIB, [1, 2])


def test_handle_bytes_and_interior_pointers(sim: Simulation) -> None:
    with sim.start(exporter) as owner:
        owner.receive()
        assert ask(owner, "big") == ask(owner, "big") == ask(owner, "interior")
        owner.send("end")
    with sim.start(exporter, handle_random=1, handle_interior=0) as owner:
        owner.receive()
        one, other = ask(owner, "big"), ask(owner, "big")
        assert one != other
        assert sim.run(importer, one)["seen"] == sim.run(importer, other)["seen"] == [6, 6]
        assert ask(owner, "interior") == "INVALID_VALUE"
        owner.send("end")


def test_kinds_that_are_not_classic(sim: Simulation) -> None:
    """Refused and counted; with the switch accepted, and then they do not open."""
    with sim.start(exporter) as owner:
        owner.receive()
        assert [ask(owner, "pinned"), ask(owner, "physical")] == ["INVALID_VALUE"] * 2
        assert ask(owner, "report")["legacy_exports_of_other_kinds"] == 2  # type: ignore[index]
        owner.send("end")
    with sim.start(exporter, legacy_any_kind=1) as owner:
        owner.receive()
        assert sim.run(importer, ask(owner, "physical"))["open"] == "MAP_FAILED"
        owner.send("end")


def test_platform_without_classic_handles(sim: Simulation) -> None:
    with sim.start(exporter, ipc=0) as owner:
        owner.receive()
        assert ask(owner, "big") == "NOT_SUPPORTED"
        owner.send("end")


def own_handle(parent: Parent) -> object:
    w = world()
    opened = load(export(w.alloc(4 * MIB)))
    return opened[0]


def test_opening_an_own_handle(sim: Simulation) -> None:
    assert sim.run(own_handle) == "INVALID_CONTEXT"
    assert sim.run(own_handle, self_open=1) == "SUCCESS"


def test_an_open_that_attaches_other_memory(sim: Simulation) -> None:
    """Every second open succeeds with the wrong bytes."""
    with sim.start(exporter) as owner:
        owner.receive()
        found = sim.run(opens_in_turn, ask(owner, "big"), wrong_attach=2)
        owner.send("end")
    assert found == {"seen": [6, 0xEE, 6, 0xEE], "wrong": 2}


def opens_in_turn(parent: Parent, handle: str) -> object:
    from cuda.bindings import driver as cu

    world()
    seen = []
    for _ in range(4):
        _, pointer = load(handle)
        seen.append(fetch(pointer, 1)[0])
        cu.cuIpcCloseMemHandle(pointer)
    return {"seen": seen, "wrong": Simulator.loaded().report()["wrong_attaches"]}


def test_leaks_are_leaks(sim: Simulation) -> None:
    """Per export the memory stays, per open one fd stays, small exported blocks stay."""
    with sim.start(exporter, leak_export=1, leak_small=1) as owner:
        owner.receive()
        handle = ask(owner, "big")
        ask(owner, "second")
        answer = sim.run(importer, handle, leak_open=1, second_open=2)
        assert answer["leaked"] == 2
        assert ask(owner, "free") == ["SUCCESS"] * 3
        report = ask(owner, "report")
        owner.send("end")
    assert report["leaked"] == 3  # type: ignore[index]
    assert report["used"] == 2 * MIB + 4 * MIB + 2 * MIB  # type: ignore[index]
    with sim.start(exporter) as owner:
        owner.receive()
        ask(owner, "big"), ask(owner, "second"), ask(owner, "free")
        report = ask(owner, "report")
        owner.send("end")
    assert (report["leaked"], report["used"]) == (0, 2 * MIB)  # type: ignore[index]  # the mapped chunk


def freed_reader(parent: Parent, handle: str) -> object:
    world()
    _, pointer = load(handle)
    parent.send("open")
    parent.receive()
    seen = fetch(pointer, 1)[0]
    return {"seen": seen, "reads": Simulator.loaded().report()["reads_of_freed"]}


@pytest.mark.parametrize(("poison", "seen"), [(0, 6), (1, 0xDB)])
def test_reads_of_freed_memory_are_counted(sim: Simulation, poison: int, seen: int) -> None:
    """Freed memory stays readable through a mapping; the switch overwrites it."""
    with sim.start(exporter, poison_freed=poison) as owner:
        owner.receive()
        with sim.start(freed_reader, ask(owner, "big")) as reader:
            reader.receive()
            ask(owner, "free")
            reader.send("read")
            assert reader.result() == {"seen": seen, "reads": 1}
        owner.send("end")


def close_twice(parent: Parent, handle: str) -> object:
    from cuda.bindings import driver as cu

    world()
    _, pointer = load(handle)
    answers = [code(cu.cuIpcCloseMemHandle(pointer)) for _ in range(2)]
    return [answers, Simulator.loaded().report()["double_closes"]]


def test_a_second_close(sim: Simulation) -> None:
    with sim.start(exporter) as owner:
        owner.receive()
        handle = ask(owner, "big")
        assert sim.run(close_twice, handle) == [["SUCCESS", "INVALID_VALUE"], 1]
        with sim.start(close_twice, handle, double_close_abort=1) as child:
            assert child.status() == -signal.SIGABRT
        owner.send("end")


def test_a_slow_and_an_endless_open(sim: Simulation) -> None:
    with sim.start(exporter) as owner:
        owner.receive()
        handle = ask(owner, "big")
        assert sim.run(importer, handle, fault="cuIpcOpenMemHandle_v2@1=sleep:100")["open"] == "SUCCESS"
        with sim.start(importer, handle, fault="cuIpcOpenMemHandle_v2@1=hang") as child:
            with pytest.raises(ChildFailed, match="silent"):
                child.result(1.0)
        assert sim.run(importer, handle, fault="cuIpcOpenMemHandle_v2@1=205")["open"] == "MAP_FAILED"
        owner.send("end")


def test_handles_of_an_exporter_that_freed_or_died(sim: Simulation) -> None:
    with sim.start(exporter) as owner:
        owner.receive()
        handle = ask(owner, "big")
        assert sim.run(importer, handle)["open"] == "SUCCESS"
        ask(owner, "free")
        assert sim.run(importer, handle)["open"] == "INVALID_VALUE"
        owner.kill()
        owner.status()
        assert sim.run(importer, handle)["open"] == "INVALID_HANDLE"


def namesake(parent: Parent, memory: str, event: str) -> object:
    """Handles of a process with this one's number, as one of another pid namespace may have."""
    from cuda.bindings import driver as cu

    from tests.simulator.trace_cases.world import from_raw

    world()
    number = os.getpid().to_bytes(4, "little")
    own = [bytes.fromhex(data)[:4] + number + bytes.fromhex(data)[8:] for data in (memory, event)]
    return [
        code(cu.cuIpcOpenMemHandle(from_raw(cu.CUipcMemHandle, own[0]), 1)),
        code(cu.cuIpcOpenEventHandle(from_raw(cu.CUipcEventHandle, own[1]))),
    ]


def both(parent: Parent) -> object:
    from cuda.bindings import driver as cu

    from tests.simulator.trace_cases.world import need, raw

    w = world()
    parent.send([export(w.alloc(4 * MIB)), raw(need(cu.cuIpcGetEventHandle(w.event(6)))).hex()])
    return parent.receive()


def test_a_peer_with_an_equal_number_is_taken_for_this_process(sim: Simulation) -> None:
    with sim.start(both) as owner:
        assert sim.run(namesake, *owner.receive()) == ["INVALID_CONTEXT"] * 2
        owner.send("end")


def neighbours(parent: Parent, first: str, second: str) -> object:
    from cuda.bindings import driver as cu

    world()
    sim = Simulator.loaded()
    before = sim.report()["reserved_bytes"]
    (_, a), (_, b) = load(first), load(second)
    found = [b - a, sim.report()["reserved_bytes"] - before]
    answers = [code(cu.cuIpcCloseMemHandle(a)), fetch(b, 1)[0], code(cu.cuIpcCloseMemHandle(b))]
    return [*found, answers, sim.report()["reserved_bytes"] - before]


def test_neighbours_open_inside_one_mapping(sim: Simulation) -> None:
    """Two small allocations of a block share its addresses; they go with the last of both."""
    with sim.start(exporter) as owner:
        owner.receive()
        first, second = ask(owner, "first"), ask(owner, "second")
        found = sim.run(neighbours, first, second)
        assert found == [1024, 2 * MIB, ["SUCCESS", 2, "SUCCESS"], 0]
        apart = sim.run(neighbours, first, second, second_open=2)
        assert apart[1:] == [4 * MIB, ["SUCCESS", 2, "SUCCESS"], 0]
        owner.send("end")
