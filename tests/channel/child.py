"""What the child processes of these tests do; one role each, chosen on the command line.

Knows only devipc and the lines on its standard streams. The clock that it prints is the machine's, equal in all
processes.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable

from devipc.calltrace import observe
from devipc.channel import Channel, LostMessage, channel_pair
from devipc.channel.hello import Kind, decode_error
from devipc.channel.identity import process_instance
from devipc.channel.link import Link, PeerState
from devipc.channel.listener import Listener, connect
from devipc.channel.liveness import own_life
from devipc.errors import DevIPCError, ForkError, PeerGone, ResourceExhausted, UsageError
from devipc.wire import Writer
from tests.channel.conversation import Client, Server

OTHER_UID = 65534


def say(*words: object) -> None:
    print(*words, flush=True)


def victim(nbytes: str, *paths: str) -> None:
    """Hold touched memory and a link to each path, until killed."""
    memory = bytearray(int(nbytes))
    memory[::4096] = b"x" * len(memory[::4096])
    links = [Link.connect(path, facts={"role": "victim"}, timeout_s=20) for path in paths]
    for link in links:
        link.start()
    say("ready")
    sys.stdin.readline()


def watcher(path: str) -> None:
    """Accept one link and print when its peer is dying and gone."""
    gone = threading.Event()

    def told(state: PeerState) -> None:
        say(state.value, time.monotonic())
        if state is PeerState.GONE:
            gone.set()

    with Listener(path) as listener:
        say("listening")
        link = Link.accept(listener.accept(20), facts={}, timeout_s=20)
        link.on_state(told)
        link.start()
        gone.wait(30)
        link.close()


def echo(path: str) -> None:
    """Answer what comes until the peer leaves."""
    left = threading.Event()
    with Listener(path) as listener:
        say("listening")
        link = Link.accept(listener.accept(20), facts={}, timeout_s=20)
        link.handle(64, lambda message: (message.body, message.fds))
        link.on_state(lambda _: left.set())
        link.start()
        left.wait(60)
        say(link.state.value)
        link.close()


def leave(path: str, how: str) -> None:
    """Connect, then leave: in good order and at once over, or by plain exit."""
    link = Link.connect(path, facts={}, timeout_s=20)
    link.start()
    if how == "bye":
        link.close()
    os._exit(0)


def silent(path: str) -> None:
    """Connect and say nothing."""
    channel = connect(path, timeout_s=20)
    say("connected")
    sys.stdin.readline()
    channel.close()


def impostor(path: str) -> None:
    """Greet with the pidfd of another process, and print the answer."""
    with connect(path, timeout_s=20) as channel:
        head = Writer().u16(1).u16(1).raw(process_instance(), 16).u8(1).u32(0)
        channel.send(Kind.HELLO, head.done(), fds=[os.pidfd_open(os.getppid())], timeout_s=5)
        answer = channel.receive(20)
        say(Kind(answer.kind).name, decode_error(answer.body, "it").code)


def inherited(fd: str) -> None:
    """Speak over an inherited end of a socket pair."""
    link = Link.over(Channel.adopt(int(fd)), facts={"role": "child"}, timeout_s=20)
    link.handle(64, lambda message: (message.body * 2, ()))
    link.start()
    say(os.get_inheritable(int(fd)))
    sys.stdin.readline()
    link.close()


def racer() -> None:
    """For each path that is read: try to own it; print the outcome; keep it until the next line."""
    for line in sys.stdin:
        path, _, moment = line.strip().partition(" ")
        time.sleep(max(float(moment) - time.monotonic(), 0))
        try:
            listener = Listener(path)
        except UsageError as error:
            say(json.dumps({"code": error.code, "message": str(error)}))
            sys.stdin.readline()
            continue
        say(json.dumps({"code": "won"}))
        sys.stdin.readline()
        listener.close()
        say("closed")


def owner(path: str) -> None:
    """Own a path until killed."""
    listener = Listener(path)
    say("listening", listener.path)
    sys.stdin.readline()


def _become_other() -> None:
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(OTHER_UID)
        os.setuid(OTHER_UID)


def stranger(folder: str, name: str) -> None:
    """Connect as another user, by a path relative to a folder that was entered before."""
    os.chdir(folder)
    _become_other()
    try:
        connect(name, timeout_s=5).close()
        say("connected")
    except DevIPCError as error:
        say(type(error).__name__, error.code)


def flood() -> None:
    """Send descriptors that nobody receives, as an ordinary user with a low limit, then recover."""
    left, right = channel_pair()
    _become_other()
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    sent = 0
    try:
        while sent < 10_000:
            left.send(64, fds=[0] * 20, timeout_s=1)
            sent += 1
    except ResourceExhausted as error:
        say(error.code, error.retryable, "fds" in str(error))
    for _ in range(sent):
        right.receive(1).close_fds()
    left.send(65, b"again", fds=[0] * 20, timeout_s=1)
    message = right.receive(1)
    say(message.kind, message.body.decode(), len(message.fds))


def half_sent() -> None:
    """Break off in the middle of a long message for want of descriptors, then send another one."""
    left, right = channel_pair()
    _become_other()
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))
    try:
        left.send(64, fds=[0] * 1000, timeout_s=1)
    except ResourceExhausted as error:
        say(error.code)
    held = len(os.listdir("/proc/self/fd"))
    try:
        right.receive(0.2)
    except DevIPCError as error:
        say(type(error).__name__)
    left.send(65, b"next", timeout_s=1)
    say(right.receive(1).body.decode(), len(os.listdir("/proc/self/fd")) - held)


def scarce(path: str) -> None:
    """Serve with a full descriptor table, then with room again."""
    with Listener(path) as listener:
        say("listening")
        link = Link.accept(listener.accept(20), facts={}, timeout_s=20)
        link.handle(64, lambda message: (str(len(message.fds)).encode(), ()))
        link.start()
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        used = max(map(int, os.listdir("/proc/self/fd"))) + 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 5, hard))
        say("scarce")
        sys.stdin.readline()
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 500, hard))
        say("plenty")
        sys.stdin.readline()
        link.close()


def lost_frames() -> None:
    """Lose the descriptors of a message of several frames to a full table: one error, and the channel goes on."""
    left, right = channel_pair()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = max(map(int, os.listdir("/proc/self/fd"))) + 1
    left.send(64, b"", request=9, fds=[0] * 600, timeout_s=1)
    left.send(65, b"next", timeout_s=1)
    resource.setrlimit(resource.RLIMIT_NOFILE, (held + 300, hard))
    try:
        right.receive(1)
    except LostMessage as error:
        say(error.kind, error.request, error.code)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    say(right.receive(1).body.decode(), max(map(int, os.listdir("/proc/self/fd"))) + 1 <= held + 1)


def forker(path: str) -> None:
    """Use everything in a forked child: refused there, unharmed here."""
    left, right = channel_pair()
    listener = Listener(path)
    answerer: list[Link] = []
    thread = threading.Thread(target=lambda: answerer.append(Link.accept(right, facts={}, timeout_s=5)))
    thread.start()
    link = Link.over(left, facts={}, timeout_s=5)
    thread.join()
    answerer[0].handle(64, lambda message: (message.body, ()))
    answerer[0].start()
    link.start()
    instance, life = process_instance(), own_life()
    ours = {life.memfd, life.pidfd}
    child = os.fork()
    if child == 0:
        os._exit(_forked(link, left, listener, instance, ours))
    _, status = os.waitpid(child, 0)
    say(os.waitstatus_to_exitcode(status))
    say(link.call(64, b"still here", timeout_s=5).body.decode(), process_instance() == instance, own_life() is life)
    reached = connect(path, timeout_s=5)
    listener.accept(5).close()
    say(os.path.exists(path), link.state.value)
    for thing in (reached, link, answerer[0], listener):
        thing.close()


def _forked(link: Link, channel: Channel, listener: Listener, instance: bytes, inherited: set[int | None]) -> int:
    """Return 0, or the number of the first thing that is wrong."""
    uses: tuple[Callable[[], object], ...] = (
        lambda: link.call(64, timeout_s=1),
        lambda: link.notify(64),
        link.start,
        lambda: channel.send(64, timeout_s=1),
        lambda: channel.receive(0),
        lambda: listener.accept(0),
    )
    for number, use in enumerate(uses, 1):
        try:
            use()
            return number
        except ForkError:
            pass
    for thing in (link, channel, listener):
        thing.close()
    if process_instance() == instance:
        return 20
    sockets = [fd for fd in os.listdir("/proc/self/fd") if _target(fd).startswith("socket:")]
    if sockets or any(_target(fd).startswith("/memfd:devipc-life") for fd in os.listdir("/proc/self/fd")):
        return 21
    life = own_life()
    if not life.robust or not life.exit:
        return 22
    return 0


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


def bereaved(path: str, own: str) -> None:
    """Connect and listen, fork a child that lives on, and wait to be killed."""
    listener = Listener(own)
    link = Link.connect(path, facts={}, timeout_s=20)
    link.start()
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    say(child, listener.path)
    sys.stdin.readline()


def converse(side: str, path: str, at: str) -> None:
    """Play one side of the conversation and die at the given channel call; print their number when none was given."""
    last, count, lock = int(at), 0, threading.Lock()

    def counted(_: str) -> None:
        nonlocal count
        with lock:
            count += 1
            if count == last:
                os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(60)

    with observe(counted):
        try:
            (Client if side == "client" else Server)(path, timeout_s=20).run()
        except PeerGone as error:
            say("peer gone:", error)
    say(count)


ROLES = (
    victim, watcher, echo, leave, silent, impostor, inherited, racer, owner, stranger, flood, half_sent, scarce,
    lost_frames, forker, bereaved, converse,
)  # fmt: skip


if __name__ == "__main__":
    {role.__name__: role for role in ROLES}[sys.argv[1]](*sys.argv[2:])
