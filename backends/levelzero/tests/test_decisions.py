"""What a session of two processes decides on a simulated device, and the reasons that it gives."""

from __future__ import annotations

from typing import Any

from backends.testing.partners import decision

from .peers import simulated


@simulated()
def test_a_whole_device_decides_for_the_flag(device: Any, sim: Any) -> None:
    found = decision(device)
    assert found["strategy"] == "host_flag", found
    rejected = next(each for each in found["candidates"] if each["strategy"] == "stream_memop")
    assert "no call by which a list stores to" in rejected["reason"]


@simulated()
def test_events_are_used_on_request(device: Any, sim: Any) -> None:
    assert decision(device, "event")["strategy"] == "event"


@simulated(ipc_events=0)
def test_events_that_are_off_are_refused_with_the_reason(device: Any, sim: Any) -> None:
    found = decision(device, "event")
    assert found["error"] == "CapabilityError"
    assert "this driver does not have the call" in found["text"], found["text"]


@simulated(ipc_events=0, host_register=0)
def test_polling_takes_over_and_says_why(device: Any, sim: Any) -> None:
    found = decision(device)
    assert found["strategy"] == "polling", found
    reasons = {each["strategy"]: f"{each['reason']} {each['evidence']}" for each in found["candidates"]}
    assert "no call by which a list stores to" in reasons["stream_memop"]
    assert "zexDriverImportExternalPointer" in reasons["host_flag"]


@simulated(event_ready=1)
def test_events_that_always_say_done_are_found_by_the_trial(device: Any, sim: Any) -> None:
    """Asked for by name, such events are refused: a query is true while work runs."""
    found = decision(device, "event")
    assert found["error"] == "CapabilityError", found
    assert "event" in found["text"]
