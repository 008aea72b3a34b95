"""What a device lacks, and why: in the backend's own words wherever it has some.

Owns the answer and the error for a part that is None. Knows no use of it, and calls no driver.
"""

from __future__ import annotations

from devipc.capabilities import Capability, is_offered
from devipc.errors import CapabilityError
from devipc.interfaces.backend import Device
from devipc.interfaces.memory import DeviceMemoryIPC
from devipc.interfaces.sync import InterprocessEvents, WordWaits, WordWrites
from devipc.interfaces.transfer import DeviceTransfer
from devipc.types import Mechanism

__all__ = [
    "absence",
    "missing",
    "need_events",
    "need_memory",
    "need_transfer",
    "need_word_waits",
    "need_word_writes",
]

_MECHANISMS = {
    "word_writes": Mechanism.STREAM_MEMOP,
    "word_waits": Mechanism.STREAM_MEMOP,
    "events": Mechanism.EVENT,
}
_NAMES = {
    "memory": "memory interface",
    "sync": "sync interface",
    "transfer": "transfer interface",
    "word_writes": "word writes",
    "word_waits": "word waits",
    "events": "inter-process events",
}
_NONE = "this device has no"
_STRATEGY = "use another completion strategy; polling needs streams only"
_REMEDIES = {
    "memory": "use a backend or device that shares memory",
    "transfer": "use a backend or device with streams and copies",
}


def absence(device: Device, part: str) -> Capability | None:
    """Return why ``device`` lacks ``part``, None when it has it.

    Parameters
    ----------
    device : Device
        Whose answers are taken.
    part : str
        An interface (``memory``, ``sync``, ``transfer``) or a primitive of ``sync`` (``word_writes``, ``word_waits``,
        ``events``), which is absent with it.
    """
    if part not in _MECHANISMS:
        if getattr(device, part) is not None:
            return None
        answer = device.capabilities().get(part)
    elif device.sync is None:
        return absence(device, "sync")
    elif getattr(device.sync, part) is not None:
        return None
    else:
        answer = device.sync.mechanisms().get(_MECHANISMS[part])
    if answer is None or is_offered(answer):
        return Capability.no(f"{_NONE} {_NAMES[part]}", remedy=_REMEDIES.get(part, _STRATEGY))
    return answer


def missing(device: Device, part: str) -> CapabilityError:
    """Return the error for a part that ``device`` lacks; see :func:`absence`."""
    answer = absence(device, part)
    assert answer is not None, f"{part} is there"
    own = "" if answer.reason.startswith(_NONE) else f"{_NONE} {_NAMES[part]}: "
    return CapabilityError(own + answer.reason, device=device.info.uuid, remedy=answer.remedy)


def need_memory(device: Device) -> DeviceMemoryIPC:
    """Return the device's memory interface; raises CapabilityError with the reason where there is none."""
    if device.memory is None:
        raise missing(device, "memory")
    return device.memory


def need_transfer(device: Device) -> DeviceTransfer:
    """Return the device's transfer interface, likewise: without streams there is nothing to be completed."""
    if device.transfer is None:
        raise missing(device, "transfer")
    return device.transfer


def need_word_writes(device: Device) -> WordWrites:
    """Return the device's word writes, likewise."""
    if device.sync is None or device.sync.word_writes is None:
        raise missing(device, "word_writes")
    return device.sync.word_writes


def need_word_waits(device: Device) -> WordWaits:
    """Return the device's word waits, likewise."""
    if device.sync is None or device.sync.word_waits is None:
        raise missing(device, "word_waits")
    return device.sync.word_waits


def need_events(device: Device) -> InterprocessEvents:
    """Return the device's inter-process events, likewise."""
    if device.sync is None or device.sync.events is None:
        raise missing(device, "events")
    return device.sync.events
