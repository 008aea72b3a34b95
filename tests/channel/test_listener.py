"""Where processes meet: private, short enough, one live owner, and none but our own user."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable

import pytest

from devipc.channel import Channel
from devipc.channel.listener import MAX_PATH_NBYTES, Listener, connect, default_directory
from devipc.errors import ClosedError, CompletionTimeout, PeerGone, PeerRefused, UsageError
from tests.channel.child import OTHER_UID
from tests.channel.processes import Child, eventually, holdings

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
ROUNDS = 50


def meet(listener: Listener) -> None:
    with connect(listener.path, timeout_s=5) as here, listener.accept(5) as there:
        here.send(70, b"hello", timeout_s=1)
        assert there.receive(1).body == b"hello"
        assert here.peer.pid == there.peer.pid == os.getpid()


def test_directory_socket_and_lock_are_private_and_go_away(folder: str) -> None:
    held = holdings()
    path = os.path.join(folder, "a", "b", "s")
    with Listener(path) as listener:
        for made in (os.path.join(folder, "a"), os.path.join(folder, "a", "b")):
            assert stat.S_IMODE(os.stat(made).st_mode) == 0o700
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        assert stat.S_IMODE(os.stat(path + ".lock").st_mode) == 0o600
        meet(listener)
    listener.close()
    assert os.listdir(os.path.dirname(path)) == []
    assert holdings() == held


@pytest.mark.parametrize("character", ["a", "é", "語"])
def test_paths_are_measured_in_bytes_before_anything_is_made(folder: str, character: str) -> None:
    size = len(character.encode())
    room = MAX_PATH_NBYTES - len(os.fsencode(folder)) - 1
    fits = character * (room // size) + "x" * (room % size)
    with Listener(os.path.join(folder, fits)) as listener:
        assert len(os.fsencode(listener.path)) == MAX_PATH_NBYTES
        meet(listener)
    for name in (fits + "x", character * 100):
        path = os.path.join(folder, "new", name)
        for use in (lambda path=path: Listener(path), lambda path=path: connect(path, timeout_s=1)):
            with pytest.raises(UsageError) as caught:
                use()
            assert caught.value.code == "path_length"
            assert str(len(os.fsencode(path))) in str(caught.value)
            assert "107" in str(caught.value)
            assert caught.value.remedy
    assert os.listdir(folder) == []


def test_empty_and_broken_paths_are_refused() -> None:
    for path in ("", "a\0b"):
        with pytest.raises(UsageError):
            Listener(path)


def test_a_directory_that_others_can_change_is_refused(folder: str) -> None:
    held = holdings()
    for mode in (0o770, 0o702, 0o1777):
        os.chmod(folder, mode)
        with pytest.raises(UsageError) as caught:
            Listener(os.path.join(folder, "s"))
        assert caught.value.code == "directory"
    os.chmod(folder, 0o700)
    with open(os.path.join(folder, "file"), "w"), pytest.raises(UsageError) as caught:
        Listener(os.path.join(folder, "file", "s"))
    assert caught.value.code == "directory"
    assert holdings() == held


@needs_root
def test_a_foreign_directory_socket_or_lock_is_refused_and_left_alone(folder: str) -> None:
    path = os.path.join(folder, "s")
    os.chown(folder, OTHER_UID, OTHER_UID)
    with pytest.raises(PeerRefused):
        Listener(path)
    os.chown(folder, 0, 0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as planted:
        planted.bind(path)
    os.chown(path, OTHER_UID, OTHER_UID)
    with pytest.raises(PeerRefused):
        Listener(path)
    assert os.listdir(folder) == ["s"]
    os.unlink(path)
    with open(path + ".lock", "w"):
        os.chown(path + ".lock", OTHER_UID, OTHER_UID)
    with pytest.raises(PeerRefused):
        Listener(path)
    assert os.listdir(folder) == ["s.lock"]


def test_other_files_are_never_removed(path: str) -> None:
    with open(path, "w") as file:
        file.write("precious")
    with pytest.raises(UsageError) as caught:
        Listener(path)
    assert caught.value.code == "not_a_socket"
    with open(path) as file:
        assert file.read() == "precious"
    os.unlink(path)
    os.symlink("elsewhere", path + ".lock")
    with pytest.raises(UsageError) as caught:
        Listener(path)
    assert caught.value.code == "lock"


@pytest.mark.parametrize("kind", [socket.SOCK_SEQPACKET, socket.SOCK_STREAM])
def test_a_living_socket_without_a_lock_is_not_removed(path: str, kind: socket.SocketKind) -> None:
    with socket.socket(socket.AF_UNIX, kind) as foreign:
        foreign.bind(path)
        foreign.listen()
        with pytest.raises(UsageError) as caught:
            Listener(path)
        assert caught.value.code == "in_use"
        assert os.path.exists(path)


def test_a_second_live_owner_is_refused_with_the_first_ones_id(path: str, spawn: Callable[..., Child]) -> None:
    child = spawn("owner", path)
    assert child.line().startswith("listening")
    held = holdings()
    with pytest.raises(UsageError) as caught:
        Listener(path)
    assert caught.value.code == "in_use"
    assert str(child.pid) in str(caught.value)
    assert holdings() == held
    connect(path, timeout_s=5).close()  # the first one was not disturbed


def test_a_killed_owners_leftovers_are_replaced(path: str, spawn: Callable[..., Child]) -> None:
    child = spawn("owner", path)
    child.line()
    child.kill()
    child.code()
    assert os.path.exists(path)
    with pytest.raises(PeerGone) as caught:
        connect(path, timeout_s=1)
    assert caught.value.retryable
    with Listener(path) as listener:
        meet(listener)


def test_closing_leaves_a_successors_socket_alone(path: str) -> None:
    first = Listener(path)
    os.unlink(path)
    os.unlink(path + ".lock")
    with Listener(path) as second:
        first.close()
        meet(second)


def test_a_lock_file_that_was_removed_meanwhile_is_no_lock(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner before us removes its lock file between our opening and our locking it."""
    calls = 0
    flock = fcntl.flock

    def removed_first(fd: int, how: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            os.unlink(path + ".lock")
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", removed_first)
    with Listener(path):
        assert calls == 2
        with pytest.raises(UsageError) as caught:
            Listener(path)
        assert caught.value.code == "in_use"


@pytest.mark.timeout(60)
def test_of_two_that_start_at_once_exactly_one_lives(folder: str, spawn: Callable[..., Child]) -> None:
    racers = [spawn("racer"), spawn("racer")]
    wins = [0, 0]
    for number in range(ROUNDS):
        # One path again and again: each round begins with the socket and lock files in whatever state the last left.
        path = os.path.join(folder, f"s{number % 2}")
        moment = time.monotonic() + 0.02
        for racer in racers:
            racer.say(f"{path} {moment}")
        outcomes = [json.loads(racer.line()) for racer in racers]
        codes = sorted(outcome["code"] for outcome in outcomes)
        assert codes == ["in_use", "won"], outcomes
        winner = next(index for index, outcome in enumerate(outcomes) if outcome["code"] == "won")
        wins[winner] += 1
        assert str(racers[winner].pid) in outcomes[1 - winner]["message"]
        with connect(path, timeout_s=5) as channel:
            assert channel.peer.pid == racers[winner].pid
        for racer in racers:
            racer.say("next")
        assert racers[winner].line() == "closed"
    assert os.listdir(folder) == []
    print(f"{wins[0]} to {wins[1]} of {ROUNDS}")


@pytest.mark.once
def test_killed_twenty_times_each_start_works(path: str, spawn: Callable[..., Child]) -> None:
    """Kill points are spread over start-up and operation; no lock and no socket of a dead owner stands in the way."""
    for number in range(20):
        child = spawn("owner", path)
        eventually(lambda: os.path.exists(path + ".lock"))
        time.sleep(number * 0.0001)
        child.kill()
        child.code()
        with Listener(path) as listener:
            meet(listener)


@needs_root
def test_another_user_is_refused_on_both_sides(folder: str, spawn: Callable[..., Child]) -> None:
    with Listener(os.path.join(folder, "s")) as listener:
        os.chmod(folder, 0o711)
        os.chmod(listener.path, 0o666)
        held = holdings()
        child = spawn("stranger", folder, "s")
        with pytest.raises(PeerRefused) as caught:
            listener.accept(20)
        assert caught.value.code == "uid"
        assert str(OTHER_UID) in str(caught.value)
        assert child.line() == "PeerRefused uid"
        child.end()
        assert holdings() == held
        meet(listener)


@needs_root
def test_another_user_is_refused_by_the_files_modes_too(folder: str, spawn: Callable[..., Child]) -> None:
    with Listener(os.path.join(folder, "s")):
        os.chmod(folder, 0o711)
        assert spawn("stranger", folder, "s").line() == "PeerRefused connect"


@needs_root
def test_an_allowed_user_may_come_in(folder: str, spawn: Callable[..., Child]) -> None:
    with Listener(os.path.join(folder, "s"), allowed_uids=[OTHER_UID]) as listener:
        os.chmod(folder, 0o711)
        child = spawn("stranger", folder, "s")
        with listener.accept(20) as channel:
            assert channel.peer.uid == OTHER_UID
        assert child.line() == "PeerRefused uid"  # its own list does not have us


def test_accepting_ends_at_its_deadline_and_when_closed(path: str) -> None:
    listener = Listener(path)
    with pytest.raises(CompletionTimeout):
        listener.accept(0.05)
    ended = threading.Event()

    def wait() -> None:
        try:
            listener.accept(None)
        except ClosedError:
            ended.set()

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.05)
    listener.close()
    assert ended.wait(5)
    thread.join()
    with pytest.raises(ClosedError):
        listener.accept(1)


def test_a_full_queue_ends_at_the_deadline(path: str) -> None:
    with Listener(path, backlog=1):
        waiting: list[Channel] = []
        full = False
        while not full:
            started = time.monotonic()
            try:
                waiting.append(connect(path, timeout_s=0.1))
            except CompletionTimeout:
                full = True
            assert time.monotonic() - started < 2
            assert len(waiting) < 10
        for channel in waiting:
            channel.close()


def test_nobody_there(path: str) -> None:
    with pytest.raises(PeerGone) as caught:
        connect(path, timeout_s=1)
    assert caught.value.code == "no_listener"
    assert caught.value.retryable
    with open(path, "w"):
        pass
    with pytest.raises((PeerGone, PeerRefused)):
        connect(path, timeout_s=1)


def test_the_default_directory_is_the_users_own(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
    assert default_directory() == os.path.join(folder, "devipc")
    temporary = os.path.join(folder, "t")  # the run's own holds this user's sockets while other tests need them
    os.mkdir(temporary)
    monkeypatch.setattr(tempfile, "tempdir", temporary)
    for useless in ("", "relative", os.path.join(folder, "missing")):
        monkeypatch.setenv("XDG_RUNTIME_DIR", useless)
        fallback = default_directory()
        assert fallback == os.path.join(temporary, f"devipc-{os.geteuid()}")
    with Listener(os.path.join(fallback, "s")) as listener:
        assert stat.S_IMODE(os.stat(fallback).st_mode) == 0o700
        meet(listener)
