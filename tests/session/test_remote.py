"""Opened memory: descriptions that no array can have, streams that fail, and the last view when threads ran out."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from typing import Any

import pytest

from devipc.channel.link import PeerState
from devipc.channel.liveness import PeerWatch
from devipc.descriptors import close_fds
from devipc.errors import BoundsError, DriverError, HandleError, PeerGone, ResourceExhausted, StaleError
from devipc.session import Exporter, Importer, RemoteMemory
from devipc.session.messages import ShareMeta
from devipc.session.remote import check_meta
from tests.session.processes import eventually

TIMEOUT_S = 10.0


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    with Exporter(strategy="stream_memop", timeout_s=TIMEOUT_S) as exporter:
        yield exporter


@pytest.fixture
def opened(exporter: Exporter) -> Iterator[RemoteMemory]:
    exporter.share("block", exporter.allocate(4096))
    with Importer(exporter.path, strategy="stream_memop", timeout_s=TIMEOUT_S) as importer:
        yield importer.open("block")


@pytest.mark.parametrize("shape", [(2**63,), (2**62, 2**62), (2**32, 2**31), (0, 2**63), (2**64 - 1,)])
def test_a_shape_that_no_array_can_have_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(BoundsError, match="more elements"):
        check_meta(ShareMeta("uint8", shape, (0,) * len(shape)), 4096)


@pytest.mark.parametrize("shape", [(1,), (0,)])
@pytest.mark.parametrize("stride", [2**60, -(2**60), -(2**63)])
def test_a_stride_that_no_array_can_have_is_refused_though_it_is_never_walked(
    shape: tuple[int, ...], stride: int
) -> None:
    with pytest.raises(BoundsError, match="longer"):
        check_meta(ShareMeta("float64", shape, (stride,)), 4096)


@pytest.mark.parametrize(
    "meta",
    [
        ShareMeta("nonsense", (1,), (1,)),
        ShareMeta("uint8", (4097,), (1,)),
        ShareMeta("uint8", (2,), (2**63 - 1,)),
        ShareMeta("uint8", (2,), (-1,)),
        ShareMeta("uint8", (1,), (1,), 4096),
        ShareMeta("float64", (512,), (1,), 1),
    ],
)
def test_a_description_that_leaves_the_memory_is_refused(meta: ShareMeta) -> None:
    with pytest.raises(HandleError):
        check_meta(meta, 4096)


def test_repeated_elements_are_fine(opened: RemoteMemory) -> None:
    check_meta(ShareMeta("uint8", (2**40, 4096), (0, 1)), 4096)
    opened.close()


def test_memory_stays_open_when_the_work_on_it_is_not_known_to_be_over(
    exporter: Exporter, opened: RemoteMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer = exporter.device.transfer
    assert transfer is not None
    stream = transfer.create_stream()

    def fail(_: object) -> None:
        raise DriverError("the stream cannot be asked")

    with monkeypatch.context() as patch:
        patch.setattr(type(transfer), "synchronize_stream", lambda _, stream: fail(stream))
        with pytest.raises(DriverError):
            opened.close(streams=[stream])
    assert opened.ptr
    opened.close(streams=[stream])
    exporter.unshare("block", timeout_s=TIMEOUT_S)
    transfer.destroy_stream(stream)


def test_the_last_view_gives_the_lease_back_without_a_second_thread(
    exporter: Exporter, opened: RemoteMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = opened.view()
    opened.close()

    here, start = threading.get_ident(), threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if threading.get_ident() == here:  # others may be on their way
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        del view
        assert eventually(lambda: not exporter.shares._tokens)
    exporter.unshare("block", timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("when", ["lent", "opened"])
def test_a_client_that_is_turned_away_late_gives_back_what_it_was_lent(
    exporter: Exporter, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """It is served as soon as a thread reads what it says; that it cannot be watched is found out behind that.

    What it was lent is taken back at once: who has not opened it yet by then hears so, or that the exporter left.
    """
    opened, refused = threading.Event(), threading.Event()

    def none_left(*fds: int | None, **callbacks: Any) -> PeerWatch:
        if threading.current_thread().name != "devipc-greet":
            return PeerWatch(*fds, **callbacks)
        assert eventually(lambda: bool(exporter.shares._tokens) if when == "lent" else opened.is_set())
        close_fds(fd for fd in fds if fd is not None)
        refused.set()
        raise ResourceExhausted("no thread to be had to watch a peer", code="threads")

    monkeypatch.setattr("devipc.channel.link.PeerWatch", none_left)
    exporter.share("block", exporter.allocate(4096))
    with Importer(exporter.path, strategy="stream_memop", timeout_s=TIMEOUT_S) as importer:
        with nullcontext() if when == "opened" else suppress(StaleError, PeerGone):
            with importer.open("block"):
                opened.set()
                assert refused.wait(TIMEOUT_S)
        assert refused.wait(TIMEOUT_S)
        assert eventually(lambda: importer.state is not PeerState.CONNECTED)
        assert eventually(lambda: not exporter.shares._tokens)
        assert exporter.peers == ()
    exporter.unshare("block", timeout_s=TIMEOUT_S)
