"""One of the two processes of the checks: ``python -m devipc.probe.child``.

Owns what happens in there. The exporter takes one order after the other from the process that started it and leads;
the importer does what the exporter asks. Whatever a backend does to its process ends this one and no other. It is
started by :mod:`devipc.probe.pair` alone.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from devipc.capabilities import Capability
from devipc.channel.datagram import close_all
from devipc.channel.seqpacket import Channel, Message
from devipc.completion.offers import offers
from devipc.completion.trial import TrialFailed, TrialResponder
from devipc.errors import CapabilityError, CompletionTimeout, DevIPCError, PeerGone, ResourceExhausted
from devipc.interfaces.backend import Device
from devipc.probe.memory import OpenedMemory, check_memory
from devipc.probe.pair import partner_limit
from devipc.probe.partner import (
    CALL,
    START_LIMIT_S,
    STARTED,
    TRIAL,
    CheckFailed,
    NotTried,
    Partner,
    decode_call,
    encode_call,
    encode_failure,
)
from devipc.probe.sync import OpenedEvent, SharedPage, check_mechanism, check_strategy
from devipc.probe.transfer import SharedHost, check_transfer
from devipc.registry import load_backend
from devipc.types import HandleKind, Mechanism, Strategy

__all__ = ["claims"]

_TRIAL_SHARE = 0.7
_MAX_EVIDENCE = 2000
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class _Closable(Protocol):
    def close(self) -> None: ...


# --- the importer ---------------------------------------------------------------------------------------------------


class _Importer:
    """Answers one question after the other until the exporter hangs up."""

    def __init__(self, backend: str, uuid: str, link: Channel) -> None:
        self._backend, self._uuid, self._link = backend, uuid, link
        self._device: Device | None = None
        self._responder: TrialResponder | None = None
        self._open: dict[str, Any] = {}
        self._steps: dict[str, Callable[[dict[str, Any], bytes, list[int]], dict[str, Any] | bytes | None]] = {
            "begin": self._begin,
            "claims": lambda *_: claims(self._opened()),
            "memory.open": lambda _, data, fds: self._keep("memory", OpenedMemory(self._opened(), data, fds)),
            "memory.read": lambda *_: self._open["memory"].read(),
            "memory.write": lambda _, data, __: self._open["memory"].write(data),
            "page.open": lambda _, __, fds: self._keep("page", SharedPage(self._opened(), fds[0])),
            "page.look": lambda *_: dict(zip(("word", "behind"), self._open["page"].look(), strict=True)),
            "page.wait": lambda fields, *_: self._open["page"].wait(fields["value"]),
            "page.passed": lambda fields, *_: {"passed": self._open["page"].passed(fields["limit_s"])},
            "event.open": lambda _, data, __: self._keep("event", OpenedEvent(self._opened(), data)),
            "event.query": lambda *_: {"done": self._open["event"].query()},
            "host.open": lambda _, __, fds: self._keep("host", SharedHost(self._opened(), fds[0])),
            "host.push": lambda _, data, __: self._open["host"].push(data),
            "host.pull": lambda *_: b"".join(self._open["host"].pull()),
        }
        for name in ("memory", "page", "event", "host"):
            self._steps[f"{name}.close"] = lambda *_, name=name: self._open.pop(name).close()

    def serve(self) -> None:
        self._link.send(STARTED, timeout_s=START_LIMIT_S)
        while True:
            try:
                message = self._link.receive(None)
            except PeerGone:
                return
            body, fds = self._answer(message)
            self._link.send(message.kind, body, fds=fds, timeout_s=10.0)

    def _answer(self, message: Message) -> tuple[bytes, Sequence[int]]:
        try:
            if message.kind == TRIAL:
                if self._responder is None:
                    self._responder = TrialResponder(self._opened())
                return self._responder.answer(message.body, message.fds)
            fields, data = decode_call(message.body)
            answer = self._steps[fields["do"]](fields, data, list(message.fds))
            return (encode_call({}, answer) if isinstance(answer, bytes) else encode_call(answer or {})), ()
        except Exception as error:
            return encode_failure(error), ()
        finally:
            close_all(message.fds)

    def _begin(self, fields: dict[str, Any], *_: object) -> None:
        faulthandler.cancel_dump_traceback_later()
        faulthandler.dump_traceback_later(fields["limit_s"], exit=True)

    def _opened(self) -> Device:
        if self._device is None:
            self._device = load_backend(self._backend).open_device(self._uuid)
        return self._device

    def _keep(self, name: str, thing: _Closable) -> None:
        self._open[name] = thing


# --- the exporter ---------------------------------------------------------------------------------------------------


class _Exporter:
    """Does one order after the other until the process that started it hangs up."""

    def __init__(self, backend: str, uuid: str, control: Channel, link: Channel) -> None:
        self._backend, self._uuid, self._control = backend, uuid, control
        self._partner = Partner(link)
        self._device: Device | None = None
        self._deadline = 0.0

    def serve(self) -> None:
        self._partner.wait_started()
        self._control.send(STARTED, timeout_s=START_LIMIT_S)
        while True:
            try:
                order = json.loads(self._control.receive(None).body)
            except PeerGone:
                return
            limit_s = float(order["limit_s"])
            # A thread in C: it says where a hang is even when that holds the GIL, and ends us when nobody else is left.
            faulthandler.dump_traceback_later(limit_s, exit=True)
            self._deadline = time.monotonic() + limit_s
            answer = self._answer(order["do"], float(order["limit_s"]))
            faulthandler.cancel_dump_traceback_later()
            self._control.send(CALL, json.dumps(answer).encode(), timeout_s=10.0)

    def _answer(self, what: str, limit_s: float) -> dict[str, Any]:
        self._partner.timeout_s = limit_s
        try:
            if what == "facts":
                return self._facts()
            self._partner.ask("begin", limit_s=partner_limit(limit_s))
            if what == "claims":
                exporter, importer = claims(self._opened()), self._partner.ask("claims")
                del importer["data"]
                return {"exporter": exporter, "importer": importer, **self._facts()}
            return {"capability": Capability.yes(self._check(what, limit_s)).to_json()}
        except (PeerGone, CompletionTimeout) as error:
            if isinstance(error, PeerGone) or time.monotonic() >= self._deadline - limit_s + partner_limit(limit_s):
                return {"partner_gone": str(error)}
            return {"capability": _capability_of(error).to_json()}
        except Exception as error:
            return {"capability": _capability_of(error).to_json()}

    def _facts(self) -> dict[str, Any]:
        return {"facts": {str(key): str(value) for key, value in load_backend(self._backend).facts().items()}}

    def _opened(self) -> Device:
        if self._device is None:
            self._device = load_backend(self._backend).open_device(self._uuid)
        return self._device

    def _check(self, what: str, limit_s: float) -> str:
        area, _, name = what.partition(".")
        device, partner = self._opened(), self._partner
        if area == "memory":
            return check_memory(device, partner, self._backend, HandleKind(name))
        if area == "mechanism":
            return check_mechanism(device, partner, Mechanism(name), limit_s=limit_s * _TRIAL_SHARE / 2)
        if area == "sync":
            return check_strategy(device, partner, Strategy(name), limit_s=limit_s * _TRIAL_SHARE)
        return check_transfer(device, partner, name)


def claims(device: Device) -> dict[str, Any]:
    """Return who the device is in this process and what its backend says of it, untried."""
    return {
        "pid": os.getpid(),
        "info": asdict(device.info),
        "interfaces": {name: getattr(device, name) is not None for name in ("memory", "sync", "transfer")},
        "capabilities": {name: answer.to_json() for name, answer in device.capabilities().items()},
        "kinds": {kind.value: answer.to_json() for kind, answer in device.memory.kinds().items()}
        if device.memory is not None
        else {},
        "mechanisms": {name.value: answer.to_json() for name, answer in device.sync.mechanisms().items()}
        if device.sync is not None
        else {},
        "offers": {strategy.value: answer.to_json() for strategy, answer in offers(device).items()},
    }


def _capability_of(error: Exception) -> Capability:
    """Return the verdict about what raised ``error``."""
    if isinstance(error, CheckFailed):
        return Capability.broken(str(error), remedy=error.remedy, evidence=error.evidence)
    if isinstance(error, TrialFailed):
        return Capability.broken(str(error), remedy="use another strategy, or another driver version")
    if isinstance(error, NotTried):
        return Capability.untested(str(error), remedy=error.remedy)
    if isinstance(error, CapabilityError | ResourceExhausted):
        return Capability.no(error.message, remedy=error.remedy, evidence=str(error.status or ""))
    if isinstance(error, DevIPCError):
        evidence = str(error.status or "")
        return Capability.broken(f"{type(error).__name__}: {error.message}", remedy=error.remedy, evidence=evidence)
    stack = "".join(traceback.format_exception(error))
    if len(stack) > 2 * _MAX_EVIDENCE:  # a message can be of any length
        stack = f"{stack[:_MAX_EVIDENCE]} ... {stack[-_MAX_EVIDENCE:]}"
    return Capability.broken(
        f"raised {type(error).__name__}: {error}",
        remedy="upgrade or repair the plugin; the evidence has the stack",
        evidence=stack,
    )


# --- both -----------------------------------------------------------------------------------------------------------


def _main(arguments: Sequence[str]) -> None:
    part, parent, backend, uuid, link, control = arguments
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # it was gone before it could be followed
        os._exit(0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    faulthandler.enable()
    if part == "export":
        _Exporter(backend, uuid, Channel.adopt(int(control)), Channel.adopt(int(link))).serve()
    else:
        _Importer(backend, uuid, Channel.adopt(int(link))).serve()
    os._exit(0)  # no exit code of any library runs: it could block on what a check left stuck


if __name__ == "__main__":
    _main(sys.argv[1:])
