"""A trial in two spawned processes, where a driver may hang or crash without harm.

Owns starting the pair, its deadline, its end, and the verdict when it does not speak. What the two do is in
:mod:`devipc.completion.child`; they share the fence's page and the data as inherited descriptors and talk over pipes.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import IO

from devipc.capabilities import Capability, Verdict
from devipc.errors import DevIPCError
from devipc.memfd import create_memfd
from devipc.types import Strategy

__all__ = ["try_in_children"]

_GRACE_S = 1.0
_MAX_ANSWER_NBYTES = 16 * 1024
_MAX_SAID_NBYTES = 2048
_MODULE = "devipc.completion.child"
_OPENINGS = 3
"""How many times as long as a trial both may take to open the device, as where many processes open it at once."""
LEAD, FOLLOW = "lead", "follow"
"""The two parts."""
OPENED = {LEAD: b"l", FOLLOW: b"f"}
"""What each child writes in front of the leader's answer as soon as it has opened the device."""


def try_in_children(backend: str, device_uuid: str, strategy: Strategy, *, deadline_s: float) -> Capability:
    """Run the trial of ``strategy`` in two new processes and return what came of it.

    Blocks for at most ``deadline_s`` and a little, and before that for up to three times as long until the device is
    open in both, which takes long when many processes open it at once and says nothing about a strategy. Leaves no
    process behind. Any thread.

    Returns
    -------
    Capability
        ``yes``; ``no`` where a process was told that the platform cannot; ``broken`` where it did the wrong thing,
        crashed or did not end in time; ``untested`` where no process could be started, or the device was not open in
        both in time: the next strategy would fare no better.
    """
    with contextlib.ExitStack() as stack:
        try:
            return _run_pair(stack, backend, device_uuid, strategy, deadline_s)
        except (OSError, DevIPCError) as error:
            reason = f"no process could be started for the trial: {error}"
            return Capability.untested(reason, remedy="raise `ulimit -u` and `ulimit -n`, free memory")


def _run_pair(
    stack: contextlib.ExitStack, backend: str, device_uuid: str, strategy: Strategy, deadline_s: float
) -> Capability:
    begin, pipes = (stack.enter_context(contextlib.ExitStack()) for _ in range(2))

    def owned(fd: int, by: contextlib.ExitStack = stack) -> int:
        by.callback(os.close, fd)
        return fd

    page = owned(create_memfd("devipc-fence", 4096))
    data = owned(create_memfd("devipc-trial", 4096))
    said = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - the stack is its context
    answer, to_answer = map(owned, os.pipe())
    begin_in, _ = map(owned, os.pipe(), (pipes, begin))  # whose other end is closed to begin
    ask_in, ask_out = map(owned, os.pipe(), (pipes, pipes))
    reply_in, reply_out = map(owned, os.pipe(), (pipes, pipes))
    shared = [backend, device_uuid, strategy.value, str(deadline_s), str(_OPENINGS * deadline_s)]
    shared += [str(fd) for fd in (page, data, begin_in)]
    with pipes:
        leader = _start([LEAD, *shared, str(reply_in), str(ask_out), str(to_answer)], said)
        stack.callback(_end, leader)
        follower = _start([FOLLOW, *shared, str(ask_in), str(reply_out), str(to_answer)], said)
        stack.callback(_end, follower)
    text, in_time = _until_open(answer, leader, follower, _OPENINGS * deadline_s)
    if not in_time:
        _wait(leader, _GRACE_S)  # the children say where they are, and end
        capability = Capability.untested(
            f"{len(text)} of {len(OPENED)} processes had opened the device in {_OPENINGS * deadline_s:g} s",
            remedy="try again when fewer processes open the device",
        )
        return replace(capability, evidence=_tail(said))
    begin.close()
    deadline = time.monotonic() + deadline_s
    ended = _wait(leader, deadline_s + _GRACE_S)  # at the deadline the children say where they are, and end
    late = ended is None or time.monotonic() >= deadline
    capability = _verdict(text + _read(answer), ended, deadline_s, late=late)
    return capability if capability else replace(capability, evidence=capability.evidence or _tail(said))


def _verdict(text: bytes, ended: int | None, deadline_s: float, *, late: bool) -> Capability:
    """Judge by what the children wrote, and by how the leader ended."""
    answer = text.lstrip(b"".join(OPENED.values()))
    if answer:
        return _decode(answer)
    if ended is None or late:
        remedy = "the driver blocks; the evidence shows where. Use another strategy"
        return Capability.broken(f"the trial did not end within {deadline_s:g} s", remedy=remedy)
    how = f"crashed (signal {-ended})" if ended < 0 else f"ended without an answer (exit status {ended})"
    return Capability.broken(f"the trial's process {how}", remedy="check driver and plugin versions")


def _until_open(
    answer: int, leader: subprocess.Popen[bytes], follower: subprocess.Popen[bytes], limit_s: float
) -> tuple[bytes, bool]:
    """Return what the children wrote until the trial can begin, and whether that was in time.

    It begins without one that ended: what the other one says of that, or how it ended, is the verdict.
    """
    deadline, text = time.monotonic() + limit_s, b""
    with contextlib.ExitStack() as stack:
        events = select.poll()
        events.register(answer, select.POLLIN)
        marks = {}
        for part, child in ((LEAD, leader), (FOLLOW, follower)):
            pidfd = os.pidfd_open(child.pid)
            stack.callback(os.close, pidfd)
            events.register(pidfd, select.POLLIN)
            marks[pidfd] = OPENED[part]
        missing = set(marks.values())
        while missing:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return text, False
            ready = [fd for fd, _ in events.poll(left_s * 1000)]
            text += _read(answer)
            missing = {mark for mark in missing if mark not in text[: len(OPENED)]}
            for fd in ready:
                if fd in marks:
                    missing.discard(marks[fd])
                    events.unregister(fd)
                    missing = missing if marks[fd] != OPENED[LEAD] else set()
    return text, True


def _start(arguments: Sequence[str], said: IO[bytes]) -> subprocess.Popen[bytes]:
    fds = [int(text) for text in arguments[6:]]
    # The module path of this process, and no other: a plugin that was found here must be found there.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", _MODULE, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=said,
        stderr=said,
        env=environment,
        pass_fds=fds,
        start_new_session=True,
    )


def _read(answer: int) -> bytes:
    """Return what has been written so far; one write is whole or absent."""
    os.set_blocking(answer, False)
    try:
        return os.read(answer, _MAX_ANSWER_NBYTES)
    except BlockingIOError:
        return b""


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> int | None:
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a child with all that it started, and reap it; one stuck inside the kernel is left to the kernel."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
    _wait(process, _GRACE_S)


def _tail(said: IO[bytes]) -> str:
    size = said.seek(0, os.SEEK_END)
    said.seek(max(0, size - _MAX_SAID_NBYTES))
    return said.read().decode(errors="replace").strip()


def _decode(text: bytes) -> Capability:
    try:
        fields = json.loads(text)
        return Capability(Verdict(fields["verdict"]), fields["evidence"], fields["reason"], fields["remedy"])
    except (ValueError, KeyError, TypeError) as error:
        return Capability.broken(f"the trial's process gave an answer that cannot be read ({error})")
