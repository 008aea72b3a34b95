"""Opening several extents, where what was opened cannot be closed again: whoever asked hears of each, once."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from devipc import deadline, mappings, opening
from devipc.capabilities import Capability
from devipc.channel.link import Link
from devipc.errors import BoundsError, CapabilityError, CompletionTimeout, DevIPCError, DriverError
from devipc.lease import LeaseTable
from devipc.mappings import LocalExports
from devipc.opening import close_extents, open_extents
from devipc.session import Exporter, Importer, RemoteMemory, remote, shares
from devipc.session.borrowing import Borrowed
from devipc.session.messages import Kind
from devipc.types import Chunk, ExportedExtent, HandleKind, OpenedExtent, Strategy
from devipc.undoing import undo, what_is_left
from tests.host.test_interrupts import interrupt_at
from tests.session.processes import eventually

TIMEOUT_S = 10.0
BEGUN_S = 0.5  # within this a thread has begun, also where both processors are busy
EXTENTS = [ExportedExtent(HandleKind.OPAQUE, (Chunk(64, 0, 64, b""),), ()) for _ in range(3)]


class Memory:
    """Opens two of three, and closes none."""

    def __init__(self, nbytes: int = 64) -> None:
        self.opens, self.refusals, self.nbytes = 0, list[DriverError](), nbytes

    def open(self, extent: ExportedExtent) -> OpenedExtent:
        self.opens += 1
        if self.opens > 2 and self.nbytes == 64:
            raise DriverError("open failed")
        return OpenedExtent(4096 * self.opens, self.nbytes, self.opens)

    def close(self, opened: OpenedExtent) -> None:
        self.refusals.append(DriverError(f"unmap of {opened.token} failed"))
        raise self.refusals[-1]


class Beside(Memory):
    """Maps side by side, until a step fails, and what undoes it."""

    def __init__(self, error: Callable[[str], DevIPCError]) -> None:
        super().__init__()
        self._error = error

    def side_by_side(self, kind: HandleKind) -> Capability:
        return Capability.untested("tests")

    def open_side_by_side(self, extents: Sequence[ExportedExtent]) -> tuple[OpenedExtent, ...]:
        try:
            raise self._error("map failed")
        except DevIPCError:
            undo(self.close, OpenedExtent(4096, 64, "all"))
            raise


def refused(memory: Memory) -> DevIPCError:
    heard: list[Exception] = []
    with pytest.raises(DevIPCError) as caught:
        open_extents(memory, EXTENTS, timeout_s=TIMEOUT_S, on_refused=heard.append)  # type: ignore[arg-type]
    assert heard == memory.refusals
    assert heard
    assert list(caught.value.left) == heard, "the caller is told as well"
    return caught.value


def test_of_some_that_were_opened_one_by_one() -> None:
    assert refused(Memory()).message == "open failed"


def test_of_some_that_have_another_length() -> None:
    assert refused(Memory(nbytes=32)).code == "short_mapping"


@pytest.mark.parametrize("error", [DriverError, CapabilityError])
def test_of_a_backend_that_undoes_a_part_of_its_own(error: Callable[[str], DevIPCError]) -> None:
    """Also where it says that it cannot map side by side at all: nothing is opened on top of what stays."""
    memory = Beside(error)
    assert refused(memory).message == "map failed"
    assert memory.opens == 0


def test_where_nothing_stays_they_are_opened_one_by_one() -> None:
    memory = Beside(CapabilityError)
    memory.close = lambda opened: None  # type: ignore[method-assign]
    with contextlib.suppress(DriverError):
        open_extents(memory, EXTENTS, timeout_s=TIMEOUT_S)  # type: ignore[arg-type]
    assert memory.opens == 3


class Explaining(Memory):
    """Says in words of its own why an open failed whose undoing failed too."""

    def open(self, extent: ExportedExtent) -> OpenedExtent:
        try:
            try:
                raise DriverError("map failed", retryable=True)
            except DriverError:
                undo(self.close, OpenedExtent(4096, 64, "one"))
                raise
        except DriverError as error:
            raise BoundsError("too large", retryable=True) from error


def test_of_an_error_that_was_made_from_another_one() -> None:
    error = refused(Explaining())
    assert error.message == "too large"
    assert not error.retryable


class Slow(Memory):
    """Opens all, when it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go = threading.Event()

    def open(self, extent: ExportedExtent) -> OpenedExtent:
        self.let_go.wait(TIMEOUT_S)
        self.opens += 1
        return OpenedExtent(4096 * self.opens, 64, self.opens)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_of_all_that_an_open_which_was_given_up_made() -> None:
    heard: list[Exception] = []
    memory = Slow()
    with pytest.raises(CompletionTimeout):
        open_extents(memory, EXTENTS, timeout_s=BEGUN_S, on_refused=heard.append)  # type: ignore[arg-type]
    opening = [thread for thread in threading.enumerate() if thread.name == "devipc-open"]
    memory.let_go.set()
    for thread in opening:
        thread.join(TIMEOUT_S)
    assert len(heard) == len(EXTENTS)
    assert heard == memory.refusals


def test_of_all_that_an_open_which_was_interrupted_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interrupt is raised, and not what the driver said to its undoing."""
    heard: list[tuple[Exception, int]] = []
    inside = [0]
    memory = Slow()
    wait = threading.Event.wait

    @contextlib.contextmanager
    def driving() -> Iterator[None]:
        inside[0] += 1
        yield
        inside[0] -= 1

    def interrupt(event: threading.Event, timeout: float | None = None) -> bool:
        if event is not memory.let_go and threading.current_thread() is threading.main_thread() and memory.opens == 0:
            memory.let_go.set()
            wait(event, TIMEOUT_S)
            raise KeyboardInterrupt
        return wait(event, timeout)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Event, "wait", interrupt)
        started = threading.Thread.start

        def start(thread: threading.Thread) -> None:
            with monkeypatch.context() as inner:
                inner.setattr(threading.Event, "wait", wait)
                started(thread)

        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(KeyboardInterrupt) as caught:
            open_extents(
                memory,  # type: ignore[arg-type]
                EXTENTS,
                timeout_s=TIMEOUT_S,
                driving=driving,
                on_refused=lambda error: heard.append((error, inside[0])),
            )
    assert [error for error, _ in heard] == memory.refusals
    assert len(heard) == len(EXTENTS)
    assert all(count for _, count in heard)
    assert list(what_is_left(caught.value)) == memory.refusals


def test_an_interrupt_ends_the_close_of_no_other_one() -> None:
    class Interrupted(Memory):
        def close(self, opened: OpenedExtent) -> None:
            closed.append(opened.token)
            raise KeyboardInterrupt if opened.token == 1 else DriverError(f"unmap of {opened.token} failed")

    closed: list[object] = []
    heard: list[Exception] = []
    with pytest.raises(KeyboardInterrupt) as caught:
        close_extents(
            Interrupted(),  # type: ignore[arg-type]
            [OpenedExtent(4096 * n, 64, n) for n in range(3)],
            on_refused=heard.append,
        )
    assert closed == [0, 1, 2]
    assert len(heard) == 2
    assert list(what_is_left(caught.value)) == heard


def test_an_open_that_was_interrupted_anywhere_keeps_nothing() -> None:
    """Neither the memory, nor the turn of those who open the same behind it."""
    files = [str(module.__file__) for module in (deadline, mappings, opening, remote)]
    point, hit = 0, True
    with Exporter(strategy="polling") as exporter, Importer(exporter.path, strategy="polling") as importer:
        importer.peer.mappings._instance = bytes(16)  # not the short cut within one process
        importer.peer.mappings.set_idle_limit(0)
        block = exporter.allocate(4096)
        opened: list[RemoteMemory] = []
        gc.freeze()  # what other tests of this process have left takes as long as all of this
        while hit:
            point += 1
            exporter.share("block", block)
            hit = interrupt_at(point, lambda: opened.append(importer.open("block")), files)
            while opened:
                opened.pop().close()
            gc.collect()
            exporter.unshare("block", timeout_s=TIMEOUT_S)
            assert not importer.peer.mappings._opening, f"the turn is kept after an interrupt at place {point}"
        gc.unfreeze()
    assert point > 50


def test_an_open_that_is_interrupted_while_it_gives_a_lease_back_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer may be stopped, so that this takes seconds."""
    with Exporter(strategy="polling") as exporter, Importer(exporter.path, strategy="polling") as importer:
        importer.peer.mappings._instance = bytes(16)
        importer.peer.mappings.set_idle_limit(0)
        exporter.share("block", exporter.allocate(4096))
        give_back = Borrowed.give_back

        def interrupt(borrowed: Borrowed, token: int) -> None:
            monkeypatch.undo()
            give_back(borrowed, token)
            raise KeyboardInterrupt

        with importer.open("block"):
            monkeypatch.setattr(Borrowed, "give_back", interrupt)  # the memory is mapped: a second lease is not needed
            with pytest.raises(KeyboardInterrupt):
                importer.open("block")
        exporter.unshare("block", timeout_s=TIMEOUT_S)


@pytest.mark.parametrize(
    "at", [(LeaseTable, "add"), (LocalExports, "add"), (shares, "Share"), (shares, "MemoryHandle")]
)
def test_a_share_that_was_interrupted_leaves_nothing(at: tuple[object, str], monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name = at
    really = getattr(owner, name)

    def interrupt(*arguments: object) -> None:
        really(*arguments)
        raise KeyboardInterrupt

    with Exporter(strategy="polling") as exporter, Importer(exporter.path, strategy="polling") as importer:
        block = exporter.allocate(4096)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupt)
            with pytest.raises(KeyboardInterrupt):
                exporter.share("block", block)
        assert not exporter.shares._leases._leases
        exporter.share("block", block)
        importer.open("block").close()
        exporter.unshare("block", timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("error", [CompletionTimeout("it does not read"), KeyboardInterrupt()])
def test_a_fence_that_is_not_opened_is_given_back_until_the_peer_hears_it(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """The producer would wait for its consumer for ever."""
    with Exporter(strategy="polling") as exporter, Importer(exporter.path, strategy="polling") as importer:
        exporter.create_fence("done", strategy=Strategy.POLLING)
        notify, failures = Link.notify, [error]

        def fail(link: Link, kind: int, *arguments: Any, **options: Any) -> None:
            if kind == Kind.FENCE_TAKEN:
                raise KeyboardInterrupt
            if kind == Kind.FENCE_RETURN and failures:
                raise failures.pop()
            notify(link, kind, *arguments, **options)

        monkeypatch.setattr(Link, "notify", fail)
        with pytest.raises(KeyboardInterrupt):
            importer.peer.open_fence("done")
        (lent,) = (peer._lent_fences for peer in exporter.peers)
        assert eventually(lambda: not lent._lent)
        monkeypatch.undo()
