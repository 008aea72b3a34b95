"""A client and the ends of its daemon: what is told at once, what stays quarantined, and that it attaches by itself."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from devipc.errors import CompletionTimeout, FencePoisoned, PeerGone
from devipc.hicache.api import UNFENCED
from devipc.hicache.client.ticket import Ticket
from devipc.hicache.operations import Event, Status
from devipc.hicache.results import PageResult
from devipc.interfaces.backend import Device
from devipc.registry import load_backend
from tests.channel.processes import stop
from tests.hicache.daemon.daemons import Daemon, daemon
from tests.hicache.daemon.scene import Scene
from tests.hicache.engine_with_faults import FOLDER, MODULE, Faults
from tests.hicache.pools import TIMEOUT_S, until
from tests.hicache.resident import resident_nbytes

pytestmark = pytest.mark.chaos


@pytest.fixture
def device() -> Iterator[Device]:
    opened = load_backend("host").open_device()
    yield opened
    opened.close()


@pytest.fixture
def scene(device: Device) -> Iterator[Scene]:
    with (
        tempfile.TemporaryDirectory() as folder,
        daemon(options={"engine_module": MODULE}, environment={FOLDER: folder}) as running,
    ):
        made = Scene(device, running, folder)
        yield made
        made.close()


def test_the_engine_is_killed_and_another_serves(scene: Scene) -> None:
    """What it had is lost at once, pages that it wrote to when it is gone; the tier stays, and is found again."""
    client, handle = scene.client, scene.handle
    restore, pid = scene.stalled_restore(), scene.engine_pid
    waiting = client.backup(handle, [3], scene.it.keys(handle, 1, seed=50), ready=Never())
    until(lambda: any(name.startswith("backup:waiting") for name in scene.status["operations"]))  # else it is refused
    assert restore.fence is not None
    assert not restore.fence.query()
    os.kill(pid, signal.SIGKILL)
    # Whoever notices first: the client, or the daemon, which says that its ready point is not looked at any more.
    assert waiting.wait(TIMEOUT_S).status in (Status.LOST, Status.DISCARDED)
    with pytest.raises(FencePoisoned):
        restore.fence.synchronize(timeout_s=TIMEOUT_S)
    assert restore.wait(TIMEOUT_S).status in (Status.LOST, Status.FAILED)
    scene.wait_attached(losses=1)
    assert client.status()["losses"] == 1
    assert scene.engine_pid != pid
    assert client.match(handle, scene.keys) == 8
    done = client.restore(handle, scene.keys[:2], [20, 21], ready=scene.it.stream())
    assert set(done.result(TIMEOUT_S)) == {PageResult.RESTORED}
    scene.memory.check([20, 21], scene.keys[:2])
    scene.check_serves(60)


def test_the_daemon_is_killed_and_another_takes_its_place(scene: Scene) -> None:
    client, handle = scene.client, scene.handle
    restore, engine_pid = scene.stalled_restore(), scene.engine_pid
    lease = client.lookup(handle, scene.keys)
    assert lease.reached(Event.LEASED, TIMEOUT_S)
    scene.daemon.process.kill()
    assert lease.wait(TIMEOUT_S).status is Status.LOST
    assert client.match(handle, scene.keys) == 0
    # Which end of the daemon was noticed first, or, where that took longer than an attempt, why that failed.
    assert client.status()["degraded"]
    late = client.backup(handle, [1], scene.keys[:1], ready=UNFENCED)
    assert late.status is Status.REFUSED
    error = late.wait(0.0).error
    assert isinstance(error, PeerGone)
    assert (error.code, error.retryable) == ("degraded", True)
    assert late.fence is not None
    with pytest.raises(FencePoisoned):
        late.fence.query()
    behind = client.backup(handle, [1], scene.keys[:1], ready=scene.it.stream())
    assert behind.wait(TIMEOUT_S).status is Status.REFUSED
    with pytest.raises(PeerGone) as caught:
        client.ready(scene.it.stream()).reached()
    assert caught.value.code == "degraded"
    assert restore.wait(TIMEOUT_S).status is Status.LOST
    assert client.status()["quarantined_pages"] == 0
    assert not os.path.exists(f"/proc/{engine_pid}/fd/0")
    until(lambda: int(str(client.status()["attempts"])) >= 2)
    scene.daemon.wait()
    again = Daemon(os.path.dirname(scene.daemon.path), environment={FOLDER: scene.folder})
    try:
        scene.wait_attached()
        assert client.match(handle, scene.keys) == 0  # another tier
        scene.check_serves(70)
        client.unregister(handle)
        client.close()
    finally:
        again.close()


@pytest.mark.timing
def test_a_client_attaches_again_in_seconds(scene: Scene) -> None:
    pid, began = scene.engine_pid, time.monotonic()
    os.kill(pid, signal.SIGKILL)
    until(lambda: scene.client.status()["losses"] == 1)
    scene.wait_attached()
    assert time.monotonic() - began < 5
    scene.daemon.process.kill()
    until(lambda: scene.client.status()["losses"] == 2)
    scene.daemon.wait()
    again = Daemon(os.path.dirname(scene.daemon.path), environment={FOLDER: scene.folder})
    began = time.monotonic()
    try:
        scene.wait_attached()
        assert time.monotonic() - began < 2
        scene.client.close()
    finally:
        again.close()


@pytest.mark.long
def test_a_client_leaves_while_nobody_serves(scene: Scene) -> None:
    scene.stalled_restore()
    scene.daemon.process.kill()
    scene.client.unregister(scene.handle)
    scene.client.close()


def test_a_stopped_daemon_is_waited_for_and_publishes_nothing_that_was_given_up(scene: Scene) -> None:
    client, handle = scene.client, scene.handle
    key = scene.it.keys(handle, 1, seed=80)
    scene.memory.fill([15], key)
    stop(scene.daemon.process.pid)
    try:
        ticket = client.backup(handle, [15], key, ready=UNFENCED)
        with pytest.raises(CompletionTimeout):
            ticket.wait(0.2)
        assert client.match(handle, scene.keys) == 8
        assert ticket.cancel()
        assert ticket.status is Status.CANCELLED
        scene.memory.poison([15])  # the page is the client's again
    finally:
        scene.daemon.process.send_signal(signal.SIGCONT)
    client.ping()
    assert client.match(handle, key) == 0
    scene.check_serves(90)
    assert client.status()["losses"] == 0


@pytest.mark.parametrize("lost", ["session", "both"])
def test_what_was_under_way_when_a_client_lost_its_connection_is_not_published(scene: Scene, lost: str) -> None:
    """Nobody died, and the daemon hears of it late or never: meanwhile the pages are the client's again."""
    client, current = scene.client, cast(Any, scene.client._link)._current
    key = scene.it.keys(scene.handle, 1, seed=81)
    scene.memory.fill([15], key)
    stop(scene.daemon.process.pid)
    ticket = client.backup(scene.handle, [15], key, ready=UNFENCED)
    for connection in (current.session.peer._link, current._link)[: 1 if lost == "session" else 2]:
        connection._channel._sock.shutdown(socket.SHUT_RDWR)
    assert ticket.wait(TIMEOUT_S).status is Status.LOST
    scene.memory.poison([15])
    scene.daemon.process.send_signal(signal.SIGCONT)
    scene.wait_attached(losses=1)
    assert client.match(scene.handle, key) == 0
    scene.check_serves(91)


@pytest.mark.long
def test_many_losses_leave_nothing_behind(scene: Scene) -> None:
    """Descriptors, threads and memory are the same after six engines as after two."""
    seen: list[tuple[int, int]] = []
    peak = 0
    for number in range(6):
        os.kill(scene.engine_pid, signal.SIGKILL)
        until(lambda number=number: scene.client.status()["losses"] == number + 1)  # type: ignore[misc]
        scene.wait_attached()
        scene.check_serves(100 + number)
        if len(seen) > 1:
            until(lambda: threading.active_count() <= seen[1][1], 5)
        seen.append((len(os.listdir("/proc/self/fd")), threading.active_count()))
        if number == 1:
            peak = resident_nbytes()
    assert seen[-1][0] <= seen[1][0], seen
    assert resident_nbytes() - peak < 8 * 2**20
    assert scene.client.match(scene.handle, scene.keys) == 8


class Never:
    def reached(self) -> bool:
        return False


def test_a_client_that_lost_its_connections_closes_while_the_engine_lives(scene: Scene) -> None:
    """Nobody died, so no pidfd tells that nothing is written any more; the daemon does, to whoever greets it again."""
    link: Any = scene.client._link
    current = link._current
    with link._changed:
        link._closing = True  # it is about to close
    for connection in (current.session.peer._link, current._link):
        connection._channel._sock.shutdown(socket.SHUT_RDWR)
    until(lambda: link._current is None)
    began = time.monotonic()
    scene.client.close(timeout_s=TIMEOUT_S)
    assert time.monotonic() - began < 5
    until(lambda: not scene.daemon.status()["clients"])


@pytest.mark.long
def test_a_restore_whose_attachment_ends_has_a_status_whatever_comes_first(scene: Scene) -> None:
    client, link = scene.client, cast(Any, scene.client._link)

    def restore(expect: Status, losses: int, ticket: Ticket | None = None) -> None:
        ticket = ticket or client.restore(scene.handle, scene.keys[:2], [20, 21], ready=UNFENCED)
        assert ticket.wait(TIMEOUT_S).status is expect
        scene.wait_attached(losses=losses)
        scene.check_serves(70 + losses)
        assert client.status()["losses"] == losses
        assert client.status()["quarantined_pages"] == 0

    def end_in(owner: Any, name: str, attachment: Any, *, late: bool) -> None:
        """End the attachment in the middle of a submission; before it goes on, another one serves, when ``late``."""
        whole = getattr(owner, name)

        def ends(*arguments: Any, **named: Any) -> Any:
            setattr(owner, name, whole)
            attachment.end(PeerGone("its connection is lost"))
            if late:
                until(lambda: link._current is not None)
            return whole(*arguments, **named)

        setattr(owner, name, ends)

    end_in(link._current._table, "begin", link._current, late=False)
    restore(Status.REFUSED, 1)
    end_in(link._current._transport, "push", link._current, late=False)
    restore(Status.LOST, 2)
    end_in(link._current._transport, "push", link._current, late=True)
    restore(Status.LOST, 3)

    pid = scene.engine_pid
    # It is learnt that nothing of the engine is left before all is told that it is dying.
    attachment, tell = link._current, link._answers.attachment_dying

    def tell_late(ops: Any) -> None:
        learnt = threading.Thread(target=link._on_gone, args=(attachment,))
        learnt.start()
        learnt.join(0.3)
        link._answers.attachment_dying = tell
        tell(ops)

    ticket = scene.stalled_restore()
    link._answers.attachment_dying = tell_late
    attachment.end(PeerGone("its connection is lost"))
    with Faults(scene.folder, pid) as faults:
        faults.resume("restore")
    restore(Status.LOST, 4, ticket)


def test_what_was_sent_before_an_interrupt_is_not_published(scene: Scene) -> None:
    """Nobody knows whether it was sent: the attachment ends, and with it whatever was begun."""
    client, link = scene.client, cast(Any, scene.client._link)
    scene.it.gate.stall(scene.stream)
    scene.it.transfer.copy(scene.stream, scene.memory.built.exports[0][0], scene.memory.built.exports[0][0], 1)
    keys = scene.it.keys(scene.handle, 1, seed=90)
    calls: list[Callable[[], object]] = [
        lambda: client.backup(scene.handle, [15], keys, ready=scene.stream),
        lambda: client.restore(scene.handle, scene.keys[:1], [16], ready=scene.stream),
    ]
    for losses, call in enumerate(calls, 1):
        transport: Any = link._current._transport
        push = transport.push

        def interrupted(frame: bytes, *, timeout_s: float, transport: Any = transport, push: Any = push) -> None:
            transport.push = push
            push(frame, timeout_s=timeout_s)
            raise KeyboardInterrupt

        transport.push = interrupted
        with pytest.raises(KeyboardInterrupt):
            call()
        scene.wait_attached(losses=losses)
    until(lambda: client._desk.open_tickets() == [])
    scene.memory.poison([15])  # it is the client's own again
    scene.it.gate.resume(scene.stream)
    scene.check_serves(91)
    assert client.match(scene.handle, keys) == 0
    assert scene.status["tier"]["holds"] == 0


@pytest.mark.long
def test_an_engine_that_is_gone_before_its_attachment_is_used_is_not_waited_for(scene: Scene) -> None:
    link = cast(Any, scene.client._link)
    register_all = link._register_all

    def too_late(new: Any) -> Any:
        link._register_all = register_all
        os.kill(new.session.peer.pid, signal.SIGKILL)
        until(lambda: new.gone and new.over is not None)
        time.sleep(0.3)  # and all of it was told
        return register_all(new)

    link._register_all = too_late
    os.kill(scene.engine_pid, signal.SIGKILL)
    until(lambda: link._register_all is register_all)
    scene.wait_attached()
    scene.check_serves(60)
    assert scene.client.status()["dying_engines"] == 0
    scene.client.unregister(scene.handle)


@pytest.mark.long
def test_what_is_told_while_another_thread_submits_is_heard(scene: Scene) -> None:
    lease = scene.client.lookup(scene.handle, scene.keys)
    assert lease.reached(Event.LEASED, TIMEOUT_S)
    assert scene.status["tier"]["holds"] == 1
    turn = cast(Any, scene.client._link)._current._transport._out._turn
    with turn:
        telling = threading.Thread(target=scene.client.release, args=(lease,))
        telling.start()
        telling.join(0.1)
    telling.join(TIMEOUT_S)
    until(lambda: scene.status["tier"]["holds"] == 0)
    # What is still untold at its end is told to nobody, whatever the end says.
    ended = cast(Any, scene.client._link)._current
    ended.end(CompletionTimeout("it did not answer in time"))
    ended._untold.append(b"")
    ended._tell_rest()


@pytest.mark.long
def test_a_daemon_with_other_layer_groups_is_not_used_and_costs_nothing(scene: Scene) -> None:
    """Each attempt is given back whole."""
    scene.daemon.process.kill()
    scene.daemon.wait()
    other = Daemon(os.path.dirname(scene.daemon.path), options={"layer_groups": "3,5"})
    try:
        until(lambda: "layer groups" in str(scene.client.status()["degraded"]))
        attempts, before = int(str(scene.client.status()["attempts"])), len(os.listdir("/proc/self/fd"))
        until(lambda: int(str(scene.client.status()["attempts"])) >= attempts + 3)
        until(lambda: len(os.listdir("/proc/self/fd")) <= before)
    finally:
        other.close()
