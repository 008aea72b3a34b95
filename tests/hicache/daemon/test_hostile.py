"""Peers that send anything at all: each loses its own connection at most, and others go on as if nothing was."""

from __future__ import annotations

import os
import random
import secrets
import socket
import struct
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from devipc.channel.link import Link
from devipc.errors import CapabilityError, DevIPCError, ResourceExhausted, UsageError
from devipc.hicache.operations import Event
from devipc.hicache.wire import protocol as p
from devipc.hicache.wire.greeting import hello
from devipc.hicache.wire.slots import Slots
from devipc.hicache.wire.transport import LinkKind, Offer, Transport, Way
from devipc.memfd import PAGE_NBYTES, create_memfd
from tests.hicache.daemon.daemons import TIMEOUT_S, Daemon, RawClient, daemon, until


@pytest.fixture(scope="module")
def one() -> Iterator[Daemon]:
    with daemon() as made:
        yield made
        assert made.status()["state"] == "running"
        assert made.status()["engine"]["starts"] == 1
        assert made.end() == 0
        assert "defect" not in made.said()
        assert "Traceback" not in made.said()


@pytest.fixture
def honest(one: Daemon) -> Iterator[RawClient]:
    """Somebody who is served before and after whatever happens."""
    client = RawClient(one.path)
    assert client.ask(p.PingFrame(op=1)).event is Event.COMPLETED
    yield client
    assert client.ask(p.PingFrame(op=2)).event is Event.COMPLETED
    client.close()
    until(lambda: one.status()["clients"] == [])


def ends(client: RawClient) -> bool:
    return client.link.state.value != "connected"


def test_bytes_that_are_no_message(one: Daemon, honest: RawClient) -> None:
    rng = random.Random(1)
    for size in (0, 1, 16, 1000, 100_000):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.connect(one.path)
            sock.send(rng.randbytes(size))
            sock.settimeout(TIMEOUT_S)
            while sock.recv(2**18):
                pass  # it may say why


def test_greetings_that_are_none(one: Daemon, honest: RawClient) -> None:
    slots = Slots.create(4)
    unsealed = os.memfd_create("unsealed", os.MFD_CLOEXEC)
    os.ftruncate(unsealed, 64 * PAGE_NBYTES)
    empty = create_memfd("empty", 4 * PAGE_NBYTES)
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    alone = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    offer = Offer(Way.RINGS)
    good = hello(features=0, client=secrets.token_bytes(16), way="rings")
    body = p.encode(good)
    old = p.HelloFrame(
        **{name: getattr(good, name) for name in good.__struct_fields__} | {"min_version": 99, "max_version": 99}
    )
    other = p.HelloFrame(**{name: getattr(good, name) for name in good.__struct_fields__} | {"self_test": bytes(16)})
    link = Link.connect(one.path, facts={}, timeout_s=TIMEOUT_S)
    link.start()
    try:
        for frame, fds in (
            (b"", [slots.fileno(), *offer.fds]),
            (secrets.token_bytes(64), [slots.fileno(), *offer.fds]),
            (body, []),
            (body, [slots.fileno()]),
            (body, [unsealed, *offer.fds]),
            (body, [empty, *offer.fds]),
            (body, [null, *offer.fds]),
            (body, [slots.fileno(), null, null, null, null]),
            (body, [slots.fileno(), *offer.fds[:3], null]),
            (body, [slots.fileno(), empty, *offer.fds[1:]]),
            (body, [slots.fileno(), *offer.fds, null]),
            (body, [null] * 200),
            (p.encode(hello(features=0, client=bytes(16), way="messages")), [slots.fileno(), null]),
            (p.encode(hello(features=0, client=bytes(16), way="messages")), [slots.fileno(), alone.fileno()]),
            (p.encode(hello(features=0, client=bytes(16), way="messages")), [slots.fileno(), *offer.fds]),
            (p.encode(old), [slots.fileno(), *offer.fds]),
            (p.encode(other), [slots.fileno(), *offer.fds]),
        ):
            with pytest.raises(DevIPCError) as caught:
                link.call(LinkKind.HELLO, frame, fds=fds, timeout_s=TIMEOUT_S)
            assert caught.value.code not in ("internal", "timeout"), caught.value
        for kind in (LinkKind.LEAVE, LinkKind.DRAIN):
            with pytest.raises(DevIPCError):
                link.call(kind, b"nonsense", timeout_s=TIMEOUT_S)
        with pytest.raises(CapabilityError):
            link.call(LinkKind.DRAIN + 1, b"", timeout_s=TIMEOUT_S)
        status = one.status()
        assert [client["client"] for client in status["clients"]] == [honest.client.hex()]
        assert status["state"] == "running"
    finally:
        link.close()
        offer.close()
        slots.close()
        alone.close()
        for fd in (unsealed, empty, null):
            os.close(fd)


@pytest.mark.parametrize("way", list(Way))
def test_frames_that_are_none_end_their_client(one: Daemon, honest: RawClient, way: Way) -> None:
    good = p.encode(p.PingFrame(op=1))
    frames = [b"x", b"\xc1" * 100, good[:-1], p.encode(p.TellFrame(op=1, event=Event.CANCEL))[:-2], good + b"more"]
    frames.append(p.encode(hello(features=0, client=bytes(16), way="rings")))
    frames.append(p.encode(p.AnswerFrame(op=1, event=Event.COMPLETED)))
    for frame in frames:
        client = RawClient(one.path, way=way)
        try:
            client.push(frame)
            until(partial(ends, client))
        finally:
            client.close()


def backup(**changes: Any) -> p.BackupFrame:
    fields = {
        "op": 5,
        "pool": 1,
        "generation": 1,
        "pages": struct.pack("<q", 1),
        "keys": bytes(16),
        "ready": True,
        "slot": 0,
        "timeout_s": 1.0,
        "confirmed": True,
        "partial": False,
    }
    return p.BackupFrame(**{**fields, **changes})


def test_requests_that_name_nothing_are_refused_or_end_their_client(one: Daemon, honest: RawClient) -> None:
    client = RawClient(one.path)
    try:
        frames: list[p.RequestFrame] = [
            backup(op=1),
            backup(op=2, ready=False),
            backup(op=3, ready=p.Point(fence=7, n=2**62 - 1)),
            p.LookupFrame(op=4, pool=9, generation=1, keys=bytes(32), lease_s=1.0),
            p.FlushFrame(op=5, pool=1, generation=1),
        ]
        for op, frame in enumerate(frames, 1):
            answer = client.ask(frame)
            assert (answer.op, answer.event) == (op, Event.REFUSED)
        for event in (Event.CANCEL, Event.CONFIRMED, Event.DISCARD, Event.USE, Event.RELEASE):
            client.push(p.TellFrame(op=3, event=event))
            client.push(p.TellFrame(op=2**40, event=event))
        assert client.ask(p.PingFrame(op=9)).event is Event.COMPLETED
        assert client.slots.ended(0)
        client.push(p.FlushFrame(op=5, pool=1, generation=1))  # a number a second time
        until(lambda: ends(client))
    finally:
        client.close()
    register: dict[str, Any] = {"op": 1, "pool": 1, "generation": 1, "device_uuid": "x", "namespace": bytes(16)}
    for frame in (
        backup(op=1, slot=64),
        backup(op=1, slot=2**32 - 1),
        p.RegisterPoolFrame(layout=b"", **register),
        p.RegisterPoolFrame(layout=secrets.token_bytes(100), **register),
    ):
        client = RawClient(one.path)
        try:
            client.push(frame)
            until(partial(ends, client))
        finally:
            client.close()


def test_words_of_rings_and_slots_that_are_nonsense_end_their_client(one: Daemon, honest: RawClient) -> None:
    rng = random.Random(2)
    for number in range(8):
        client = RawClient(one.path)
        try:
            transport: Any = client.transport
            words = transport._out._words
            if number % 2:
                words[8] = rng.getrandbits(63) | 2**40  # entries published
            else:
                for at in range(PAGE_NBYTES // 8, len(words)):
                    words[at] = rng.getrandbits(64)
                words[8] = 1
                transport._out._ring()
            slots = client.slots._words
            for at in range(PAGE_NBYTES // 8, len(slots)):
                slots[at] = rng.getrandbits(64)
            until(partial(ends, client))
        finally:
            client.close()


def _pushed(transport: Transport, frame: p.RequestFrame) -> bool:
    try:
        transport.push(p.encode(frame), timeout_s=1.0)
    except ResourceExhausted:
        return False
    return True


def test_a_client_that_takes_no_answers_holds_up_nobody(one: Daemon, honest: RawClient) -> None:
    client = RawClient(one.path)
    try:
        pushed = 0
        transport: Any = client.transport
        while pushed < 10_000 and _pushed(transport, p.PingFrame(op=pushed + 1)):
            pushed += 1
        assert 256 <= pushed < 10_000  # until both rings were full
        assert honest.ask(p.StatusFrame(op=1000)).event is Event.COMPLETED
        told = next(one_of for one_of in one.status()["clients"] if one_of["client"] == client.client.hex())
        assert 0 < told["waiting_answers"] < 10
        assert [client.take().op for _ in range(pushed)] == list(range(1, pushed + 1))
        assert client.ask(p.PingFrame(op=pushed + 1)).op == pushed + 1
    finally:
        client.close()


def test_the_same_client_attaches_again_and_the_older_one_is_over(one: Daemon, honest: RawClient) -> None:
    first = RawClient(one.path)
    second = RawClient(one.path, client=first.client)
    try:
        assert first.link.state.value == "closed"
        assert second.ask(p.PingFrame(op=1)).event is Event.COMPLETED
        ids = [client["client"] for client in one.status()["clients"]]
        assert ids.count(first.client.hex()) == 1
        greeting = p.encode(hello(features=0, client=secrets.token_bytes(16), way="messages"))
        with pytest.raises(UsageError):
            second.link.call(LinkKind.HELLO, greeting, timeout_s=TIMEOUT_S)
        second.link.call(LinkKind.LEAVE, p.encode(p.LeaveFrame(timeout_s=1.0)), timeout_s=TIMEOUT_S)
        second.link.call(LinkKind.LEAVE, p.encode(p.LeaveFrame(timeout_s=1.0)), timeout_s=TIMEOUT_S)
    finally:
        first.close()
        second.close()


@pytest.mark.long
def test_without_descriptors_it_goes_on_and_recovers() -> None:
    """Its limit is so low that a few clients exhaust it: those are refused, and served again when others have gone."""
    with daemon(options={"max_clients": 200}, limit_fds=160) as one:
        clients: list[RawClient] = []
        try:
            refused: list[str] = []
            while len(refused) < 4:
                try:
                    clients.append(RawClient(one.path))
                except DevIPCError as error:
                    refused.append(error.code)
            assert not {"internal", "timeout"} & set(refused), refused
            assert len(clients) > 1
            for client in clients:
                assert client.ask(p.PingFrame(op=1)).event is Event.COMPLETED
            while clients:
                clients.pop().close()
            until(lambda: _served(one.path), 30.0)
        finally:
            for client in clients:
                client.close()
        assert one.status()["engine"]["starts"] == 1
        assert one.end() == 0
        assert "defect" not in one.said()


def _served(path: str) -> bool:
    try:
        client = RawClient(path)
    except DevIPCError:
        return False
    try:
        return client.ask(p.PingFrame(op=1)).event is Event.COMPLETED
    finally:
        client.close()


def held(pid: int) -> tuple[int, int, int]:
    """Descriptors, threads and mappings of memory files of a process."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    return len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task")), maps.count("/memfd:")


@pytest.mark.long
def test_clients_that_come_and_go_leave_nothing() -> None:
    with daemon() as one:
        pids = (one.process.pid, one.ready["engine_pid"])

        def round_trips(count: int) -> None:
            for number in range(count):
                client = RawClient(one.path, way=list(Way)[number % 2])
                assert client.ask(p.PingFrame(op=1)).event is Event.COMPLETED
                if number % 3 == 0:
                    client.link.call(LinkKind.LEAVE, p.encode(p.LeaveFrame(timeout_s=1.0)), timeout_s=TIMEOUT_S)
                if number % 5 == 0:
                    client.push(b"nonsense")
                client.close()
            until(lambda: not one.status()["clients"])

        round_trips(10)
        before = [held(pid) for pid in pids]
        round_trips(150)
        until(lambda: [held(pid) for pid in pids] <= before)
        assert one.end() == 0
        assert "defect" not in one.said()


@pytest.mark.long
def test_thousands_of_changed_frames_cost_their_senders_alone() -> None:
    rng = random.Random(3)
    valid = [
        p.encode(frame)
        for frame in (
            backup(),
            backup(ready=p.Point(fence=1, n=1)),
            backup(ready=False, slot=3),
            p.LookupFrame(op=7, pool=1, generation=1, keys=bytes(64), lease_s=2.0),
            p.RegisterPoolFrame(op=8, pool=1, generation=1, device_uuid="x", layout=bytes(40), namespace=bytes(16)),
            p.UnregisterFrame(op=9, pool=1, generation=1),
            p.InvalidateFrame(op=10, pool=1, generation=1, keys=bytes(32)),
            p.StatusFrame(op=11),
            p.TellFrame(op=5, event=Event.CANCEL),
        )
    ]
    with daemon() as one:
        honest = RawClient(one.path)
        client: RawClient | None = None
        ended = 0
        for number in range(1000):
            if client is None:
                client = RawClient(one.path, way=list(Way)[number % 2])
            frame = bytearray(rng.choice(valid))
            for _ in range(rng.randint(1, 3)):
                frame[rng.randrange(len(frame))] = rng.randrange(256)
            try:
                client.push(bytes(frame))
                client.push(p.PingFrame(op=2**62))
                while client.take().op != 2**62:
                    pass
            except DevIPCError:
                client.close()
                client = None
                ended += 1
        if client is not None:
            client.close()
        assert ended > 100
        assert honest.ask(p.PingFrame(op=1)).event is Event.COMPLETED
        honest.close()
        status = one.status()
        assert (status["engine"]["starts"], status["operations"]) == (1, {})
        assert all(lane["moved_nbytes"] == 0 for lane in status["lanes"].values())
        assert one.end() == 0
        assert "defect" not in one.said()
        print(f"{ended} connections were ended")
