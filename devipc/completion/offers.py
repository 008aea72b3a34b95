"""What a device offers for completion, without trying it.

Owns the step from primitives that are present to strategies that can be tried. Nothing is created and no driver is
asked; the chooser tries.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping

from devipc.capabilities import Capability, Verdict
from devipc.interfaces.backend import Device
from devipc.types import Mechanism, Strategy

__all__ = ["AUTOMATIC", "is_offered", "offers", "words_are_proven"]

AUTOMATIC = (Strategy.STREAM_MEMOP, Strategy.HOST_FLAG, Strategy.POLLING)
"""What is tried when nobody asks for a strategy, best first. ``event`` is used on request only."""
_PROVEN_MACHINE = "x86_64"
_NOT_TRIED = "offered, and not tried yet"


def words_are_proven(strategy: Strategy, *, machine: str | None = None) -> bool:
    """Return True when words that one side stores and the other loads are known not to tear on this machine.

    ``polling`` needs less than the others: its word is stored by host code, followed by a system call.
    """
    return strategy is Strategy.POLLING or (machine or platform.machine()) == _PROVEN_MACHINE


def is_offered(capability: Capability) -> bool:
    """Return True when there is something to be tried: neither refused nor known to be broken."""
    return capability.verdict in (Verdict.YES, Verdict.UNTESTED)


def offers(device: Device, *, machine: str | None = None) -> dict[Strategy, Capability]:
    """Return for every strategy whether ``device`` has what it needs. Cheap; makes no driver call.

    ``machine`` is what ``platform.machine()`` says, to be passed by tests alone.

    Returns
    -------
    dict
        ``no`` with the reason where a primitive is absent. ``untested`` is an offer: nobody has tried it, or the
        machine is one on which words were never proven and which is therefore not chosen automatically.
    """
    if device.transfer is None:
        return dict.fromkeys(Strategy, _absent(device, "transfer", "it has no streams"))
    found = {
        Strategy.STREAM_MEMOP: _memop(device),
        Strategy.HOST_FLAG: _flag(device),
        Strategy.POLLING: Capability.untested(_NOT_TRIED),
        Strategy.EVENT: _event(device),
    }
    machine = machine or platform.machine()
    unproven = Capability.untested(
        f"whether words tear or arrive out of order was never proven on {machine}",
        remedy="use polling, or ask for this strategy by name and let the trial decide",
    )
    return {
        strategy: answer if not is_offered(answer) or words_are_proven(strategy, machine=machine) else unproven
        for strategy, answer in found.items()
    }


def _memop(device: Device) -> Capability:
    sync = device.sync
    if sync is None:
        return _absent(device, "sync", "it has no sync interface")
    known = sync.mechanisms()
    if sync.word_writes is None or sync.word_waits is None:
        missing = "word writes" if sync.word_writes is None else "word waits"
        return _refused(known, Mechanism.STREAM_MEMOP, f"the device has no {missing}")
    return known.get(Mechanism.STREAM_MEMOP, Capability.untested(_NOT_TRIED))


def _flag(device: Device) -> Capability:
    if (device.sync is None or device.sync.word_writes is None) and device.memory is None:
        return _absent(device, "memory", "it has neither word writes nor device memory to copy a word through")
    return Capability.untested(_NOT_TRIED)


def _event(device: Device) -> Capability:
    sync = device.sync
    if sync is None:
        return _absent(device, "sync", "it has no sync interface")
    known = sync.mechanisms()
    if sync.events is None:
        return _refused(known, Mechanism.EVENT, "the device has no inter-process events")
    return known.get(Mechanism.EVENT, Capability.untested(_NOT_TRIED))


def _refused(known: Mapping[Mechanism, Capability], mechanism: Mechanism, reason: str) -> Capability:
    """Return the backend's own reason where it gives one that is no offer."""
    answer = known.get(mechanism)
    return answer if answer is not None and not is_offered(answer) else Capability.no(reason)


def _absent(device: Device, interface: str, reason: str) -> Capability:
    answer = device.capabilities().get(interface)
    return answer if answer is not None and not is_offered(answer) else Capability.no(reason)
