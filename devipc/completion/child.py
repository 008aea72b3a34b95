"""One of the two processes of a trial: ``python -m devipc.completion.child``.

Owns what happens in there: one side signals and leads, the other watches. It is started by
:mod:`devipc.completion.pair` alone, and ends by itself at its deadline when that is gone.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import resource
import select
import struct
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

from devipc.capabilities import Capability
from devipc.completion.pair import LEAD, OPENED
from devipc.completion.roles import ProducerRole
from devipc.completion.trial import RemoteRole, TrialFailed, TrialResponder, run_trial
from devipc.errors import CapabilityError, DevIPCError, PeerGone
from devipc.interfaces.backend import Device
from devipc.registry import load_backend
from devipc.types import Strategy

__all__: list[str] = []

_LENGTH = struct.Struct("<I")
_MAX_ANSWER_NBYTES = 16 * 1024


class _Frames:
    """Bodies over two pipes, with a deadline on every byte."""

    def __init__(self, incoming: int, outgoing: int) -> None:
        self._incoming = incoming
        self._outgoing = outgoing

    def send(self, body: bytes) -> None:
        frame = memoryview(_LENGTH.pack(len(body)) + body)
        while frame:
            frame = frame[os.write(self._outgoing, frame) :]

    def receive(self, timeout_s: float) -> bytes:
        deadline = time.monotonic() + timeout_s
        (nbytes,) = _LENGTH.unpack(self._read(_LENGTH.size, deadline))
        return self._read(nbytes, deadline)

    def call(self, body: bytes, fds: Sequence[int], timeout_s: float) -> tuple[bytes, Sequence[int]]:
        """Ask; descriptors are known to the other side by inheritance, so none travels."""
        try:
            self.send(body)
            return self.receive(timeout_s), ()
        except (BrokenPipeError, EOFError):
            raise PeerGone("the watching process of the trial ended", code="trial_peer") from None
        except TimeoutError:
            raise PeerGone(f"the watching process of the trial did not answer in {timeout_s:g} s") from None

    def _read(self, nbytes: int, deadline: float) -> bytes:
        taken = b""
        while len(taken) < nbytes:
            ready, _, _ = select.select([self._incoming], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError
            part = os.read(self._incoming, nbytes - len(taken))
            if not part:
                raise EOFError
            taken += part
        return taken


def _open(backend: str, uuid: str, deadline_s: float, say: Callable[[], object], begin: int) -> Device:
    """Open the device and say so; return when the other one has, too, or nobody is there any more to tell.

    Only then the time of the trial begins: what takes long before says nothing about a strategy.
    """
    device = load_backend(backend).open_device(uuid)
    say()
    os.read(begin, 1)  # its end
    _end_in(deadline_s)
    return device


def _end_in(limit_s: float) -> None:
    """Say where this process is, and end it, then: by a thread in C.

    It says where a hang is even when that holds the GIL, and ends us when nobody else is left to.
    """
    faulthandler.dump_traceback_later(limit_s, exit=True)


def _lead(device: Device, strategy: Strategy, deadline_s: float, fds: tuple[int, int], frames: _Frames) -> str:
    producer = ProducerRole(device, strategy, page_fd=fds[0], data_fd=fds[1])
    consumer = RemoteRole.opened(frames.call, producer, fds[1], timeout_s=deadline_s)
    return run_trial(strategy, producer, consumer, deadline_s=deadline_s)


def _follow(device: Device, deadline_s: float, fds: tuple[int, int], frames: _Frames) -> None:
    responder = TrialResponder(device)
    while True:
        body, _ = responder.answer(frames.receive(deadline_s), fds)
        frames.send(body)


def _verdict(opened: Callable[[], Device], lead: Callable[[Device], str]) -> Capability:
    try:
        return Capability.yes(f"two processes: {lead(opened())}")
    except TrialFailed as failure:
        return Capability.broken(str(failure), remedy="use another strategy, or another driver version")
    except CapabilityError as error:
        return Capability.no(error.message, remedy=error.remedy, evidence=str(error.status or ""))
    except DevIPCError as error:
        return Capability.broken(f"{type(error).__name__}: {error.message}", remedy=error.remedy)
    except Exception as error:
        return Capability.broken(f"raised {type(error).__name__}: {error}")


def _main(arguments: Sequence[str]) -> None:
    part, backend, uuid, strategy, limit, open_limit, page, data, begin, incoming, outgoing, to_answer = arguments
    deadline_s, fds = float(limit), (int(page), int(data))
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    faulthandler.enable()
    _end_in(float(open_limit))
    frames = _Frames(int(incoming), int(outgoing))
    opened = partial(_open, backend, uuid, deadline_s, partial(os.write, int(to_answer), OPENED[part]), int(begin))
    if part == LEAD:
        lead = partial(_lead, strategy=Strategy(strategy), deadline_s=deadline_s, fds=fds, frames=frames)
        capability = _verdict(opened, lead)
        os.write(int(to_answer), json.dumps(capability.to_json()).encode()[:_MAX_ANSWER_NBYTES])
    else:
        with contextlib.suppress(EOFError, BrokenPipeError, TimeoutError):
            _follow(opened(), deadline_s, fds, frames)
    os._exit(0)  # no exit code of any library runs: it could block on what the trial left stuck


if __name__ == "__main__":
    _main(sys.argv[1:])
