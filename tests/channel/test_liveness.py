"""A death is noticed at once whatever the victim's memory, by everybody, and its end is proved by the pidfd."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Callable

import pytest

from devipc.capabilities import Verdict
from devipc.channel import liveness
from devipc.channel.hello import greet
from devipc.channel.link import Link, PeerState
from devipc.channel.listener import Listener
from devipc.channel.liveness import PeerWatch, own_life, pid_of_pidfd
from devipc.errors import HandleError
from devipc.futex import OWNER_DIED, WAITERS
from devipc.memfd import SharedMap, create_memfd, validate_memfd
from tests.channel.processes import Child, eventually, holdings, stop

GIB = 2**30
DYING_S = 0.1

Spawn = Callable[..., Child]


class Observed:
    """A link to a victim, and when its states were told."""

    def __init__(self, listener: Listener) -> None:
        self.link = Link.accept(listener.accept(20), facts={}, timeout_s=20)
        self.at: dict[PeerState, float] = {}
        self.link.on_state(self._told)
        self.link.start()

    def _told(self, state: PeerState) -> None:
        self.at[state] = time.monotonic()


def test_this_process_has_both_signs_of_life() -> None:
    life = own_life()
    assert own_life() is life
    assert life.robust.verdict is Verdict.YES
    assert life.exit.verdict is Verdict.YES
    assert life.memfd is not None
    assert life.pidfd is not None
    validate_memfd(life.memfd, min_nbytes=4096)
    assert pid_of_pidfd(life.pidfd) == os.getpid()
    page = SharedMap(life.memfd, 4096, writable=False)
    word = int.from_bytes(page.view[:4], "little")
    page.close()
    holder = next(thread for thread in threading.enumerate() if thread.name == "devipc-life")
    assert word == holder.native_id | WAITERS  # type: ignore[operator]
    assert holder.daemon


@pytest.mark.chaos
@pytest.mark.parametrize("nbytes", [0, GIB])
def test_dying_is_told_within_100_ms_and_gone_by_the_pidfd(path: str, spawn: Spawn, nbytes: int) -> None:
    held = holdings()
    with Listener(path) as listener:
        child = spawn("victim", nbytes, path)
        seen = Observed(listener)
    assert child.line() == "ready"
    assert seen.link.state is PeerState.CONNECTED
    moment = child.kill()
    assert eventually(lambda: PeerState.GONE in seen.at)
    dying, gone = (seen.at[state] - moment for state in (PeerState.DYING, PeerState.GONE))
    print(f"{nbytes / GIB:.0f} GiB: dying after {dying * 1e3:.1f} ms, gone after {gone * 1e3:.1f} ms")
    assert dying <= DYING_S
    assert gone >= dying
    assert child.code() == -signal.SIGKILL
    seen.link.close()
    child.end()
    assert holdings() == held


@pytest.mark.chaos
def test_dying_is_told_in_time_while_the_main_thread_is_busy(path: str, spawn: Spawn) -> None:
    with Listener(path) as listener:
        child = spawn("victim", GIB, path)
        seen = Observed(listener)
    assert child.line() == "ready"
    moment = child.kill()
    count = 0
    while PeerState.GONE not in seen.at:  # never lets go of the interpreter by itself
        count += 1
        assert count % 100_000 or time.monotonic() - moment < 20
    dying = seen.at[PeerState.DYING] - moment
    print(f"dying after {dying * 1e3:.1f} ms beside {count} turns of a busy loop")
    assert dying <= DYING_S
    seen.link.close()


@pytest.mark.chaos
def test_all_of_three_watchers_are_told(folder: str, spawn: Spawn) -> None:
    paths = [os.path.join(folder, name) for name in "abc"]
    watchers = [spawn("watcher", path) for path in paths]
    for watcher in watchers:
        assert watcher.line() == "listening"
    victim = spawn("victim", GIB // 4, *paths)
    assert victim.line() == "ready"
    moment = victim.kill()
    for watcher in watchers:
        told = dict(watcher.line().split() for _ in range(2))
        assert list(told) == ["dying", "gone"]
        assert float(told["dying"]) - moment <= DYING_S
        assert watcher.code() == 0


@pytest.mark.chaos
def test_whom_the_kernel_wakes_wakes_the_others(path: str, spawn: Spawn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "_RECHECK_S", 20.0)
    with Listener(path) as listener:
        child = spawn("victim", 0, path)
        channel = listener.accept(20)
        greeted = greet(channel, first=False, facts={}, timeout_s=20)
    assert child.line() == "ready"
    assert greeted.life_fd is not None
    watches = [watch(os.dup(greeted.life_fd), None) for _ in range(5)]
    time.sleep(0.1)  # until all sleep on the word
    child.kill()
    assert eventually(lambda: all(told == ["dying"] for _, told in watches))
    for watching, _ in watches:
        assert watching.join(5)
    for fd in (greeted.life_fd, greeted.pidfd):
        os.close(fd or -1)
    channel.close()
    child.end()


@pytest.mark.chaos
def test_a_stopped_watcher_does_not_keep_the_news_from_others(folder: str, spawn: Spawn) -> None:
    """The kernel wakes one waiter of the lock; if that one cannot run, the others look for themselves."""
    paths = [os.path.join(folder, name) for name in "abc"]
    watchers = [spawn("watcher", path) for path in paths]
    for watcher in watchers:
        assert watcher.line() == "listening"
    victim = spawn("victim", 0, *paths)
    assert victim.line() == "ready"
    for watcher in watchers[:2]:
        stop(watcher.pid)
    moment = victim.kill()
    assert float(watchers[2].line().removeprefix("dying ")) - moment <= DYING_S
    for watcher in watchers[:2]:
        os.kill(watcher.pid, signal.SIGCONT)
        assert watcher.line().startswith("dying")


@pytest.mark.chaos
def test_a_stopped_victim_is_not_dying_until_it_is_killed(path: str, spawn: Spawn) -> None:
    with Listener(path) as listener:
        child = spawn("victim", 0, path)
        seen = Observed(listener)
    assert child.line() == "ready"
    stop(child.pid)
    time.sleep(0.3)
    assert not seen.at
    moment = child.kill()
    assert eventually(lambda: PeerState.GONE in seen.at)
    assert seen.at[PeerState.DYING] - moment <= DYING_S
    seen.link.close()


@pytest.mark.chaos
def test_dying_is_told_fast_twenty_times(folder: str, spawn: Spawn) -> None:
    took = []
    for number in range(20):
        path = os.path.join(folder, str(number))
        with Listener(path) as listener:
            child = spawn("victim", 0, path)
            seen = Observed(listener)
        assert child.line() == "ready"
        moment = child.kill()
        assert eventually(lambda seen=seen: PeerState.DYING in seen.at)  # type: ignore[misc]
        took.append(seen.at[PeerState.DYING] - moment)
        seen.link.close()
        child.end()
    print(f"dying: median {statistics.median(took) * 1e3:.1f} ms, worst {max(took) * 1e3:.1f} ms")
    assert max(took) <= DYING_S


def watch(life_fd: int | None, pidfd: int | None) -> tuple[PeerWatch, list[str]]:
    told: list[str] = []
    return PeerWatch(life_fd, pidfd, on_dying=lambda: told.append("dying"), on_gone=lambda: told.append("gone")), told


@pytest.mark.parametrize("word", [0, OWNER_DIED, OWNER_DIED | 77, WAITERS])
def test_a_page_that_nobody_holds_means_dying_at_once(word: int) -> None:
    held = holdings()
    fd = create_memfd("page", 4096)
    os.pwrite(fd, word.to_bytes(4, "little"), 0)
    watching, told = watch(fd, None)
    assert eventually(lambda: told == ["dying"])
    assert watching.join(5)
    assert holdings() == held


@pytest.mark.parametrize("word", [0, 78, 77 | OWNER_DIED, 77, 2**32 - 1])
def test_any_change_of_a_held_word_means_dying(word: int) -> None:
    fd = create_memfd("page", 4096)
    os.pwrite(fd, (77 | WAITERS).to_bytes(4, "little"), 0)
    watching, told = watch(os.dup(fd), None)
    time.sleep(0.12)
    assert told == []
    os.pwrite(fd, word.to_bytes(4, "little"), 0)  # nobody is woken: the watch looks again by itself
    assert eventually(lambda: told == ["dying"])
    assert watching.join(5)
    os.close(fd)


def test_a_watch_without_a_page_goes_by_the_pidfd() -> None:
    held = holdings()
    sleeper = subprocess.Popen(["sleep", "60"])
    watching, told = watch(None, os.pidfd_open(sleeper.pid))
    time.sleep(0.1)
    assert told == []
    sleeper.kill()
    assert eventually(lambda: told == ["dying", "gone"])
    sleeper.wait()
    assert watching.join(5)
    assert holdings() == held


def test_a_watch_survives_callbacks_that_raise() -> None:
    sleeper = subprocess.Popen(["sleep", "60"])
    told = threading.Event()

    def fail() -> None:
        raise ValueError("on purpose")

    watching = PeerWatch(None, os.pidfd_open(sleeper.pid), on_dying=fail, on_gone=told.set)
    sleeper.kill()
    assert told.wait(5)
    sleeper.wait()
    assert watching.join(5)


@pytest.mark.timing
def test_closing_a_watch_never_blocks_and_tells_nothing() -> None:
    held = holdings()
    life = own_life()
    assert life.memfd is not None
    assert life.pidfd is not None
    for pidfd in (os.dup(life.pidfd), None):
        watching, told = watch(os.dup(life.memfd), pidfd)
        time.sleep(0.02)
        started = time.monotonic()
        watching.close()
        watching.close()
        assert time.monotonic() - started < 0.05
        assert watching.join(1)
        assert told == []
    entered, leave = threading.Event(), threading.Event()

    def stay() -> None:
        entered.set()
        leave.wait(20)

    watching = PeerWatch(create_memfd("page", 4096), None, on_dying=stay, on_gone=stay)
    assert entered.wait(5)
    started = time.monotonic()
    watching.close()
    assert time.monotonic() - started < 0.05
    assert not watching.join(0.01)
    leave.set()
    assert watching.join(5)
    assert holdings() == held


def test_a_page_whose_size_can_change_is_refused() -> None:
    held = holdings()
    fd = os.memfd_create("page", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    with pytest.raises(HandleError) as caught:
        watch(fd, os.pidfd_open(os.getpid()))
    assert caught.value.code == "unsealed"
    with pytest.raises(HandleError):
        watch(create_memfd("page", 100), None)
    assert holdings() == held


def test_only_pidfds_pass_for_pidfds() -> None:
    held = holdings()
    others = [os.memfd_create("x"), os.eventfd(0), os.open("/proc/self/status", os.O_RDONLY), *os.pipe()]
    for fd in others:
        with pytest.raises(HandleError):
            pid_of_pidfd(fd)
        os.close(fd)
    with pytest.raises(HandleError):
        pid_of_pidfd(others[0])
    ended = subprocess.Popen(["true"])
    fd = os.pidfd_open(ended.pid)
    ended.wait()
    assert pid_of_pidfd(fd) == -1
    os.close(fd)
    assert holdings() == held


def test_without_robust_mutexes_life_is_degraded_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise AttributeError("pthread_mutexattr_setrobust: symbol not found")

    held = holdings()
    monkeypatch.setattr(liveness, "_lock_robust", refuse)
    life = liveness._make_life()
    assert life.memfd is None
    assert life.robust.verdict is Verdict.NO
    assert "setrobust" in life.robust.reason
    assert life.robust.remedy in caplog.text
    assert life.exit
    life.close_in_child()
    assert eventually(lambda: holdings() == held)
