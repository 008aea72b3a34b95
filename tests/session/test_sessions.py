"""What two and three processes see through a session, and how every misuse ends."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from devipc.completion import choose
from devipc.errors import (
    CapabilityError,
    ClosedError,
    CompletionTimeout,
    DevIPCError,
    HandleError,
    PeerGone,
    StaleError,
    UsageError,
)
from devipc.probe.stage import Stage
from devipc.session import Exporter, Importer, PeerState
from devipc.types import Strategy
from tests.session.processes import eventually, grown, holdings, worker
from tests.session.worker import NBYTES, TIMEOUT_S, VALUES

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("strategy", ["stream_memop", "host_flag", "polling", "event"])
def test_two_processes_see_each_others_bytes_and_order(strategy: str) -> None:
    with worker("exporter", strategy=strategy, count=False) as other:
        with Importer(other.hear("path"), strategy=strategy, timeout_s=TIMEOUT_S) as session:
            with session.open("block") as block, Stage(session.device, NBYTES) as stage:
                there = session.open_fence("there")
                there.wait(stage.stream, VALUES, timeout_s=TIMEOUT_S)
                stage.load(block.ptr, NBYTES)
                stage.synchronize()
                assert bytes(stage.view) == b"\x07" * NBYTES
                back = session.create_fence("back")
                other.tell("back")
                for n in range(1, VALUES + 1):
                    back.signal(stage.stream, n)
                assert other.hear("back") == VALUES
                there.close()
        other.tell("end")


def test_three_processes_share_one_block(exporter: Exporter) -> None:
    block = exporter.allocate(NBYTES)
    with Stage(exporter.device, NBYTES) as stage:
        stage.view[:] = b"\x2a" * NBYTES
        stage.store(block.ptr, NBYTES)
        exporter.share("block", block)
        there = exporter.create_fence("there")
        there.signal(stage.stream, VALUES)
        with (
            worker("importer", path=exporter.path, count=False) as one,
            worker("importer", path=exporter.path, count=False) as two,
        ):
            assert one.hear("content") == two.hear("content") == "2a" * 16
            assert len(exporter.peers) == 2
            one.kill()
            assert eventually(lambda: len(exporter.peers) == 1)
            assert two.hear("signalled") == VALUES
            two.tell("end")
    exporter.unshare("block", timeout_s=TIMEOUT_S)
    exporter.free(block)


def test_names_are_listed_and_unknown_ones_refused_with_what_there_is(exporter: Exporter, importer: Importer) -> None:
    exporter.share("pool", exporter.allocate(4096))
    exporter.create_fence("ready")
    assert importer.peer.names() == (["pool"], ["ready"])
    with pytest.raises(HandleError, match=r"nothing is shared as 'pol'.*pool"):
        importer.open("pol")
    with pytest.raises(HandleError, match=r"no fence is shared as 'done'.*ready"):
        importer.open_fence("done")
    for name in ("", "x" * 256, 7):
        with pytest.raises(UsageError):
            importer.open(name)  # type: ignore[arg-type]


def test_unshare_waits_for_the_last_view_and_says_when_freeing_is_unsafe(
    exporter: Exporter, importer: Importer
) -> None:
    block = exporter.allocate(4096)
    exporter.share("block", block)
    with worker("importer", path=exporter.path, count=False) as other:
        assert eventually(lambda: len(exporter.peers) == 2)
        assert eventually(lambda: bool(exporter.shares.overlapping(block.ptr, block.ptr + 1)))
        with pytest.raises(UsageError, match="still shared"):
            exporter.free(block)
        other.tell("end")
    view = importer.open("block")
    array = view.to_numpy()
    view.close()
    with pytest.raises(CompletionTimeout, match="still mapped"):
        exporter.unshare("block", timeout_s=0.2)
    with pytest.raises(UsageError, match="still shared"):
        exporter.free(block)
    with pytest.raises((StaleError, HandleError)):
        importer.open("block")
    del array
    gc.collect()
    exporter.unshare("block", timeout_s=TIMEOUT_S)
    exporter.free(block)
    with pytest.raises(UsageError):
        exporter.free(block)


def test_a_new_generation_voids_the_old_layout(exporter: Exporter, importer: Importer) -> None:
    exporter.share("pool", exporter.allocate(4096))
    old = importer.open("pool")
    with pytest.raises(CompletionTimeout):
        exporter.new_generation(timeout_s=0.1)
    assert eventually(lambda: bool(old.stale))
    with pytest.raises(StaleError, match="layout"):
        old.ptr  # noqa: B018
    with pytest.raises(HandleError):
        importer.open("pool")
    exporter.share("pool", exporter.allocate(8192))
    assert importer.open("pool").nbytes == 8192
    old.close()


def test_the_exporters_own_process_gets_an_alias(exporter: Exporter, importer: Importer) -> None:
    block = exporter.allocate(4096)
    exporter.share("block", block)
    with importer.open("block") as view:
        assert view.ptr == block.ptr


def test_both_ends_may_share(exporter: Exporter, importer: Importer) -> None:
    block = importer.allocate(4096)
    importer.share("mine", block)
    peer = exporter.wait_peer()
    with peer.open("mine") as view:
        assert view.ptr == block.ptr


def test_the_decision_is_one_for_both_ends_and_names_every_candidate() -> None:
    with worker("exporter", count=False) as other:
        with Importer(other.hear("path"), timeout_s=TIMEOUT_S) as session:
            other.tell("decision")
            theirs = other.hear("decision")
            ours = session.decision
        other.tell("end")
    assert ours.to_json() == theirs
    assert (ours.strategy.value, ours.degraded) == ("stream_memop", False)
    assert {row["strategy"] for row in theirs["candidates"]} >= {"stream_memop", "host_flag", "polling"}


def test_within_one_process_no_stream_waits(exporter: Exporter) -> None:
    with Exporter(timeout_s=TIMEOUT_S) as undecided, Importer(undecided.path, timeout_s=TIMEOUT_S) as session:
        decision = session.decision
        assert (decision.strategy.value, decision.degraded) == ("host_flag", True)
        assert "producer's own fence" in decision.candidates[0].capability.reason
    fence = exporter.create_fence("fence")
    with Importer(exporter.path, timeout_s=TIMEOUT_S) as session, Stage(session.device, 1) as stage:
        fence.signal(stage.stream, 1)
        with session.open_fence("fence") as consumer, pytest.raises(UsageError, match="producer's own fence"):
            consumer.wait(stage.stream, 1)


@pytest.mark.parametrize(("listens", "connects"), [(None, "polling"), ("polling", None), ("polling", "polling")])
def test_an_explicit_strategy_is_obeyed(listens: str | None, connects: str | None) -> None:
    with (
        Exporter(strategy=listens, timeout_s=TIMEOUT_S) as exporter,
        Importer(exporter.path, strategy=connects, timeout_s=TIMEOUT_S) as session,
    ):
        assert session.decision.strategy.value == "polling"
        assert session.create_fence("x").strategy.value == "polling"
        assert exporter.wait_peer().decision == session.decision
        assert exporter.create_fence("y").strategy.value == "polling"


def test_an_unknown_strategy_is_refused(exporter: Exporter) -> None:
    with pytest.raises(UsageError, match="no completion strategy"):
        Importer(exporter.path, strategy="telepathy")


def test_two_ends_that_insist_on_different_strategies_are_told(exporter: Exporter) -> None:
    with Importer(exporter.path, strategy="polling", timeout_s=TIMEOUT_S) as session:
        for peer in (session.peer, exporter.wait_peer()):
            with pytest.raises(CapabilityError, match="insists on completion strategy 'stream_memop', this end on pol"):
                str(peer.decision)


def test_a_peer_that_decides_for_another_strategy_is_not_followed(exporter: Exporter) -> None:
    class Careless(Importer):
        def decide(self, peer: Any) -> Any:
            polling = choose(self.device, peer, backend=self._backend, strategy=Strategy.POLLING)
            peer.announce_decision(polling)
            return polling

    with Careless(exporter.path, timeout_s=TIMEOUT_S) as session:
        assert session.decision.strategy is Strategy.POLLING
        with pytest.raises(CapabilityError, match="decided for completion strategy polling, this end insists on str"):
            str(exporter.wait_peer().decision)


@pytest.mark.parametrize(
    "thing",
    [object(), "text", 0, (0, 0), (4096, 0), (1 << 60, 4096), (-1, 4096), bytearray(64), None],
    ids=lambda value: re.sub(" at 0x[0-9a-f]+", "", repr(value)),
)
def test_what_is_no_shareable_memory_is_refused_before_any_export(exporter: Exporter, thing: object) -> None:
    with pytest.raises((UsageError, CapabilityError, HandleError)) as caught:
        exporter.share("thing", thing)
    assert caught.value.remedy
    assert exporter.shares.names() == []


def test_closed_ends_say_so(exporter: Exporter) -> None:
    importer = Importer(exporter.path, timeout_s=TIMEOUT_S)
    exporter.share("block", exporter.allocate(4096))
    view = importer.open("block")
    view.close()
    view.close()
    with pytest.raises(ClosedError):
        view.ptr  # noqa: B018
    importer.close()
    importer.close()
    for action in (
        lambda: importer.open("block"),
        lambda: importer.open_fence("f"),
        lambda: importer.allocate(4096),
        lambda: importer.share("x", (1, 1)),
        lambda: importer.create_fence("f", strategy="polling"),
    ):
        with pytest.raises((ClosedError, PeerGone)):
            action()


def test_nobody_listens(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(DevIPCError) as caught:
        Importer(tmp_path / "nobody.sock", timeout_s=TIMEOUT_S)
    assert caught.value.remedy
    assert time.monotonic() - start < TIMEOUT_S / 2


def test_closing_with_a_peer_that_holds_on_keeps_the_memory(exporter: Exporter) -> None:
    with worker("exporter", count=False) as other:
        before = holdings()
        session = Importer(other.hear("path"), strategy="stream_memop", timeout_s=TIMEOUT_S)
        array = session.open("block").to_numpy()
        session.close()
        assert int(array[-1]) == 7
        del array
        assert eventually(lambda: not grown(before, holdings())), (before, holdings())


@pytest.mark.once
def test_a_thousand_opens_leak_nothing(exporter: Exporter) -> None:
    with worker("exporter", count=False) as other:
        with Importer(other.hear("path"), strategy="stream_memop", timeout_s=TIMEOUT_S) as session:
            session.peer.mappings.set_idle_limit(0)
            session.open("block").close()
            before = holdings()
            for _ in range(1000):
                session.open("block").close()
            assert eventually(lambda: not grown(before, holdings())), (before, holdings())


@pytest.mark.once
def test_a_thousand_shares_and_fences_leak_nothing(exporter: Exporter, importer: Importer) -> None:
    def cycle(number: int) -> None:
        block = exporter.allocate(4096)
        exporter.share("block", block)
        importer.open("block").close()
        exporter.unshare("block")
        exporter.free(block)
        if number % 10 == 0:
            with exporter.create_fence("fence"), importer.open_fence("fence"):
                pass

    cycle(0)
    before = holdings()
    for number in range(1000):
        cycle(number)
    assert eventually(lambda: not grown(before, holdings())), (before, holdings())


def test_threads_open_and_close_the_same_share(exporter: Exporter) -> None:
    with worker("exporter", count=False) as other:
        with Importer(other.hear("path"), strategy="stream_memop", timeout_s=TIMEOUT_S) as session:
            failures: list[BaseException] = []

            def use() -> None:
                try:
                    for _ in range(50):
                        with session.open("block") as block:
                            assert block.to_numpy()[0] == 7
                except BaseException as error:
                    failures.append(error)

            threads = [threading.Thread(target=use) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert failures == []


def test_a_forked_child_gets_typed_errors_and_does_not_disturb_the_parent() -> None:
    code = """
import os, sys, warnings
warnings.simplefilter("ignore")
from devipc import Exporter, Importer
from devipc.errors import DevIPCError
with Exporter(strategy="polling") as exporter, Importer(exporter.path, strategy="polling") as importer:
    exporter.share("block", exporter.allocate(4096))
    view = importer.open("block")
    fence = exporter.create_fence("fence")
    pid = os.fork()
    if pid == 0:
        wrong = 0
        for action in (lambda: importer.open("block"), lambda: importer.names(), lambda: exporter.allocate(4096),
                       lambda: fence.query(1), lambda: exporter.create_fence("other", strategy="polling")):
            try:
                action()
                wrong += 1
            except DevIPCError:
                pass
        os._exit(wrong)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, status
    view.close()
    importer.open("block").close()
print("parent fine")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=50, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "parent fine"), done.stderr


def test_an_interpreter_that_just_ends_leaves_nothing(tmp_path: Path) -> None:
    code = """
from devipc import Exporter, Importer
exporter = Exporter(strategy="stream_memop"); importer = Importer(exporter.path, strategy="stream_memop")
exporter.share("block", exporter.allocate(4096)); view = importer.open("block").to_numpy()
fence = exporter.create_fence("fence"); other = importer.open_fence("fence")
print(exporter.path)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=50, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    path = Path(done.stdout.strip())
    assert not path.exists()
    assert [process for process in os.listdir("/proc") if process == "none"] == []


def test_a_peer_that_was_waited_for_answers_at_once(exporter: Exporter) -> None:
    for _ in range(20):
        importers: list[Importer] = []

        def connect(into: list[Importer] = importers) -> None:
            into.append(Importer(exporter.path, strategy="polling", timeout_s=TIMEOUT_S))

        thread = threading.Thread(target=connect)
        thread.start()
        try:
            assert exporter.wait_peer().names() == ([], [])
        finally:
            thread.join()
            importers[0].close()
        assert eventually(lambda: not exporter.peers)


def test_events_come_in_order(exporter: Exporter) -> None:
    exporter.share("block", exporter.allocate(NBYTES))
    exporter.create_fence("there")  # never signalled: the other process waits for it until it is killed
    with worker("importer", path=exporter.path, count=False) as other:
        peer = exporter.wait_peer()
        other.kill()
        assert eventually(lambda: peer.state is PeerState.GONE)
    states = [exporter.events.get(timeout=TIMEOUT_S).state for _ in range(3)]
    assert states == [PeerState.CONNECTED, PeerState.DYING, PeerState.GONE]
