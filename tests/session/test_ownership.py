"""Who owes what to whom: leases and lines are neither lost nor given back while something is still mapped."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from devipc import completion
from devipc.channel import Channel
from devipc.errors import (
    ClosedError,
    CompletionTimeout,
    DevIPCError,
    DriverError,
    FencePoisoned,
    PeerGone,
    UsageError,
)
from devipc.host.backend import HostBackend
from devipc.interfaces.memory import DeviceMemoryIPC
from devipc.session import Endpoint, Exporter, Importer, PeerState
from devipc.session.messages import Kind, encode_token_name
from devipc.session.shares import ShareTable
from devipc.types import ExportedExtent, OpenedExtent, Strategy
from tests.session.processes import eventually, grown, holdings, worker

TIMEOUT_S = 10.0


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    with Exporter(strategy="stream_memop", timeout_s=TIMEOUT_S) as exporter:
        yield exporter


@pytest.fixture
def importer(exporter: Exporter) -> Iterator[Importer]:
    with Importer(exporter.path, strategy="stream_memop", timeout_s=TIMEOUT_S) as importer:
        importer.peer.mappings._instance = bytes(16)  # not the short cut within one process
        exporter.wait_peer()
        yield importer


class SlowMemory:
    """The host's memory interface with an open that waits to be let go, or a close that fails."""

    def __init__(self, real: DeviceMemoryIPC, *, failing: bool = False) -> None:
        self.opening, self.let_go = threading.Event(), threading.Event()
        self._real = real
        self._failing = failing

    def open(self, extent: ExportedExtent) -> OpenedExtent:
        self.opening.set()
        if not self._failing:
            assert self.let_go.wait(TIMEOUT_S)
        return self._real.open(extent)

    def close(self, opened: OpenedExtent) -> None:
        self._real.close(opened)
        if self._failing:
            raise DriverError("unmap failed")


def lent(end: Endpoint) -> int:
    return len(end.shares._tokens)


def test_closing_while_an_open_is_under_way_waits_with_the_goodbye_until_it_is_undone(
    exporter: Exporter, importer: Importer
) -> None:
    exporter.share("block", exporter.allocate(4096))
    cache = importer.peer.mappings
    slow = cache._memory = SlowMemory(cache._memory)  # type: ignore[assignment]
    failed: list[BaseException] = []

    def open_block() -> None:
        try:
            importer.open("block")
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=open_block)
    thread.start()
    assert slow.opening.wait(TIMEOUT_S)
    importer.close()
    assert lent(exporter) == 1, "the driver may map it any moment"
    assert exporter.peers, "a goodbye says that nothing is mapped"
    slow.let_go.set()
    thread.join()
    assert isinstance(failed[0], ClosedError)
    assert cache.stats() == {"open": 0, "idle": 0, "nbytes": 0}
    assert eventually(lambda: lent(exporter) == 0 and not exporter.peers)
    with pytest.raises(ClosedError):
        importer.open("block")


def test_threads_that_push_each_others_mappings_out_lose_no_lease(exporter: Exporter, importer: Importer) -> None:
    block = exporter.allocate(12 * 4096)
    for number in range(12):
        exporter.share(str(number), (block.ptr + number * 4096, 4096))
    end = time.monotonic() + 2
    failed: list[BaseException] = []

    def churn(seed: int) -> None:
        choose = random.Random(seed)
        try:
            while time.monotonic() < end:
                importer.open(str(choose.randrange(12))).close()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=churn, args=(seed,)) for seed in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    importer.peer.mappings.set_idle_limit(0)
    assert eventually(lambda: lent(exporter) == 0)
    for number in range(12):
        exporter.unshare(str(number))


def test_a_mapping_keeps_its_own_lease_when_the_same_export_is_mapped_again(
    exporter: Exporter, importer: Importer
) -> None:
    exporter.share("block", exporter.allocate(4096))
    cache = importer.peer.mappings
    first = importer.open("block")
    second_at_unmap: list[int] = []
    give_back = cache._on_unmapped

    def unmapped(mapping: object) -> None:
        cache._on_unmapped = give_back
        second = importer.open("block")  # while the first is out of the cache, but still owes its lease
        give_back(mapping)  # type: ignore[arg-type]
        assert eventually(lambda: lent(exporter) == 1)
        second_at_unmap.append(lent(exporter))
        second.close()

    cache._on_unmapped = unmapped
    cache.set_idle_limit(0)
    first.close()
    assert second_at_unmap == [1]
    assert eventually(lambda: lent(exporter) == 0)


def test_a_lease_that_a_stopped_peer_did_not_take_back_is_offered_again(
    exporter: Exporter, importer: Importer, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter.share("block", exporter.allocate(4096))
    importer.peer.mappings.set_idle_limit(0)
    block = importer.open("block")
    refusals = [CompletionTimeout("the socket is full"), CompletionTimeout("the socket is full")]
    notify = importer.peer._link.notify

    def full(*arguments: object, **options: object) -> None:
        if refusals:
            raise refusals.pop()
        notify(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(importer.peer._link, "notify", full)
    block.close()
    assert eventually(lambda: lent(exporter) == 0)
    exporter.unshare("block")


def test_a_driver_that_cannot_unmap_does_not_keep_others_waiting(importer: Importer, exporter: Exporter) -> None:
    exporter.share("block", exporter.allocate(4096))
    importer.share("mine", importer.allocate(4096))
    theirs = exporter.wait_peer()
    theirs.mappings._instance = bytes(16)
    cache = importer.peer.mappings
    cache._memory = SlowMemory(cache._memory, failing=True)  # type: ignore[assignment]
    importer.open("block").close()
    theirs.open("mine")
    assert lent(importer) == 1
    told: list[PeerState] = []
    importer.on_event(lambda event: told.append(event.state))
    importer.peer._on_state(PeerState.CLOSED)
    assert eventually(lambda: told == [PeerState.CLOSED]), told
    assert lent(importer) == 0


# --- fences -----------------------------------------------------------------------------------------------------------


def test_a_line_given_to_another_consumer_is_not_dropped_with_its_first_one(exporter: Exporter) -> None:
    fence = exporter.create_fence("fence")
    with Importer(exporter.path, strategy="stream_memop", timeout_s=TIMEOUT_S) as early:
        early.open_fence("fence").close()
        with Importer(exporter.path, strategy="stream_memop", timeout_s=TIMEOUT_S) as late:
            later = late.open_fence("fence")
            assert fence.consumers == (1,)
            early.close()
            assert eventually(lambda: len(exporter.peers) == 1)
            assert fence.consumers == (1,), "the second consumer of the line lives"
            later.close()
            assert not fence.consumers


def test_a_peer_cannot_make_this_side_forget_what_it_lent(exporter: Exporter, importer: Importer) -> None:
    fence = exporter.create_fence("fence")
    before = holdings()
    question = encode_token_name(7, "fence")
    importer.peer._link.call(Kind.FENCE_OPEN, question, timeout_s=TIMEOUT_S).close_fds()
    for _ in range(3):
        with pytest.raises(UsageError, match="token is in use"):
            importer.peer._link.call(Kind.FENCE_OPEN, question, timeout_s=TIMEOUT_S)
    assert fence.consumers == (1,)
    importer.close()
    assert eventually(lambda: fence.consumers == ())
    assert eventually(lambda: holdings()["fds"] <= before["fds"])


def test_ten_thousand_opened_fences_are_not_ten_thousand_entries(exporter: Exporter, importer: Importer) -> None:
    exporter.create_fence("fence")
    for _ in range(300):
        importer.open_fence("fence").close()
    for number in range(100):
        with exporter.create_fence(f"once {number}"):
            pass
    assert len(exporter.wait_peer()._lent_fences._lent) <= 2
    assert len(exporter.fences._fences) <= 2


def test_fences_of_a_peer_that_is_gone_end_with_the_session(exporter: Exporter) -> None:
    before = holdings()
    with worker("exporter", count=False) as other:
        with Importer(other.hear("path"), strategy="stream_memop", timeout_s=TIMEOUT_S) as session:
            fence = session.open_fence("there")
            other.kill()
            assert eventually(lambda: session.state is PeerState.GONE)
            assert eventually(lambda: session.peer._hung_up)
            with pytest.raises(FencePoisoned):
                fence.query(100)
    assert fence.closed
    assert eventually(lambda: not grown(before, holdings()))


def test_a_fence_whose_peer_left_while_it_was_opened_is_refused_and_unmapped(
    exporter: Exporter, importer: Importer, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter.create_fence("fence")
    before = holdings()["shared_maps"]
    real = completion.open_fence

    def late(device: object, handle: object) -> object:
        fence = real(device, handle)  # type: ignore[arg-type]
        exporter.close()
        assert eventually(lambda: importer.peer._hung_up)
        return fence

    monkeypatch.setattr(completion, "open_fence", late)
    with pytest.raises(PeerGone):
        importer.open_fence("fence")
    assert eventually(lambda: holdings()["shared_maps"] < before)


def test_one_fence_that_cannot_be_poisoned_does_not_keep_the_next_one_waiting(
    exporter: Exporter, importer: Importer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        exporter.create_fence(name, strategy=Strategy.POLLING)
    first, second = importer.open_fence("a"), importer.open_fence("b")

    def no_thread(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(first, "poison", no_thread)
    importer.peer._on_state(PeerState.DYING)
    with pytest.raises(FencePoisoned):
        second.query(1)


def test_what_the_peer_says_of_itself_is_no_reason_to_hang(exporter: Exporter) -> None:
    with Importer(exporter.path, strategy="stream_memop", timeout_s=TIMEOUT_S) as session:
        for kind in Kind:
            for body in (b"", b"\xff" * 8, bytes(64)):
                try:
                    session.peer._link.call(kind, body, timeout_s=TIMEOUT_S).close_fds()
                except DevIPCError:
                    continue
        assert session.names() == []


@pytest.mark.parametrize("refused", ["the device is closed", "its plugin raises what it likes"])
def test_a_close_that_the_device_refuses_in_part_still_hangs_up(
    monkeypatch: pytest.MonkeyPatch, refused: str, caplog: pytest.LogCaptureFixture
) -> None:
    exporter = Exporter(backend=HostBackend(), strategy="polling", timeout_s=TIMEOUT_S)
    device: Any = exporter.device
    exporter.share("block", exporter.allocate(4096))
    exporter.create_fence("fence")
    with Importer(exporter.path, strategy="polling", timeout_s=TIMEOUT_S) as importer:
        exporter.wait_peer()

        def refuse(_: object) -> None:
            raise RuntimeError(refused)

        if "closed" in refused:
            device.close()
        else:
            for name in ("release", "free"):
                monkeypatch.setattr(exporter._memory, name, refuse)
        exporter.close(timeout_s=1)
        assert eventually(lambda: importer.state is PeerState.CLOSED)
    assert refused in caplog.text
    device.close()


def test_an_interrupted_close_still_hangs_up_and_frees_nothing_that_is_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = Exporter(strategy="polling", timeout_s=TIMEOUT_S)
    block, alone = exporter.allocate(4096), exporter.allocate(4096)
    exporter.share("block", block)
    freed: list[int] = []
    monkeypatch.setattr(exporter._memory, "free", lambda allocation: freed.append(allocation.ptr))
    with Importer(exporter.path, strategy="polling", timeout_s=TIMEOUT_S) as importer, importer.open("block"):

        def interrupt(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(ShareTable, "finish", interrupt)
        with pytest.raises(KeyboardInterrupt):
            exporter.close(timeout_s=0.1)
        assert freed == [alone.ptr]
        assert eventually(lambda: importer.state is PeerState.CLOSED)
        monkeypatch.undo()
    for allocation in (block, alone):
        exporter._memory.free(allocation)
    exporter._memory.release(exporter.shares.retire("block").handle.extent)


def test_a_close_beside_an_unshare_of_another_thread_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = Exporter(strategy="polling", timeout_s=TIMEOUT_S)
    exporter.share("block", exporter.allocate(4096))
    names = ShareTable.names

    def late(table: ShareTable) -> list[str]:
        found = names(table)
        other = threading.Thread(target=exporter.unshare, args=("block",), daemon=True)
        other.start()
        other.join(0.1)
        return found

    monkeypatch.setattr(ShareTable, "names", late)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # one of the two comes too late, as it is told
    with Importer(exporter.path, strategy="polling", timeout_s=TIMEOUT_S) as importer:
        exporter.wait_peer()
        exporter.close()
        assert eventually(lambda: importer.state is PeerState.CLOSED)


@pytest.mark.parametrize("what", ["fence", "block"])
def test_descriptors_on_their_way_to_a_peer_stay_open_while_this_side_leaves(
    exporter: Exporter, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The number would be another file, of whoever opens one at that moment, and the peer would get that."""
    block = exporter.allocate(4096)
    share = exporter.share("block", block)
    exporter.create_fence("fence")
    send = Channel.send
    files: list[set[int]] = []

    def leave_before(channel: Channel, kind: int, *body: Any, fds: Sequence[int] = (), **options: Any) -> None:
        if fds and channel is not importer.peer._link._channel:
            files.append({os.fstat(fd).st_ino for fd in fds})
            leaving = threading.Thread(target=(peer if what == "fence" else exporter).close, kwargs={"timeout_s": 0.1})
            leaving.start()
            leaving.join(TIMEOUT_S)
            files.append({os.fstat(fd).st_ino for fd in fds})
        send(channel, kind, *body, fds=fds, **options)

    with Importer(exporter.path, strategy="stream_memop", timeout_s=TIMEOUT_S) as importer:
        importer.share("back", importer.allocate(4096))
        peer = exporter.wait_peer()
        peer.mappings._instance = bytes(16)
        with peer.open("back"):  # keeps the connection
            monkeypatch.setattr(Channel, "send", leave_before)
            with contextlib.suppress(DevIPCError):
                (importer.open_fence if what == "fence" else importer.open)(what)
            monkeypatch.undo()
        before, after = files
        assert before == after
    if what == "block":  # kept as long as this process, since it was lent
        exporter._memory.release(share.handle.extent)
        exporter._memory.free(block)
