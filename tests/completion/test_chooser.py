"""The choice of a strategy between two processes, on honest devices and on devices that lie."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from devipc.capabilities import Capability, Verdict
from devipc.completion import Decision, Phase, TrialResponder, choose, offers
from devipc.completion.cache import TrialCache
from devipc.completion.pair import try_in_children
from devipc.completion.roles import DATA_NBYTES, Op, ProducerRole, Seen
from devipc.completion.trial import RemoteRole, TrialFailed
from devipc.errors import CapabilityError, DevIPCError, DriverError, PeerGone
from devipc.memfd import create_memfd
from devipc.registry import load_backend
from devipc.types import Strategy
from devipc.undoing import note_left
from tests.completion import lying
from tests.completion.lying import LyingBackend
from tests.completion.peer import Peer, Pipe, spawn
from tests.completion.rig import ALL, host_device

DEADLINE_S = 3.0
SOON_S = 1.0
"""Where a wait runs into it for certain: what opens the device may take three times as long, and never does it."""


def responder(pipe: Pipe) -> None:
    """The other process: an honest device that answers."""
    with host_device() as device:
        answering = TrialResponder(device)
        pipe.send({name.value: answer.to_json() for name, answer in offers(device).items()})
        try:
            while True:
                text, fds = pipe.receive()
                if text == "die":
                    os._exit(0)
                body, sent = answering.answer(bytes.fromhex(text), fds)
                for fd in fds:
                    os.close(fd)
                pipe.send(body.hex(), sent)
        finally:
            answering.close()


class PipeLink:
    """What the chooser is handed: the peer behind a test's pipe."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self.calls = 0
        self.die_at = 0
        self.peer_offers: Mapping[Strategy, Capability] = {
            Strategy(name): Capability(Verdict(answer["verdict"]), answer["evidence"], answer["reason"])
            for name, answer in peer.receive()[0].items()
        }

    def call(self, body: bytes, fds: Sequence[int], timeout_s: float) -> tuple[bytes, Sequence[int]]:
        self.calls += 1
        try:
            self._peer.send("die" if self.calls == self.die_at else body.hex(), tuple(fds))
            text, received = self._peer.receive()
        except (EOFError, OSError):
            raise PeerGone("the peer is gone") from None
        return bytes.fromhex(text), received


@contextlib.contextmanager
def linked() -> Iterator[PipeLink]:
    with spawn(responder) as peer:
        yield PipeLink(peer)


@pytest.fixture(autouse=True)
def _plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let children find the lying backend, and keep what they find out in a folder of the test's own."""
    lying.install(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("DEVIPC_TRIAL_CACHE", str(tmp_path / "trials"))


def choose_with(
    lie: str,
    monkeypatch: pytest.MonkeyPatch,
    *,
    strategy: Strategy | None = None,
    children_lie: bool = True,
    deadline_s: float = DEADLINE_S,
) -> Decision:
    monkeypatch.setenv(lying.VARIABLE, lie if children_lie else "")
    backend = LyingBackend(lie)
    device = backend.open_device()
    try:
        with linked() as link:
            return choose(device, link, backend=backend, strategy=strategy, deadline_s=deadline_s)
    finally:
        device.close()


def test_the_best_strategy_is_chosen_and_recorded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="devipc.completion"):
        decision = choose_with("", monkeypatch)
    assert decision.strategy is Strategy.STREAM_MEMOP
    assert not decision.degraded
    assert [candidate.strategy for candidate in decision.candidates] == list(ALL)
    first, *others = decision.candidates
    assert first.phase is Phase.LINK
    assert first.capability
    assert "to the peer" in first.capability.evidence
    assert "from the peer" in first.capability.evidence
    assert {candidate.phase for candidate in others} == {Phase.NOT_TRIED}
    assert json.loads(json.dumps(decision.to_json()))["candidates"][0]["verdict"] == "yes"
    lines = [record for record in caplog.records if "completion strategy of" in record.getMessage()]
    assert len(lines) == 1
    assert "stream_memop" in lines[0].getMessage()


@pytest.mark.parametrize("strategy", ALL)
def test_an_explicit_strategy_is_obeyed(strategy: Strategy) -> None:
    backend = load_backend("host")
    with host_device() as device, linked() as link:
        decision = choose(device, link, backend=backend, strategy=strategy, deadline_s=DEADLINE_S)
    assert decision.strategy is strategy
    assert not decision.degraded


@pytest.mark.parametrize(
    ("lie", "strategy", "reason"),
    [
        ("no_waits", Strategy.STREAM_MEMOP, "waits are switched off"),
        ("no_writes", Strategy.STREAM_MEMOP, "no word writes"),
        ("no_events", Strategy.EVENT, "no inter-process events"),
        ("no_sync", Strategy.STREAM_MEMOP, "sync is switched off"),
        ("no_transfer", Strategy.POLLING, "transfer is switched off"),
        ("events_true", Strategy.EVENT, "before the work in front of it is done"),
        ("events_blocked", Strategy.EVENT, "events need a shared folder"),
        ("markers_true", Strategy.POLLING, "before the work in front of it is done"),
        ("no_registration", Strategy.HOST_FLAG, "reaches no host memory"),
        ("open_hangs", Strategy.POLLING, "0 of 2 processes had opened the device in 3 s"),
        ("open_crashes", Strategy.POLLING, r"crashed \(signal 11\)|watching process of the trial ended"),
    ],
)
def test_an_explicit_strategy_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, lie: str, strategy: Strategy, reason: str
) -> None:
    if lie.startswith("open_"):
        monkeypatch.setattr(LyingBackend, "open_device", lambda self, uuid=None: self._real.open_device(uuid))
    with pytest.raises(CapabilityError, match=reason) as caught:
        choose_with(lie, monkeypatch, strategy=strategy, deadline_s=SOON_S if lie == "open_hangs" else DEADLINE_S)
    assert strategy.value in caught.value.message


@pytest.mark.once
@pytest.mark.parametrize("at", range(1, 5))
def test_a_trial_that_no_pipe_can_be_had_for_leaves_none(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    made: list[tuple[int, int]] = []
    pipe = os.pipe

    def full() -> tuple[int, int]:
        if len(made) + 1 == at:
            raise OSError(errno.EMFILE, "Too many open files")
        made.append(pipe())
        return made[-1]

    before = set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "pipe", full)
    verdict = try_in_children("host", "any", Strategy.POLLING, deadline_s=1.0)
    assert (verdict.verdict, len(made)) == (Verdict.UNTESTED, at - 1)
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_device_that_opens_too_late_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many processes that open a device at once wait for each other; that is no verdict about a strategy."""
    monkeypatch.setattr(LyingBackend, "open_device", lambda self, uuid=None: self._real.open_device(uuid))
    with pytest.raises(CapabilityError, match="0 of 2 processes had opened the device") as caught:
        choose_with("open_hangs", monkeypatch, strategy=Strategy.POLLING, deadline_s=SOON_S)
    assert "try again" in caught.value.remedy
    assert caught.value.retryable
    # The same backend, device and facts: what was found out would be known.
    again = choose_with("open_hangs", monkeypatch, strategy=Strategy.POLLING, children_lie=False)
    assert again.strategy is Strategy.POLLING


@pytest.mark.once
def test_the_time_of_a_trial_begins_when_both_have_opened_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening it may take longer than that: no verdict about a strategy may come of it."""
    with host_device() as device:
        uuid = device.info.uuid
    for opening_s in (DEADLINE_S - 0.3, DEADLINE_S + 0.5):
        monkeypatch.setenv(lying.VARIABLE, f"opens_in_{opening_s}")
        tried = try_in_children("liar", uuid, Strategy.POLLING, deadline_s=DEADLINE_S)
        assert tried, tried


@pytest.mark.parametrize("known", [False, True])
def test_a_device_that_opens_too_late_is_waited_for_once(monkeypatch: pytest.MonkeyPatch, known: bool) -> None:
    """Opening it depends on no strategy; one that is known to work is taken all the same."""
    tried: list[Strategy] = []

    def late(backend: str, uuid: str, strategy: Strategy, *, deadline_s: float) -> Capability:
        tried.append(strategy)
        return Capability.untested("0 of 2 processes had opened the device", remedy="try again")

    monkeypatch.setattr("devipc.completion.chooser.try_in_children", late)
    backend = load_backend("host")
    with host_device() as device, linked() as link:
        if known:
            cache = TrialCache(backend="host", device_uuid=device.info.uuid, facts=backend.facts())
            cache.store(Strategy.POLLING, Capability.yes("tried"))
            decision = choose(device, link, backend=backend, deadline_s=DEADLINE_S)
            assert decision.strategy is Strategy.POLLING
            assert [each.phase for each in decision.candidates[:3]] == [Phase.CHILD, Phase.NOT_TRIED, Phase.LINK]
        else:
            with pytest.raises(CapabilityError, match="0 of 2 processes") as caught:
                choose(device, link, backend=backend, deadline_s=DEADLINE_S)
            assert caught.value.retryable
    assert tried == [Strategy.STREAM_MEMOP]


@pytest.mark.once
@pytest.mark.parametrize(
    ("lie", "rejected", "chosen"),
    [
        (
            "writes_nothing",
            {Strategy.STREAM_MEMOP: "a signal was not seen within", Strategy.HOST_FLAG: "a signal was not seen within"},
            Strategy.POLLING,
        ),
        (
            "writes_early",
            {
                Strategy.STREAM_MEMOP: "before the work in front of it is done",
                Strategy.HOST_FLAG: "before the work in front of it is done",
            },
            Strategy.POLLING,
        ),
        ("waits_nothing", {Strategy.STREAM_MEMOP: "does not hold the stream"}, Strategy.HOST_FLAG),
        ("waits_for_ever", {Strategy.STREAM_MEMOP: "not released by the signal within"}, Strategy.HOST_FLAG),
        ("waits_crash", {Strategy.STREAM_MEMOP: "watching process of the trial ended"}, Strategy.HOST_FLAG),
        (
            "waits_hang",
            {Strategy.STREAM_MEMOP: "did not end within|watching process of the trial ended"},
            Strategy.HOST_FLAG,
        ),
        (
            "no_registration",
            {Strategy.STREAM_MEMOP: "reaches no host memory", Strategy.HOST_FLAG: "reaches no host memory"},
            Strategy.POLLING,
        ),
        ("no_waits", {Strategy.STREAM_MEMOP: "waits are switched off"}, Strategy.HOST_FLAG),
        ("no_writes", {Strategy.STREAM_MEMOP: "no word writes"}, Strategy.HOST_FLAG),
    ],
)
def test_a_lying_device_costs_one_candidate(
    monkeypatch: pytest.MonkeyPatch, lie: str, rejected: Mapping[Strategy, str], chosen: Strategy
) -> None:
    started = time.monotonic()
    decision = choose_with(lie, monkeypatch)
    assert decision.strategy is chosen
    assert decision.degraded
    for candidate in decision.candidates:
        if candidate.strategy in rejected:
            # A child that hangs may be ended by its own watch before its partner's deadline: either may be told.
            words = rejected[candidate.strategy].split("|")
            assert any(word in candidate.capability.reason for word in words), candidate
            assert candidate.phase in (Phase.CHILD, Phase.OFFER)
            assert not candidate.capability
    assert time.monotonic() - started < len(rejected) * (DEADLINE_S + 2) + 6


@pytest.mark.once
@pytest.mark.parametrize(
    ("lie", "reason"),
    [("waits_for_ever", "not released by the signal"), ("waits_nothing", "does not hold"), ("writes_nothing", "seen")],
)
def test_what_children_do_not_see_the_link_does(monkeypatch: pytest.MonkeyPatch, lie: str, reason: str) -> None:
    """The children's device is honest; this process's is not, and a stream of its own is left stuck by it."""
    decision = choose_with(lie, monkeypatch, children_lie=False)
    first = decision.candidates[0]
    assert first.phase is Phase.LINK
    assert first.capability.verdict is Verdict.BROKEN
    assert reason in first.capability.reason
    assert decision.strategy is not Strategy.STREAM_MEMOP


def test_what_the_peer_does_not_offer_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = load_backend("host")
    with host_device() as device, linked() as link:
        link.peer_offers = {**link.peer_offers, Strategy.STREAM_MEMOP: Capability.no("its driver is too old")}
        decision = choose(device, link, backend=backend, deadline_s=DEADLINE_S)
        assert decision.strategy is Strategy.HOST_FLAG
        assert decision.candidates[0].phase is Phase.PEER_OFFER
        calls, link.peer_offers = link.calls, {}
        with pytest.raises(CapabilityError, match="does not speak of it"):
            choose(device, link, backend=backend, deadline_s=DEADLINE_S)
        assert link.calls == calls


@pytest.mark.parametrize("die_at", range(1, 12))
def test_a_peer_that_dies_in_the_trial_is_no_verdict(die_at: int) -> None:
    backend = load_backend("host")
    with host_device() as device, linked() as link:
        cache = TrialCache(backend="host", device_uuid=device.info.uuid, facts=backend.facts())
        cache.store(
            Strategy.STREAM_MEMOP, Capability.yes("tried")
        )  # by children: it is the peer's trial that breaks off
        link.die_at = die_at
        with pytest.raises(PeerGone):
            choose(device, link, backend=backend, deadline_s=DEADLINE_S)


@pytest.mark.parametrize("kind", [DriverError, CapabilityError])
def test_a_trial_that_is_not_undone_is_no_verdict(monkeypatch: pytest.MonkeyPatch, kind: type[DevIPCError]) -> None:
    """Whoever asked hears what stays; no other strategy is tried on top of it."""

    def failing(*_: object, **__: object) -> str:
        note_left(error, DriverError("unmap failed"))
        raise error

    error = kind("map failed")
    monkeypatch.setattr("devipc.completion.chooser._one_way", failing)
    with host_device() as device, linked() as link, pytest.raises(kind) as caught:
        choose(device, link, backend=load_backend("host"), deadline_s=DEADLINE_S)
    assert caught.value is error


def test_words_are_not_believed_on_other_machines() -> None:
    with host_device() as device:
        answers = offers(device, machine="riscv64")
    assert answers[Strategy.STREAM_MEMOP].verdict is Verdict.UNTESTED
    assert "riscv64" in answers[Strategy.HOST_FLAG].reason
    assert "riscv64" not in answers[Strategy.POLLING].reason


@pytest.mark.parametrize(
    "body", [b"", b"\0", b"\1", b"\2", b"\2\x05\0\0\0magic", b"\3", b"\4", b"\0" * 18, b"\xff" * 64]
)
def test_a_responder_answers_nonsense_with_a_reason(body: bytes) -> None:
    with host_device() as device:
        answering = TrialResponder(device)
        answer, fds = answering.answer(body, ())
        assert fds == ()
        assert answer[0] == (0 if body == b"\3" else 1)
        answering.close()


@pytest.mark.timing
def test_a_step_that_is_being_done_is_not_disturbed_by_a_close() -> None:
    """The step reads memory that the close unmaps: that must wait, without keeping whoever closes."""
    with host_device() as device, contextlib.ExitStack() as stack:
        answering = TrialResponder(device)
        data_fd = create_memfd("test-data", DATA_NBYTES)
        stack.callback(os.close, data_fd)
        producer = ProducerRole(device, Strategy.HOST_FLAG, data_fd=data_fd)
        stack.callback(producer.close)
        watching = RemoteRole.opened(lambda body, fds, _: answering.answer(body, fds), producer, data_fd, timeout_s=5.0)
        seen: list[tuple[int, int]] = []
        step = threading.Thread(target=lambda: seen.append(watching.do(Op.LOOK, 1, 300)))
        step.start()
        time.sleep(0.1)
        started = time.monotonic()
        answering.close()
        assert time.monotonic() - started < 0.1
        step.join(5.0)
        assert [first for first, _ in seen] == [Seen.PENDING]
        assert answering._role is None
        with pytest.raises(TrialFailed, match="closed"):
            watching.do(Op.LOOK, 1, 0)
