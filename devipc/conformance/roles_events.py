"""Roles of peers that make, open and ask inter-process events, and that use registered words.

Owns what a peer does on request. Whether an event is there at all is told by :class:`Unavailable`, as everywhere.
"""

from __future__ import annotations

import contextlib
from typing import Any

from devipc.conformance.staging import Unavailable, until
from devipc.conformance.worker import Worker, role
from devipc.errors import DevIPCError, DriverError, ResourceExhausted
from devipc.interfaces.sync import InterprocessEvent

__all__ = ["ask_event", "destroy_event", "make_event", "make_many_events", "record_event", "try_event"]

Fds = tuple[int, ...]
Body = dict[str, Any]


@role
def make_event(worker: Worker, fds: Fds) -> Body:
    """Make an event, record it behind the rig's stream, and return its payload; no payload where there are none."""
    try:
        events = worker.rig.events
    except Unavailable:
        return {"payload": "", "key": 0}
    event = events.create()
    key = worker.keep(event, lambda: events.destroy(event))
    events.record(event, worker.rig.stream)
    worker.rig.finish(worker.rig.stream, "an event")
    return {"payload": events.export(event).hex(), "key": key}


@role
def make_many_events(worker: Worker, fds: Fds, limit: int) -> Body:
    """Make events up to a limit, destroy them and use one more; return how many there were, and whether that one works.

    A driver may keep what it made for them, so this is for a process that nobody uses afterwards.
    """
    rig, events = worker.rig, worker.rig.events
    made: list[InterprocessEvent] = []
    try:
        with contextlib.suppress(ResourceExhausted, DriverError):
            for _ in range(limit):
                made.append(events.create())
    finally:
        for event in made:
            events.destroy(event)
    again = events.create()
    events.record(again, rig.stream)
    rig.finish(rig.stream, "an event that was made after many")
    done = until(lambda: events.query(again), worker.deadline_s)
    events.destroy(again)
    return {"made": len(made), "again": done}


@role
def record_event(worker: Worker, fds: Fds, key: int) -> None:
    """Record a kept event behind the rig's stream."""
    worker.rig.events.record(worker.get(key), worker.rig.stream)


@role
def destroy_event(worker: Worker, fds: Fds, key: int) -> None:
    """Destroy a kept event before its importers do."""
    worker.drop(key)


@role
def ask_event(worker: Worker, fds: Fds, key: int) -> Body:
    """Ask a kept event; return the answer or the refusal."""
    try:
        return {"done": worker.rig.events.query(worker.get(key)), "refused": ""}
    except DevIPCError as error:
        return {"done": False, "refused": str(error)}


@role
def try_event(worker: Worker, fds: Fds, payload: str) -> Body:
    """Open an event, ask it and give it back, or return the refusal."""
    events = worker.rig.events
    try:
        event = events.open(bytes.fromhex(payload))
    except DevIPCError as error:
        return {"done": False, "refused": str(error)}
    try:
        return {"done": events.query(event), "refused": ""}
    except DevIPCError as error:
        return {"done": False, "refused": str(error)}
    finally:
        events.destroy(event)
