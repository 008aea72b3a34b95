"""SIGKILL of either side at every traced call: the survivor is told, never hangs, and holds nothing afterwards."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from devipc.errors import DevIPCError, FencePoisoned, PeerError, StaleError
from devipc.probe.stage import Stage
from devipc.session import Exporter, Importer, PeerState
from tests.session.processes import eventually, grown, holdings, worker
from tests.session.worker import NBYTES, TIMEOUT_S, VALUES

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

STRATEGIES = ["stream_memop", "polling"]
ALLOWED = (PeerError, StaleError)


def import_once(path: str, strategy: str, tell: Callable[[str], None]) -> str:
    """Follow the exporter's script to its end, or until it dies; return how that went."""
    with Importer(path, strategy=strategy, timeout_s=TIMEOUT_S) as session:
        outcome = "completed"
        try:
            with session.open("block") as block, Stage(session.device, NBYTES) as stage:
                there = session.open_fence("there")
                for n in range(1, VALUES + 1):
                    there.wait(stage.stream, n, timeout_s=TIMEOUT_S)
                    stage.load(block.ptr, NBYTES)
                    stage.synchronize()
                    if there.query(n):
                        assert bytes(stage.view) == b"\x07" * NBYTES
                back = session.create_fence("back")
                tell("back")
                for n in range(1, VALUES + 1):
                    back.signal(stage.stream, n)
                stage.synchronize()
                there.close()
        except ALLOWED as error:
            outcome = type(error).__name__
        return outcome


@pytest.mark.long
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_exporter_killed_at_every_call(strategy: str) -> None:
    with worker("exporter", strategy=strategy) as whole:
        path = whole.hear("path")
        assert import_once(path, strategy, whole.tell) == "completed"
        whole.tell("end")
        last = whole.hear("calls")
    assert last > 20
    before = holdings()
    outcomes: dict[str, int] = {}
    for kill_at in range(1, last + 1):
        start = time.monotonic()
        with worker("exporter", strategy=strategy, kill_at=kill_at) as victim:
            path = victim.hear("path")
            if path is not None:
                try:
                    outcome = import_once(path, strategy, victim.tell)
                except PeerError as error:  # it died before it had said hello
                    outcome = f"connect: {type(error).__name__}"
                outcomes[outcome] = outcomes.get(outcome, 0) + 1
                victim.tell("end")
        assert time.monotonic() - start < TIMEOUT_S - 1, f"hung at call {kill_at}"
    assert eventually(lambda: not grown(before, holdings())), (before, holdings(), outcomes)
    assert sum(outcomes.values()) > 10, outcomes


@pytest.mark.long
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_importer_killed_at_every_call(strategy: str) -> None:
    before = holdings()
    with worker_of_importer(strategy, 0) as (told, calls):
        assert told == PeerState.CLOSED.value
    for kill_at in range(1, calls + 1):
        start = time.monotonic()
        with worker_of_importer(strategy, kill_at):
            pass
        assert time.monotonic() - start < TIMEOUT_S - 1, f"hung at call {kill_at}"
    assert eventually(lambda: not grown(before, holdings())), (before, holdings())


class worker_of_importer:  # noqa: N801 - reads as a function in `with`
    """One exporter here and one importing worker that dies at its N-th call."""

    def __init__(self, strategy: str, kill_at: int) -> None:
        self._strategy, self._kill_at = strategy, kill_at

    def __enter__(self) -> tuple[str, int]:
        calls = 0
        with Exporter(strategy=self._strategy, timeout_s=TIMEOUT_S) as session:
            block = session.allocate(NBYTES)
            with Stage(session.device, NBYTES) as stage:
                stage.view[:] = b"\x07" * NBYTES
                stage.store(block.ptr, NBYTES)
                session.share("block", block)
                there = session.create_fence("there")
                for n in range(1, VALUES + 1):
                    there.signal(stage.stream, n)
                stage.synchronize()
            with worker("importer", strategy=self._strategy, path=session.path, kill_at=self._kill_at) as other:
                assert eventually(lambda: bool(session.peers) or other.process.poll() is not None)
                peers = session.peers
                assert peers or self._kill_at, "the healthy run must connect"
                try:
                    content = other.hear("content")
                    assert content in (None, "07" * 16)
                    if other.hear("signalled") and peers:
                        with peers[-1].open_fence("back") as back:
                            back.synchronize(VALUES, TIMEOUT_S)
                except ALLOWED:
                    pass
                other.tell("end")
                calls = other.hear("calls") or 0
            events = [session.events.get_nowait().state.value for _ in range(session.events.qsize())]
            last = events[-1] if events else ""
            if events:
                assert eventually(lambda: not session.peers)
            # The dead importer's leases end, so that nothing hinders taking the memory back.
            session.unshare("block", timeout_s=5.0)
        return last, calls

    def __exit__(self, *_: object) -> None:
        return


@pytest.mark.timing
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy-main-thread"])
def test_dying_is_told_within_100_ms_whatever_the_victims_memory(busy: bool) -> None:
    told: list[tuple[PeerState, float]] = []
    with worker("victim", ballast_mib=1024, count=False) as victim:
        with Importer(victim.hear("path"), strategy="stream_memop", timeout_s=TIMEOUT_S) as session:
            session.on_event(lambda event: told.append((event.state, time.monotonic())))
            fence = session.open_fence("there")
            fence.synchronize(VALUES, TIMEOUT_S)
            waiting: list[float] = []

            def wait_for_a_value_that_never_comes() -> None:
                with pytest.raises(FencePoisoned):
                    fence.synchronize(VALUES + 1, TIMEOUT_S)
                waiting.append(time.monotonic())

            waiter = threading.Thread(target=wait_for_a_value_that_never_comes)
            waiter.start()
            killed = victim.kill()
            while busy and len(told) < 1 and time.monotonic() - killed < 5:
                sum(range(20_000))  # holds the interpreter like a busy scheduler
            assert eventually(lambda: session.state is PeerState.GONE)
            assert eventually(lambda: len(told) > 1)  # the state is known a moment before it is told
            waiter.join(5)
    states = [state for state, _ in told]
    assert states == [PeerState.DYING, PeerState.GONE]
    assert told[0][1] - killed < 0.1
    assert waiting
    assert waiting[0] - killed < 0.1


@pytest.mark.timing
def test_a_stream_wait_is_released_when_the_signaller_dies() -> None:
    with worker("exporter", count=False) as victim:
        with Importer(victim.hear("path"), strategy="stream_memop", timeout_s=TIMEOUT_S) as session:
            device = session.device
            assert device.transfer is not None
            assert device.sync is not None
            fence = session.open_fence("there")
            fence.synchronize(VALUES, TIMEOUT_S)
            # What a daemon must survive: a wait that is on the stream when the peer dies before it signals.
            fence._page.issued = VALUES + 1  # the peer's promise, which it will not keep
            stream = device.transfer.create_stream()
            fence.wait(stream, VALUES + 1)
            killed = victim.kill()
            device.transfer.synchronize_stream(stream)
            released_s = time.monotonic() - killed
            with pytest.raises(FencePoisoned):
                fence.query(VALUES + 1)
            device.transfer.destroy_stream(stream)
    assert released_s < 0.1


def test_memory_of_a_dead_exporter_turns_stale_but_stays_mapped_for_its_views() -> None:
    before = holdings()
    with worker("exporter", count=False) as victim:
        with Importer(victim.hear("path"), strategy="stream_memop", timeout_s=TIMEOUT_S) as session:
            block = session.open("block")
            array = block.to_numpy()
            victim.kill()
            assert eventually(lambda: session.state is PeerState.GONE)
            assert "died" in block.stale
            with pytest.raises(StaleError):
                block.ptr  # noqa: B018
            with pytest.raises(DevIPCError):
                session.open("block")
            block.close()
            assert int(array[0]) == 7
            del array
    assert eventually(lambda: not grown(before, holdings())), (before, holdings())
