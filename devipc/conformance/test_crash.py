"""Crash: either side is killed or stopped at the worst moment, and the other goes on."""
# ruff: noqa: D103 - the demand of a case is its documentation

from __future__ import annotations

import contextlib
import os
import time

import pytest

from devipc.conformance import roles_sync
from devipc.conformance.catalogue import case
from devipc.conformance.fencing import followed, followed_here, following
from devipc.conformance.fixtures import NewPeer
from devipc.conformance.profile import BackendProfile
from devipc.conformance.rig import Rig
from devipc.conformance.roles_device import shm_files, used_files
from devipc.conformance.roles_events import ask_event, make_event, try_event
from devipc.conformance.roles_races import open_until_refused
from devipc.conformance.sharing import allocated, exported, mapped, send, shared_by_peer
from devipc.conformance.test_lifetime import opens_or_refuses
from devipc.errors import FencePoisoned
from devipc.types import HandleKind, PoisonReason, Strategy

MIB = 1 << 20


@case(
    "CRASH-057",
    "When an importer is killed while it has memory mapped, the exporter keeps it, shares it anew and frees it.",
    clause="interfaces/memory.py: open",
)
def test_importer_killed(rig: Rig, new_peer: NewPeer, kind: HandleKind) -> None:
    victim, other = new_peer(), new_peer()
    with allocated(rig, MIB, kind, seed=57) as allocation, exported(rig, allocation.ptr, MIB) as extent:
        with mapped(victim, extent) as mapping:
            mapping.expect(MIB, 57)
            victim.kill()
        rig.expect(allocation.ptr, MIB, 57, "memory whose importer was killed")
        with mapped(other, extent) as mapping:
            mapping.expect(MIB, 57)


@case(
    "CRASH-058",
    "When an exporter is killed, mappings of its memory behave as the profile declares, and close.",
    clause="conformance/profile.py: BackendProfile.keeps_freed_memory",
)
def test_exporter_killed(rig: Rig, new_peer: NewPeer, kind: HandleKind, profile: BackendProfile) -> None:
    victim = new_peer()
    with shared_by_peer(victim, MIB, kind, seed=58) as extent:
        opened = rig.memory.open(extent)
        try:
            rig.expect(opened.ptr, MIB, 58, "the peer's memory")
            victim.kill()
            if profile.keeps_freed_memory:
                rig.expect(opened.ptr, MIB, 58, "the memory of a killed exporter")
                rig.fill(opened.ptr, MIB, 59)
                rig.expect(opened.ptr, MIB, 59, "the memory of a killed exporter, after it was written")
        finally:
            rig.memory.close(opened)


@case(
    "CRASH-059",
    "A handle whose exporter was killed before it was opened is refused by type in time, or still shows its bytes.",
    clause="interfaces/memory.py: open",
)
def test_killed_before_open(new_peer: NewPeer, kind: HandleKind) -> None:
    victim, importer = new_peer(), new_peer()
    with shared_by_peer(victim, MIB, kind, seed=59) as extent:
        victim.kill()
        opens_or_refuses(importer, send(extent), seed=59)


@case(
    "CRASH-106",
    "A handle whose exporter is stopped opens, or is refused by type, in time.",
    clause="interfaces/memory.py: open",
)
def test_exporter_stopped(new_peer: NewPeer, kind: HandleKind) -> None:
    sleeper, importer = new_peer(), new_peer()
    with shared_by_peer(sleeper, MIB, kind, seed=60) as extent:
        sleeper.stop()
        try:
            opens_or_refuses(importer, send(extent), seed=60)
        finally:
            sleeper.resume()


@case(
    "CRASH-064",
    "After an exporter was killed and its mappings were closed, a new one shares as much memory again.",
    clause="interfaces/memory.py: close",
)
def test_exporter_restarted(rig: Rig, new_peer: NewPeer, kind: HandleKind) -> None:
    for seed in range(1, 4):
        victim = new_peer()
        with shared_by_peer(victim, 8 * MIB, kind, seed=seed) as extent:
            opened = rig.memory.open(extent)
            victim.kill()
            rig.memory.close(opened)
    with shared_by_peer(new_peer(), 8 * MIB, kind, seed=64) as extent:
        opened = rig.memory.open(extent)
        try:
            rig.expect(opened.ptr, 8 * MIB, 64, "the memory of the last exporter")
        finally:
            rig.memory.close(opened)


@case(
    "CRASH-060",
    "When a producer is killed with work pending, poison ends the waits of its consumers, on streams too.",
    clause="completion/fence.py: Fence.poison",
)
def test_producer_killed(rig: Rig, new_peer: NewPeer, strategy: Strategy) -> None:
    victim = new_peer()
    victim.call(roles_sync.hold)
    with followed_here(rig, victim, strategy) as (key, consumer), rig.new_stream() as stream:
        victim.call(roles_sync.signal, key=key, value=1)
        if consumer.waits_on_device:
            consumer.wait(stream, 1)
        victim.kill()
        consumer.poison(PoisonReason.PEER_DIED, writer_gone=lambda: True)
        started = time.monotonic()
        rig.finish(stream, "a stream that waited for a killed process")
        if rig.has_latches:
            with pytest.raises(FencePoisoned) as failed:
                consumer.synchronize(1, rig.deadline_s)
            assert failed.value.code == "peer_died"
        else:  # the victim's copies may have been over before it was killed
            with contextlib.suppress(FencePoisoned):
                consumer.synchronize(1, rig.deadline_s)
        assert time.monotonic() - started < rig.deadline_s / 2


@case(
    "CRASH-061",
    "When a consumer is killed, the producer is not held up and other consumers are served.",
    clause="completion/producer.py: ProducerFence.drop_consumer",
)
def test_consumer_killed(rig: Rig, new_peer: NewPeer, strategy: Strategy) -> None:
    victim, other = new_peer(), new_peer()
    with followed(rig, other, strategy) as (producer, follower):
        (line_of_other,) = producer.consumers
        following(victim, producer)
        (line,) = set(producer.consumers) - {line_of_other}
        producer.signal(rig.stream, 1)
        victim.kill()
        producer.drop_consumer(line)
        for value in range(2, 41):
            producer.signal(rig.stream, value, timeout_s=rig.deadline_s)
            follower.synchronize(value, rig.deadline_s)


@case(
    "CRASH-065",
    "What a killed process leaves in shared memory is taken up by no other: its successor has files of its own.",
    clause="interfaces/memory.py: DeviceMemoryIPC",
)
def test_leftovers_are_nobody_elses(rig: Rig, new_peer: NewPeer, kind: HandleKind) -> None:
    left: set[str] = set()
    for seed in (65, 66):
        victim = new_peer()
        with shared_by_peer(victim, MIB, kind, seed=seed) as extent:
            victim.call(make_event)
            own = set(victim.call(shm_files).body["files"]) - set(used_files())
            assert not own & left, f"files of a killed process are used again: {sorted(own & left)}"
            opened = rig.memory.open(extent)
            try:
                rig.expect(opened.ptr, MIB, seed, "memory of a process whose predecessor was killed")
            finally:
                rig.memory.close(opened)
            victim.kill()
        left = {name for name in own if os.path.exists(name)}


@case(
    "CRASH-201",
    "An event whose maker was killed is asked and opened in time: with an answer, or refused by type.",
    clause="interfaces/sync.py: InterprocessEvents.open",
)
def test_event_maker_killed(rig: Rig, new_peer: NewPeer) -> None:
    events = rig.events
    victim, importer = new_peer(), new_peer()
    payload = victim.call(make_event).body["payload"]
    key = importer.call(roles_sync.open_event, payload=payload).body["key"]
    victim.kill()
    importer.call(ask_event, key=key)
    importer.call(try_event, payload=payload)
    own = events.create()  # and what is made meanwhile is not taken for it
    events.destroy(own)


@case(
    "CRASH-202",
    "An exporter that is killed while others open its handle costs them no wrong byte and no hang.",
    clause="interfaces/memory.py: open",
)
def test_exporter_killed_amid_opens(new_peer: NewPeer, kind: HandleKind) -> None:
    victim, importer = new_peer(), new_peer()
    with shared_by_peer(victim, 64 << 10, kind, seed=202) as extent:
        importer.start(open_until_refused, **send(extent), nbytes=64 << 10, seed=202, times=200)
        time.sleep(0.02)
        victim.kill()
        importer.result()


@case(
    "CRASH-203",
    "An importer that is killed while it opens and closes leaves the exporter's memory as it was, and free to go.",
    clause="interfaces/memory.py: free",
)
def test_importer_killed_amid_opens(rig: Rig, new_peer: NewPeer, kind: HandleKind) -> None:
    victim, other = new_peer(), new_peer()
    with allocated(rig, MIB, kind, seed=203) as allocation, exported(rig, allocation.ptr, MIB) as extent:
        victim.call(open_until_refused, **send(extent), nbytes=64 << 10, seed=203, times=3)  # however late it begins
        victim.start(open_until_refused, **send(extent), nbytes=64 << 10, seed=203, times=100_000)
        time.sleep(0.05)
        victim.kill()
        rig.expect(allocation.ptr, MIB, 203, "memory whose importer was killed amid opens")
        with mapped(other, extent) as mapping:
            mapping.expect(MIB, 203)
