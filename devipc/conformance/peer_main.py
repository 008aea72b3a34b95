"""The main program of a peer: requests come over one inherited socket, answers go back, with tracebacks.

Owns the loop and the form of requests and answers: JSON with descriptors beside it. It imports no test and no pytest.
Started by :mod:`devipc.conformance.peers`; ends with its parent.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from typing import Any

from devipc.channel import Channel
from devipc.channel.message import Message
from devipc.conformance.results import describe, is_backends_fault
from devipc.conformance.worker import Reply, Worker, find_role
from devipc.errors import DevIPCError, PeerGone
from devipc.spi import close_fds

__all__ = ["ANSWER", "FAILURE", "REQUEST", "main"]

REQUEST, ANSWER, FAILURE = 1, 2, 3
"""Kinds of messages."""

_PR_SET_PDEATHSIG = 1
_SEND_TIMEOUT_S = 30.0


def main(arguments: list[str]) -> int:
    """Serve requests until the parent hangs up or a role asks to leave.

    Parameters
    ----------
    arguments : list of str
        Number of the inherited descriptor; pid of the parent; JSON of ``backend``, ``device`` and ``deadline_s``.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(arguments[1]):
        return 1
    settings = json.loads(arguments[2])
    channel = Channel.adopt(int(arguments[0]))
    worker = Worker(settings["backend"], settings["device"], deadline_s=settings["deadline_s"])
    while not worker.leaving:
        try:
            message = channel.receive(None)
        except PeerGone:
            os._exit(0)
        _answer(channel, worker, message)
    return 0


def _answer(channel: Channel, worker: Worker, message: Message) -> None:
    fds = message.take_fds()
    try:
        request = json.loads(message.body)
        answer = find_role(request["role"])(worker, fds, **request["arguments"])
    except Exception as error:
        _send(channel, FAILURE, failure(error, worker.package), message.request)
    else:
        reply = answer if isinstance(answer, Reply) else Reply(answer or {})
        _send(channel, ANSWER, reply.body, message.request, reply.fds)
    finally:
        close_fds(fds)


def _send(channel: Channel, kind: int, body: dict[str, Any], request: int, fds: tuple[int, ...] = ()) -> None:
    channel.send(kind, json.dumps(body).encode(), request=request, fds=fds, timeout_s=_SEND_TIMEOUT_S)


def failure(error: BaseException, package: str) -> dict[str, Any]:
    """Return what the parent is told about an exception."""
    known = isinstance(error, DevIPCError)
    return {
        "types": [kind.__name__ for kind in type(error).__mro__],
        "message": str(error),
        "code": error.code if isinstance(error, DevIPCError) else "",
        "remedy": error.remedy if isinstance(error, DevIPCError) else "",
        "typed": known,
        "backend": is_backends_fault(error, package),
        "traceback": describe(error),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
