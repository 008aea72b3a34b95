"""Ends of what a session is given: odd names, endless timeouts, no threads, interrupts, forks, races with a close."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from devipc.completion import create_fence, open_fence
from devipc.deadline import call_with_deadline
from devipc.errors import (
    ClosedError,
    CompletionTimeout,
    FencePoisoned,
    HandleError,
    PeerGone,
    ResourceExhausted,
    UsageError,
)
from devipc.mappings import MappingCache, local_exports
from devipc.probe.stage import Stage
from devipc.registry import load_backend
from devipc.session import Exporter, Importer, PeerState, shares
from devipc.session.messages import Kind
from devipc.session.peer import Peer
from devipc.session.shares import ShareTable
from devipc.types import OpenedExtent, PoisonReason, Strategy
from devipc.wire import MemoryHandle
from tests.session.processes import eventually, grown, holdings

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 10.0
NO_END = float("inf")


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    with Exporter(strategy="stream_memop", timeout_s=TIMEOUT_S) as exporter:
        yield exporter


def refuse_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)


@pytest.mark.parametrize("name", ["\ud800", "a\udcffb"])
def test_a_name_that_is_no_text_is_refused(exporter: Exporter, name: str) -> None:
    block = exporter.allocate(4096)
    with Importer(exporter.path, strategy="stream_memop", timeout_s=TIMEOUT_S) as importer:
        for use in (
            lambda: exporter.share(name, block),
            lambda: exporter.create_fence(name),
            lambda: importer.open(name),
        ):
            with pytest.raises(UsageError, match="UTF-8"):
                use()
        with pytest.raises(UsageError, match="UTF-8"):
            importer.open_fence(name)


def test_waiting_without_an_end_is_allowed(exporter: Exporter) -> None:
    exporter.share("block", exporter.allocate(4096))
    connected: list[Importer] = []
    later = threading.Timer(0.05, lambda: connected.append(Importer(exporter.path, timeout_s=NO_END)))
    later.start()
    assert exporter.wait_peer(timeout_s=NO_END).state is PeerState.CONNECTED
    later.join()
    block = connected[0].open("block", timeout_s=NO_END)
    back = threading.Timer(0.05, block.close)
    back.start()
    exporter.unshare("block", timeout_s=NO_END)
    back.join()
    connected[0].close()
    exporter.close(timeout_s=NO_END)


def test_an_open_that_no_thread_can_be_had_for_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = load_backend("host").open_device().memory
    assert memory is not None
    allocation = memory.allocate(4096)
    extent = memory.export(allocation.ptr, 4096)
    cache = MappingCache(memory, instance=bytes(16))
    before = holdings()
    with monkeypatch.context() as patch:
        refuse_threads(patch)
        with pytest.raises(ResourceExhausted, match="no thread"):
            cache.acquire(MemoryHandle("host", "device", b"p" * 16, 1, b"e" * 16, extent), timeout_s=1)
    assert not grown(before, holdings())
    cache.close()
    memory.release(extent)
    memory.free(allocation)


def test_an_interrupted_open_is_undone_when_it_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    let_go, undone = threading.Event(), threading.Event()

    def interrupt(_self: threading.Event, _timeout: float | None = None) -> bool:
        monkeypatch.undo()
        raise KeyboardInterrupt

    def slow() -> OpenedExtent:
        let_go.wait(TIMEOUT_S)
        return OpenedExtent(1, 1, None)

    started = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        started(thread)
        monkeypatch.setattr(threading.Event, "wait", interrupt)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(KeyboardInterrupt):
        call_with_deadline(slow, timeout_s=5, what="open", undo=lambda _opened: undone.set())
    assert not undone.is_set()
    let_go.set()
    assert undone.wait(5)


@pytest.mark.timing
def test_a_second_open_of_the_same_export_does_not_wait_twice_as_long() -> None:
    release = threading.Event()
    device = load_backend("host").open_device()
    assert device.memory is not None
    memory = device.memory
    allocation = memory.allocate(4096)
    extent = memory.export(allocation.ptr, 4096)
    handle = MemoryHandle("host", "device", b"p" * 16, 1, b"e" * 16, extent)

    class Stuck:
        close = staticmethod(memory.close)

        def open(self, other: object) -> OpenedExtent:
            release.wait(TIMEOUT_S)
            return memory.open(other)  # type: ignore[arg-type]

    cache = MappingCache(Stuck(), instance=bytes(16))  # type: ignore[arg-type]
    took: list[float] = []

    def acquire() -> None:
        start = time.monotonic()
        with pytest.raises(CompletionTimeout):
            cache.acquire(handle, timeout_s=0.5)
        took.append(time.monotonic() - start)

    first, second = threading.Thread(target=acquire), threading.Thread(target=acquire)
    first.start()
    time.sleep(0.2)
    second.start()
    first.join()
    second.join()
    release.set()
    assert max(took) < 0.75, took
    cache.close()
    assert eventually(lambda: not any(thread.name == "devipc-open" for thread in threading.enumerate()))
    memory.release(extent)
    memory.free(allocation)


def test_an_alias_of_the_own_memory_is_not_longer_than_it(exporter: Exporter) -> None:
    share = exporter.share("block", exporter.allocate(8192))
    short = exporter.allocate(4096)
    cache = MappingCache(exporter._memory, instance=exporter.instance)
    local_exports.add(share.handle.export_id, short.ptr, short.nbytes)
    with pytest.raises(HandleError, match="another length"):
        cache.acquire(share.handle, timeout_s=1)


def test_nothing_of_an_old_generation_is_offered_after_the_change(
    exporter: Exporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    change = threading.Thread(target=exporter.new_generation)

    def slow(*arguments: object) -> MemoryHandle:
        handle = MemoryHandle(*arguments)  # type: ignore[arg-type]
        change.start()
        change.join(0.3)
        return handle

    monkeypatch.setattr(shares, "MemoryHandle", slow)
    exporter.share("block", exporter.allocate(4096))
    change.join()
    offered = exporter.shares._shares.values()
    assert all(share.handle.generation == exporter.shares.generation == 2 for share in offered)


def test_what_comes_in_while_the_session_closes_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before = holdings()
    exporter = Exporter(strategy="stream_memop", timeout_s=TIMEOUT_S)
    block = exporter.allocate(4096)
    add, allocate = ShareTable.add, exporter._memory.allocate

    def late_add(table: ShareTable, *arguments: object, **options: object) -> object:
        exporter.close()
        return add(table, *arguments, **options)  # type: ignore[arg-type]

    def late_allocate(*arguments: object, **options: object) -> object:
        allocation = allocate(*arguments, **options)  # type: ignore[arg-type]
        exporter.close()
        return allocation

    monkeypatch.setattr(exporter._memory, "allocate", late_allocate)
    with pytest.raises(ClosedError):
        exporter.allocate(4096)
    monkeypatch.undo()
    assert eventually(lambda: not grown(before, holdings()))
    with Exporter(strategy="stream_memop", timeout_s=TIMEOUT_S) as exporter:
        block = exporter.allocate(4096)
        monkeypatch.setattr(ShareTable, "add", late_add)
        with pytest.raises((ClosedError, HandleError)):
            exporter.share("late", block)
        assert exporter.shares.names() == []


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("strategy", list(Strategy))
def test_hanging_up_on_one_peer_leaves_the_fences_of_the_others_alone(
    strategy: Strategy, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on one that was stopped, and could not be told goodbye: it takes the producer for dying when it goes on."""
    with Exporter(timeout_s=TIMEOUT_S) as exporter, Stage(exporter.device, 1) as stage:
        fence = exporter.create_fence("fence", strategy=strategy)
        with Importer(exporter.path, timeout_s=TIMEOUT_S) as leaves:
            first = exporter.wait_peer()
            with Importer(exporter.path, timeout_s=TIMEOUT_S) as stays:
                theirs, kept = leaves.open_fence("fence"), stays.open_fence("fence")
                fence.signal(stage.stream, 1)
                kept.synchronize(1, TIMEOUT_S)
                if not told:
                    monkeypatch.setattr(first._link, "_say", lambda *_, **__: None)
                first.close()
                assert eventually(lambda: leaves.state is (PeerState.CLOSED if told else PeerState.DYING))
                with pytest.raises(FencePoisoned):
                    theirs.synchronize(2, TIMEOUT_S)
                for n in range(2, 20):
                    fence.signal(stage.stream, n)
                    kept.synchronize(n, TIMEOUT_S)
                assert exporter.peers == (exporter.wait_peer(),)


def test_a_fence_whose_opening_is_interrupted_at_its_end_is_closed(
    exporter: Exporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would look at it, and the producer's ring would wait for that. Telling a stopped peer takes seconds."""
    fence = exporter.create_fence("fence", strategy=Strategy.EVENT)
    with Importer(exporter.path, timeout_s=TIMEOUT_S) as importer, Stage(exporter.device, 1) as stage:
        tell = Peer._tell

        def interrupt(peer: Peer, kind: Kind, body: bytes) -> bool:
            if kind is Kind.FENCE_TAKEN:
                raise KeyboardInterrupt
            return tell(peer, kind, body)

        monkeypatch.setattr(Peer, "_tell", interrupt)
        with pytest.raises(KeyboardInterrupt):
            importer.open_fence("fence")
        for n in range(1, 20):
            fence.signal(stage.stream, n, timeout_s=TIMEOUT_S)
        assert fence.consumers == ()


def test_events_that_nobody_takes_do_not_pile_up(exporter: Exporter) -> None:
    with Importer(exporter.path, strategy="stream_memop", timeout_s=TIMEOUT_S):
        peer = exporter.wait_peer()
        for _ in range(3000):
            exporter.peer_changed(peer, PeerState.CONNECTED)
    assert exporter.events.qsize() <= 1024


def test_a_peer_that_leaves_at_once_is_a_typed_end_of_waiting(
    exporter: Exporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Importer(exporter.path, strategy="stream_memop", timeout_s=TIMEOUT_S):
        peers = exporter.wait_peer(), exporter.wait_peer()
        looks = [peers[:1], ()]
        monkeypatch.setattr(Exporter, "peers", property(lambda _: looks.pop(0)))
        assert exporter.wait_peer() is peers[0]
        monkeypatch.undo()
        exporter.close()
        with pytest.raises(ClosedError):
            exporter.wait_peer()


def test_a_background_thread_that_cannot_be_had_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    device = load_backend("host").open_device()
    assert device.transfer is not None
    stream = device.transfer.create_stream()
    with monkeypatch.context() as patch:
        refuse_threads(patch)
        with pytest.raises(ResourceExhausted, match="no thread"):
            create_fence(device, Strategy.POLLING)
    with create_fence(device, Strategy.POLLING) as fence:
        handle = fence.export()
        with open_fence(device, handle) as consumer:
            fence.signal(stream, 2)
            consumer.synchronize(2, TIMEOUT_S)
            fence.poison(PoisonReason.CANCELLED)
        for fd in handle.fds:
            os.close(fd)
    device.transfer.destroy_stream(stream)


def test_a_forked_child_cannot_free_or_take_back_its_parents_memory() -> None:
    code = """
import os, sys
from devipc.errors import ForkError
from devipc.session import Exporter, Importer
exporter = Exporter(strategy="stream_memop"); importer = Importer(exporter.path, strategy="stream_memop")
block = exporter.allocate(4096); exporter.share("block", block); memory = importer.open("block")
child = os.fork()
if child == 0:
    for use in (lambda: exporter.unshare("block", timeout_s=1), lambda: exporter.free(block), exporter.new_generation,
                lambda: exporter.allocate(1), lambda: importer.names(), lambda: importer.open("block")):
        try:
            use()
        except ForkError as error:
            assert error.remedy
        else:
            os._exit(1)
    exporter.close(); importer.close(); memory.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
memory.to_numpy()[:] = 3
memory.close(); exporter.unshare("block"); importer.close(); exporter.close()
print("parent fine")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=50, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "parent fine"), done.stderr


def test_nobody_is_asked_to_decide_who_only_listens(exporter: Exporter) -> None:
    from devipc.session.messages import Kind

    with Importer(exporter.path, timeout_s=TIMEOUT_S) as importer:
        with pytest.raises((UsageError, PeerGone), match="does not decide"):  # an answer, and no timeout
            importer.peer._link.call(Kind.DECIDE, timeout_s=TIMEOUT_S)


def test_an_exporter_with_a_path_of_its_own_sweeps_what_killed_ones_left() -> None:
    code = """
import os, signal
from devipc.session import Exporter
print(Exporter(strategy="polling").path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=50, check=False
    )
    dead = Path(done.stdout.strip())
    assert dead.exists()
    with Exporter(strategy="polling") as living:
        assert not dead.exists()
        assert Path(living.path).exists()
        assert not dead.with_name(dead.name + ".lock").exists()
