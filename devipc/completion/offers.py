"""What a device offers for completion, without trying it.

Owns the step from primitives that are present to strategies that can be tried. Nothing is created and no driver is
asked; the chooser tries.
"""

from __future__ import annotations

import platform

from devipc.absence import absence
from devipc.capabilities import Capability, is_offered
from devipc.interfaces.backend import Device
from devipc.types import Mechanism, Strategy

__all__ = ["AUTOMATIC", "offers", "words_are_proven"]

AUTOMATIC = (Strategy.STREAM_MEMOP, Strategy.HOST_FLAG, Strategy.POLLING)
"""What is tried when nobody asks for a strategy, best first. ``event`` is used on request only."""
_PROVEN_MACHINE = "x86_64"
_NOT_TRIED = "offered, and not tried yet"


def words_are_proven(strategy: Strategy, *, machine: str | None = None) -> bool:
    """Return True when words that one side stores and the other loads are known not to tear on this machine.

    ``polling`` needs less than the others: its word is stored by host code, followed by a system call.
    """
    return strategy is Strategy.POLLING or (machine or platform.machine()) == _PROVEN_MACHINE


def offers(device: Device, *, machine: str | None = None) -> dict[Strategy, Capability]:
    """Return for every strategy whether ``device`` has what it needs. Cheap; makes no driver call.

    ``machine`` is what ``platform.machine()`` says, to be passed by tests alone.

    Returns
    -------
    dict
        ``no`` with the reason where a primitive is absent. ``untested`` is an offer: nobody has tried it, or the
        machine is one on which words were never proven and which is therefore not chosen automatically.
    """
    no_streams = absence(device, "transfer")
    if no_streams is not None:
        return dict.fromkeys(Strategy, no_streams)
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
    for part in ("word_writes", "word_waits"):
        refused = absence(device, part)
        if refused is not None:
            return refused
    return _known(device, Mechanism.STREAM_MEMOP)


def _flag(device: Device) -> Capability:
    if absence(device, "word_writes") is not None:  # a word is copied by way of device memory then
        refused = absence(device, "memory")
        if refused is not None:
            return refused
    return Capability.untested(_NOT_TRIED)


def _event(device: Device) -> Capability:
    refused = absence(device, "events")
    return _known(device, Mechanism.EVENT) if refused is None else refused


def _known(device: Device, mechanism: Mechanism) -> Capability:
    untried = Capability.untested(_NOT_TRIED)
    return untried if device.sync is None else device.sync.mechanisms().get(mechanism, untried)
