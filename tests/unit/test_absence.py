"""What a device lacks is said in its backend's own words, by whoever needs it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from devipc import absence
from devipc.capabilities import Capability
from devipc.completion import create_fence, offers
from devipc.errors import CapabilityError
from devipc.host.backend import HostBackend
from devipc.probe.memory import need_memory, need_stage
from devipc.probe.partner import NotTried
from devipc.types import Mechanism, Strategy

REASON = Capability.no("the firmware is too old", remedy="update the firmware")
CLAIM = Capability.untested("the attribute says yes; a live check decides")
PARTS: dict[str, Callable[[Any], object]] = {
    "memory": absence.need_memory,
    "transfer": absence.need_transfer,
    "word_writes": absence.need_word_writes,
    "word_waits": absence.need_word_waits,
    "events": absence.need_events,
}


def without(part: str, answer: Capability | None) -> Any:
    """The host's device, less one part about which its backend gives an answer."""
    real = HostBackend().open_device()
    sync: Any = SimpleNamespace(
        word_writes=real.sync.word_writes,
        word_waits=real.sync.word_waits,
        events=real.sync.events,
        mechanisms=lambda: {} if answer is None else dict.fromkeys(Mechanism, answer),
    )
    device = SimpleNamespace(
        info=real.info,
        memory=real.memory,
        transfer=real.transfer,
        sync=sync,
        capabilities=lambda: {} if answer is None else {"memory": answer, "transfer": answer, "sync": answer},
    )
    setattr(device if hasattr(device, part) else sync, part, None)
    return device


@pytest.mark.parametrize("part", PARTS)
def test_the_backends_reason_is_in_the_error(part: str) -> None:
    with pytest.raises(CapabilityError, match="the firmware is too old") as refused:
        PARTS[part](without(part, REASON))
    assert refused.value.remedy == "update the firmware"


@pytest.mark.parametrize("answer", [None, CLAIM], ids=["no-answer", "a-claim"])
@pytest.mark.parametrize("part", PARTS)
def test_without_a_reason_the_part_is_named(part: str, answer: Capability | None) -> None:
    name = part.replace("events", "inter-process events").replace("_", " ")
    with pytest.raises(CapabilityError) as refused:
        PARTS[part](without(part, answer))
    assert refused.value.message == f"this device has no {name}" + " interface" * (part in ("memory", "transfer"))
    assert refused.value.remedy


@pytest.mark.parametrize("part", ["word_writes", "word_waits", "events"])
def test_a_primitive_is_absent_with_its_interface(part: str) -> None:
    device = without("sync", REASON)
    with pytest.raises(CapabilityError, match="the firmware is too old"):
        PARTS[part](device)


@pytest.mark.parametrize(
    ("part", "strategy"),
    [
        ("word_writes", Strategy.STREAM_MEMOP),
        ("events", Strategy.EVENT),
        ("sync", Strategy.EVENT),
        ("transfer", Strategy.POLLING),
    ],
)
def test_a_fence_that_cannot_be_had_carries_it(part: str, strategy: Strategy) -> None:
    device = without(part, REASON)
    assert offers(device)[strategy] == REASON
    with pytest.raises(CapabilityError, match="the firmware is too old") as refused:
        create_fence(device, strategy)
    assert refused.value.remedy == "update the firmware"


@pytest.mark.parametrize(("part", "look"), [("memory", need_memory), ("transfer", lambda it: need_stage(it, 4096))])
def test_a_check_that_is_not_tried_carries_it(part: str, look: Callable[[Any], object]) -> None:
    with pytest.raises(NotTried, match="the firmware is too old") as untried:
        look(without(part, REASON))
    assert untried.value.remedy == "update the firmware"
