"""What a session of two processes decides on a simulated device, and the reasons that it gives."""

from __future__ import annotations

import importlib
import os
from typing import Any

from .peers import Channel, peer, simulated


def given(device: Any) -> Any:
    """A backend whose only device is this one, so that a session opens no second one."""
    backend = importlib.import_module("devipc_levelzero.backend")

    class Given(backend.LevelZeroBackend):  # type: ignore[name-defined,misc]
        def open_device(self, uuid: str | None = None) -> Any:
            return device

    return Given()


def decide(device: Any, sim: Any, channel: Channel) -> None:
    session = importlib.import_module("devipc.session")
    path, strategy = channel.receive()
    try:
        with session.Importer(path, backend=given(device), strategy=strategy) as importer:
            channel.send(importer.decision.to_json())
            channel.receive()
    except importlib.import_module("devipc.errors").DevIPCError as error:
        channel.send({"error": type(error).__name__, "text": str(error)})
        channel.receive()


def decision(device: Any, strategy: str | None = None) -> dict[str, Any]:
    """Let a session between two processes choose; return its Decision, or the error that it ended with."""
    os.environ["DEVIPC_TRIAL_CACHE"] = ""
    session = importlib.import_module("devipc.session")
    with session.Exporter(backend=given(device)) as exporter, peer(decide) as other:
        other.channel._socket.settimeout(45.0)
        other.channel.send([exporter.path, strategy])
        found: dict[str, Any] = other.channel.receive()
        other.channel.send()
    return found


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
