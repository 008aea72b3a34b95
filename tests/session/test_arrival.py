"""Names that come late, deaths that are told in time, callbacks that use the session, shares after a fork."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from devipc.completion import FenceHandle, ProducerFence
from devipc.completion.page import MAX_CONSUMERS, LineState
from devipc.errors import ClosedError, CompletionTimeout, HandleError
from devipc.probe.stage import Stage
from devipc.session import Exporter, Importer, PeerState
from devipc.session.lending import LentFences
from devipc.types import OpenedExtent
from tests.session.processes import eventually, worker
from tests.session.worker import NBYTES, TIMEOUT_S, VALUES

ROOT = Path(__file__).parents[2]


def test_a_name_that_comes_later_is_waited_for(exporter: Exporter, importer: Importer) -> None:
    late = threading.Timer(
        0.2, lambda: (exporter.create_fence("late"), exporter.share("pool", exporter.allocate(4096)))
    )
    late.start()
    importer.open_fence("late", wait_s=TIMEOUT_S).close()
    importer.open("pool", wait_s=TIMEOUT_S).close()
    late.join()
    start = time.monotonic()
    with pytest.raises(HandleError, match="nothing is shared"):
        importer.open("never", wait_s=0.2)
    assert 0.15 < time.monotonic() - start < TIMEOUT_S / 2


@pytest.mark.timing
def test_dying_is_told_although_the_driver_will_not_unmap(monkeypatch: pytest.MonkeyPatch) -> None:
    let_go, told = threading.Event(), []
    with worker("exporter", count=False) as other:
        with Importer(other.hear("path"), strategy="stream_memop", timeout_s=TIMEOUT_S) as session:
            session.on_event(lambda event: told.append((event.state, time.monotonic())))
            session.open("block").close()  # idle: to be unmapped at the peer's death
            memory = session.device.memory
            assert memory is not None
            real = memory.close

            def blocked(opened: OpenedExtent) -> None:
                let_go.wait(TIMEOUT_S)
                real(opened)

            monkeypatch.setattr(memory, "close", blocked)
            killed = other.kill()
            assert eventually(lambda: bool(told))
            assert told[0][0] is PeerState.DYING
            assert told[0][1] - killed < 0.1
            let_go.set()


def test_a_callback_may_use_the_session_from_another_thread(exporter: Exporter) -> None:
    counts: list[int] = []

    def count(_event: object) -> None:
        asked = threading.Thread(target=lambda: counts.append(len(exporter.peers)))
        asked.start()
        asked.join(5)

    exporter.on_event(count)
    with Importer(exporter.path, timeout_s=TIMEOUT_S):
        assert eventually(lambda: counts == [1])
    assert eventually(lambda: counts == [1, 0])


def test_a_forked_child_shares_memory_of_its_own() -> None:
    code = """
import os, warnings
warnings.simplefilter("ignore")
import devipc.mappings
pid = os.fork()
from devipc import Exporter, Importer
with Exporter(strategy="polling") as exporter, Importer(exporter.path, strategy="polling") as importer:
    exporter.share("block", exporter.allocate(4096))
    importer.open("block").close()
if pid == 0:
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=50, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "0"), done.stderr


@pytest.mark.long
@pytest.mark.timeout(180)
def test_a_fence_outlives_more_dead_consumers_than_it_has_lines(exporter: Exporter) -> None:
    exporter.share("block", exporter.allocate(NBYTES))
    fence = exporter.create_fence("there")  # never signalled: the others wait for it until they are killed
    for _ in range(MAX_CONSUMERS + 3):
        with worker("importer", path=exporter.path, count=False) as other:
            assert eventually(lambda: len(fence.consumers) > 0)
            other.kill()
        assert eventually(lambda: fence.consumers == ())


@pytest.mark.timing
def test_gone_is_told_at_once_in_the_middle_of_a_trial() -> None:
    noticed: list[tuple[PeerState, float]] = []
    with Exporter(timeout_s=TIMEOUT_S) as session:
        session.on_event(lambda event: noticed.append((event.state, time.monotonic())))
        with worker("decider", path=session.path, count=False) as other:
            peer = session.wait_peer()
            assert eventually(lambda: peer._trials._role is not None)
            killed = other.kill()
            assert eventually(lambda: bool(noticed) and noticed[-1][0] is PeerState.GONE)
            assert noticed[-1][1] - killed < 0.6


def test_what_a_peer_keeps_that_was_hung_up_on_comes_back_when_it_is_gone(exporter: Exporter) -> None:
    """Nobody hears of it by the connection any more: it holds memory, and a line of a fence."""
    block = exporter.allocate(NBYTES)
    exporter.share("block", block)
    fence = exporter.create_fence("there")
    with Stage(exporter.device, NBYTES) as stage:
        with worker("importer", path=exporter.path, strategy="stream_memop", count=False) as other:
            for n in range(1, VALUES + 1):
                fence.signal(stage.stream, n)
            other.hear("signalled")
            peer = exporter.wait_peer()
            peer.close(timeout_s=0.1)
            assert peer.state is PeerState.CLOSED
            assert not peer.over
            for timeout_s in (0.05, 0.2):
                with pytest.raises(CompletionTimeout):
                    exporter.unshare("block", timeout_s=timeout_s)
            assert fence._page.line_state(1) is LineState.DROPPED
            other.kill()
            exporter.unshare("block", timeout_s=TIMEOUT_S)
            exporter.free(block)
            assert eventually(lambda: peer.over)
            assert fence._page.line_state(1) is LineState.FREE


def test_a_fence_that_is_lent_while_this_side_hangs_up_holds_up_nobody(exporter: Exporter) -> None:
    """A full ring keeps the thread that lends it, for longer than a close waits for that."""
    fence = exporter.create_fence("fence", strategy="event")

    def late(name: str) -> tuple[ProducerFence, FenceHandle]:
        handle = fence.export()
        lent.drop_all(gone=False, hung_up=True)
        return fence, handle

    lent = LentFences(late)
    with pytest.raises(ClosedError):
        lent.lend(1, "fence")
    assert fence.consumers == ()
    assert fence._page.line_state(1) is LineState.FREE
