"""State machines: the same random steps on the backend and on the host backend, whose answers must be alike.

Owns the two sides and the steps; Hypothesis chooses and replays them. A side is memory or a fence of one device with
something that imports it: a peer for the backend on trial, this process for the oracle. Only what every backend must
answer alike is compared; what a profile declares (memory that was freed while it is mapped) is not tried here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from devipc.conformance import roles_memory, roles_state
from devipc.conformance.peers import Peer
from devipc.conformance.rig import Rig
from devipc.conformance.sharing import send
from devipc.errors import CapabilityError, DevIPCError, HandleError, UsageError
from devipc.interfaces.memory import Allocation
from devipc.types import ExportedExtent, HandleKind, MemoryKind, OpenedExtent

__all__ = ["Importer", "LocalImporter", "MemoryMachine", "MemorySide", "PeerImporter", "run_machine"]

LARGEST = 128 << 10
_FAMILIES = (UsageError, HandleError, CapabilityError)


def run_machine(factory: Callable[[], RuleBasedStateMachine], *, examples: int) -> None:
    """Run a machine with short walks first, so that the first failure is a short one; the same walks every time."""
    for steps in (4, 12, 32):
        chosen = settings(
            max_examples=examples,
            stateful_step_count=steps,
            phases=(Phase.generate,),
            derandomize=True,
            deadline=None,
            database=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        )
        run_state_machine_as_test(factory, settings=chosen)  # type: ignore[arg-type]


def outcome(call: Callable[[], Any]) -> tuple[str, Any]:
    """Return ``("ok", value)``, or the family of a typed refusal."""
    try:
        return "ok", call()
    except DevIPCError as error:
        return next((family.__name__ for family in _FAMILIES if isinstance(error, family)), type(error).__name__), None


class Importer(Protocol):
    """Whoever opens what a side exports."""

    def open(self, extent: ExportedExtent) -> int:
        """Map it; return a key."""

    def digest(self, key: int, offset: int, nbytes: int) -> str:
        """Return a digest of what the mapping shows."""

    def fill(self, key: int, offset: int, nbytes: int, seed: int) -> None:
        """Write the content of a seed."""

    def close(self, key: int) -> None:
        """Unmap it."""


class PeerImporter:
    """Another process."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer

    def open(self, extent: ExportedExtent) -> int:
        """See :class:`Importer`."""
        return int(self.peer.call(roles_memory.open_extent, **send(extent)).body["key"])

    def digest(self, key: int, offset: int, nbytes: int) -> str:
        """See :class:`Importer`."""
        return str(self.peer.call(roles_state.digest, key=key, offset=offset, nbytes=nbytes).body["digest"])

    def fill(self, key: int, offset: int, nbytes: int, seed: int) -> None:
        """See :class:`Importer`."""
        self.peer.call(roles_memory.fill, key=key, offset=offset, nbytes=nbytes, seed=seed)

    def close(self, key: int) -> None:
        """See :class:`Importer`."""
        if self.peer.usable:
            self.peer.call(roles_memory.close_mapping, key=key)


class LocalImporter:
    """This process, where the device gives aliases of its own memory."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._opened: list[OpenedExtent] = []

    def open(self, extent: ExportedExtent) -> int:
        """See :class:`Importer`."""
        self._opened.append(self._rig.memory.open(extent))
        return len(self._opened) - 1

    def digest(self, key: int, offset: int, nbytes: int) -> str:
        """See :class:`Importer`."""
        return hashlib.sha256(self._rig.read(self._opened[key].ptr + offset, nbytes)).hexdigest()

    def fill(self, key: int, offset: int, nbytes: int, seed: int) -> None:
        """See :class:`Importer`."""
        self._rig.fill(self._opened[key].ptr + offset, nbytes, seed)

    def close(self, key: int) -> None:
        """See :class:`Importer`."""
        self._rig.memory.close(self._opened[key])


@dataclass(slots=True)
class MemorySide:
    """Memory of one device, and whoever imports it. Numbers stand for what was made, the same on both sides."""

    rig: Rig
    kind: HandleKind
    importer: Importer
    allocations: list[Allocation] = field(default_factory=list)
    extents: list[ExportedExtent] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)

    def allocate(self, nbytes: int) -> None:
        """Allocate zeros."""
        self.allocations.append(self.rig.memory.allocate(nbytes, kind=self.kind, zero=True))

    def fill(self, index: int, offset: int, nbytes: int, seed: int) -> None:
        """Write in the exporter."""
        self.rig.fill(self.allocations[index].ptr + offset, nbytes, seed)

    def copy(self, target: int, to: int, source: int, at: int, nbytes: int) -> None:
        """Copy between two allocations."""
        dst, src = self.allocations[target].ptr + to, self.allocations[source].ptr + at
        self.rig.transfer.copy(self.rig.stream, dst, src, nbytes)
        self.rig.finish(self.rig.stream, "a copy between two allocations")

    def export(self, index: int, offset: int, nbytes: int) -> tuple[int, int]:
        """Export a range; return what everybody must agree on."""
        allocation = self.allocations[index]
        length = nbytes if nbytes >= 0 else allocation.nbytes - offset - nbytes  # negative: so far beyond the end
        extent = self.rig.memory.export(allocation.ptr + offset, length)
        self.extents.append(extent)
        return len(extent.chunks), extent.nbytes

    def describe(self, index: int, offset: int) -> tuple[bool, bool, bool]:
        """Describe an address in a live allocation."""
        allocation = self.allocations[index]
        info = self.rig.memory.describe(allocation.ptr + offset)
        device = info.kind in (MemoryKind.DEVICE, MemoryKind.VMM, MemoryKind.POOL)
        return (info.base, info.nbytes) == (allocation.ptr, allocation.nbytes), device, self.kind in info.exportable

    def digest(self, index: int, nbytes: int) -> str:
        """Return a digest of what the exporter holds."""
        return hashlib.sha256(self.rig.read(self.allocations[index].ptr, nbytes)).hexdigest()

    def open(self, index: int) -> None:
        """Let the importer map an export."""
        self.keys.append(self.importer.open(self.extents[index]))

    def free(self, index: int) -> None:
        """Free an allocation."""
        self.rig.memory.free(self.allocations[index])

    def release(self, index: int) -> None:
        """Take an export back."""
        self.rig.memory.release(self.extents[index])


class MemoryMachine(RuleBasedStateMachine):
    """Allocate, write, copy, export, open, close, release and free, in any order that the contract allows."""

    def __init__(self, subject: MemorySide, oracle: MemorySide) -> None:
        super().__init__()
        self.sides = (subject, oracle)
        self.sizes: list[int] = []
        self.live: list[int] = []
        self.freed: list[int] = []
        self.ranges: list[tuple[int, int, int]] = []  # allocation, offset, length of each export
        self.exports: list[int] = []
        self.mappings: dict[int, int] = {}  # mapping and its export
        self.opened = 0

    def alike(self, what: str, call: Callable[[MemorySide], Any]) -> tuple[str, Any]:
        """Do one step on both sides and compare."""
        found, expected = (outcome(lambda side=side: call(side)) for side in self.sides)  # type: ignore[misc]
        assert found == expected, f"{what}: {found}, and on the host backend {expected}"
        return expected

    def mapped(self, allocation: int) -> bool:
        """Return whether anybody has the allocation open."""
        return any(self.ranges[export][0] == allocation for export in self.mappings.values())

    @rule(nbytes=st.sampled_from([1, 4096, 5000, 64 << 10, LARGEST]))
    def allocate(self, nbytes: int) -> None:
        """Allocate."""
        if len(self.live) < 4:
            self.alike("allocate", lambda side: side.allocate(nbytes))
            self.live.append(len(self.sizes))
            self.sizes.append(nbytes)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), seed=st.integers(1, 2**30))
    def fill(self, data: st.DataObject, seed: int) -> None:
        """Write in the exporter."""
        index, offset, nbytes = self.pick_range(data)
        self.alike("fill", lambda side: side.fill(index, offset, nbytes, seed))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def copy(self, data: st.DataObject) -> None:
        """Copy between two places that do not overlap."""
        source, at, nbytes = self.pick_range(data)
        target = data.draw(st.sampled_from(self.live))
        to = data.draw(st.integers(0, max(0, self.sizes[target] - nbytes)))
        if nbytes <= self.sizes[target] and not (target == source and at < to + nbytes and to < at + nbytes):
            self.alike("copy", lambda side: side.copy(target, to, source, at, nbytes))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def export(self, data: st.DataObject) -> None:
        """Export a range."""
        wanted = self.pick_range(data)
        self.alike("export", lambda side: side.export(*wanted))
        self.exports.append(len(self.ranges))
        self.ranges.append(wanted)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), beyond=st.sampled_from([1, 4096, 2**40]))
    def export_too_much(self, data: st.DataObject, beyond: int) -> None:
        """Export a range that leaves its allocation."""
        index, offset, _ = self.pick_range(data)
        kind, _ = self.alike("export beyond the end", lambda side: side.export(index, offset, -beyond))
        assert kind == "UsageError"

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def describe(self, data: st.DataObject) -> None:
        """Describe an address."""
        index, offset, _ = self.pick_range(data)
        self.alike("describe", lambda side: side.describe(index, offset))

    @precondition(lambda self: any(self.ranges[export][0] in self.live for export in self.exports))
    @rule(data=st.data())
    def open(self, data: st.DataObject) -> None:
        """Let the importer map an export of live memory."""
        export = data.draw(st.sampled_from([one for one in self.exports if self.ranges[one][0] in self.live]))
        if len(self.mappings) < 6:
            self.alike("open", lambda side: side.open(export))
            self.mappings[self.opened] = export
            self.opened += 1

    @precondition(lambda self: self.mappings)
    @rule(data=st.data(), seed=st.integers(1, 2**30))
    def fill_mapping(self, data: st.DataObject, seed: int) -> None:
        """Write in the importer."""
        mapping = data.draw(st.sampled_from(sorted(self.mappings)))
        nbytes = self.ranges[self.mappings[mapping]][2]
        start = data.draw(st.integers(0, nbytes - 1))
        self.alike(
            "fill through a mapping", lambda side: side.importer.fill(side.keys[mapping], start, nbytes - start, seed)
        )

    @precondition(lambda self: self.mappings)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        """Unmap in the importer."""
        mapping = data.draw(st.sampled_from(sorted(self.mappings)))
        self.alike("close", lambda side: side.importer.close(side.keys[mapping]))
        del self.mappings[mapping]

    @precondition(lambda self: self.exports)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """Take an export back, mapped or not."""
        export = data.draw(st.sampled_from(self.exports))
        self.alike("release", lambda side: side.release(export))
        self.exports.remove(export)

    @precondition(lambda self: any(not self.mapped(index) for index in self.live))
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        """Free memory that nobody has open."""
        index = data.draw(st.sampled_from([one for one in self.live if not self.mapped(one)]))
        self.alike("free", lambda side: side.free(index))
        self.live.remove(index)
        self.freed.append(index)

    @precondition(lambda self: self.freed)
    @rule(data=st.data())
    def free_again(self, data: st.DataObject) -> None:
        """Free memory a second time."""
        index = data.draw(st.sampled_from(self.freed))
        kind, _ = self.alike("free again", lambda side: side.free(index))
        assert kind == "UsageError"

    @rule()
    def compare(self) -> None:
        """Compare everything that both processes see."""
        for index in self.live:
            self.alike(f"allocation {index}", lambda side, index=index: side.digest(index, self.sizes[index]))  # type: ignore[misc]
        for mapping, export in self.mappings.items():
            nbytes = self.ranges[export][2]
            self.alike(
                f"mapping {mapping}",
                lambda side, mapping=mapping, nbytes=nbytes: side.importer.digest(side.keys[mapping], 0, nbytes),  # type: ignore[misc]
            )

    def pick_range(self, data: st.DataObject) -> tuple[int, int, int]:
        """Draw a range of a live allocation."""
        index = data.draw(st.sampled_from(self.live))
        offset = data.draw(st.sampled_from([0, 0, 1, 4096, self.sizes[index] // 2, self.sizes[index] - 1]))
        offset = min(offset, self.sizes[index] - 1)
        return index, offset, data.draw(st.integers(1, self.sizes[index] - offset))

    def teardown(self) -> None:
        """Compare once more, and give everything back."""
        self.compare()
        for side in self.sides:
            for mapping in self.mappings:
                side.importer.close(side.keys[mapping])
            for export in self.exports:
                side.release(export)
            for index in self.live:
                side.free(index)
