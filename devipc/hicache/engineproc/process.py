"""The engine process from its first line to its last: the link to the supervisor, and what the supervisor asks.

Owns start, stop, and the rule that nothing of it outlives its supervisor: it ends at once, without giving anything
back, when that dies, when it is not known any more what its streams do, or when it has a defect.
"""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import NoReturn

from devipc.absence import need_memory
from devipc.channel import Channel, Message
from devipc.channel.hello import encode_error
from devipc.channel.link import Link, PeerState, Reply
from devipc.deadline import deadline_after, remaining
from devipc.errors import ClosedError, CompletionTimeout, DevIPCError, ResourceExhausted, UsageError
from devipc.hicache.engine.localcopies import LocalCarrier
from devipc.hicache.engineproc.clients import Clients, EngineClient
from devipc.hicache.engineproc.joblane import JobLane
from devipc.hicache.engineproc.watch import Watcher
from devipc.hicache.moving.arena import HostArena
from devipc.hicache.moving.submitters import submitter_count
from devipc.hicache.planning.planner import Direction
from devipc.hicache.wire import jobs as j
from devipc.hicache.wire.pulse import WATCHED, Pulse
from devipc.hicache.wire.ring import RING_FDS, Consumer, Producer
from devipc.hicache.wire.slots import Slots
from devipc.interfaces.backend import Backend

__all__ = ["EngineMain", "main"]

_GREET_S = 20.0
_REPORT_S = 0.25
_MAX_FACTS_NBYTES = 256 * 1024
_HANG_UP_S = 5.0
_UNMAPPED_S = 0.05
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_log = logging.getLogger("devipc.hicache")


class EngineMain:
    """See the module.

    Parameters
    ----------
    link : Link
        To the supervisor, not started; owned.
    load : callable
        Returns the backend of a name.
    """

    def __init__(self, link: Link, load: Callable[[str], Backend]) -> None:
        self._link = link
        self._load = load
        self._clients = Clients()
        self._over = threading.Event()
        self._parts: _Parts | None = None
        handlers = {
            j.EngineCall.START: self._on_start,
            j.EngineCall.OPEN_CLIENT: self._on_open_client,
            j.EngineCall.CLOSE_CLIENT: self._on_close_client,
            j.EngineCall.STATUS: self._on_status,
            j.EngineCall.STOP: self._on_stop,
        }
        for kind, handler in handlers.items():
            link.handle(kind, handler)
        link.on_state(self._on_state)

    def run(self) -> None:
        """Serve until the supervisor says stop. Blocks."""
        self._link.start()
        self._over.wait()
        self._link.close()

    def _on_state(self, state: PeerState) -> None:
        if state is not PeerState.CONNECTED and not self._over.is_set():
            os._exit(1)  # whoever owns the host memory is gone: nothing of it may be touched any more

    def lose(self, error: DevIPCError) -> NoReturn:
        """Tell the supervisor why, and end: the kernel and the driver end what is in flight."""
        try:  # and wait until it has heard: the news of a death is faster than a message
            self._link.call(j.EngineCall.LOST, encode_error(error), timeout_s=1.0)
        except DevIPCError:
            pass
        os._exit(3)

    # --- calls ---

    def _on_start(self, message: Message) -> Reply:
        if self._parts is not None:
            raise UsageError("the engine is started", code="order")
        start = j.decode_call(message.body, j.Start)
        self._parts = _Parts(start, message.take_fds(), self._load(start.backend), self._clients, self.lose)
        return self._parts.ready()

    def _started(self) -> _Parts:
        if self._parts is None:
            raise UsageError("the engine is not started", code="order")
        return self._parts

    def _on_open_client(self, message: Message) -> Reply:
        frame, parts = j.decode_call(message.body, j.OpenClient), self._started()
        fds = message.take_fds()
        if len(fds) != 1:
            for fd in fds:
                os.close(fd)
            raise UsageError(f"{len(fds)} descriptors with a client", code="fd_count")
        slots = Slots.open(fds[0])
        try:
            self._clients.check_free(frame.client)
            client = EngineClient(
                frame.client,
                slots,
                parts.carrier,
                parts.pulse,
                since=frame.since,
                backend=parts.backend,
                device_uuid=parts.carrier.device_uuid,
                strategy=parts.start.strategy,
                folder=parts.start.folder,
                uid=frame.uid,
            )
        except BaseException:
            slots.close()
            raise
        self._clients.add(client)
        return j.encode(j.ClientOpened(path=client.path)), ()

    def _on_close_client(self, message: Message) -> None:
        client = self._clients.find(j.decode_call(message.body, j.CloseClient).client)
        if client is None:
            return
        if client.begins_to_close():

            def hang_up() -> None:
                client.close_pools()
                client.wait_unmapped(None)
                self._clients.forget(client)  # whoever asked may not ask again: its id must not stay taken
                client.close(timeout_s=_HANG_UP_S)

            try:  # beside this thread, which others wait for
                threading.Thread(target=hang_up, name="devipc-engine-hang-up", daemon=True).start()
            except RuntimeError:
                hang_up()
        if not client.wait_unmapped(_UNMAPPED_S):
            raise CompletionTimeout(
                "memory of the client is still mapped", code="still_mapped", remedy="ask again; free none of it yet"
            )
        self._clients.forget(client)

    def _on_status(self, message: Message) -> Reply:
        parts = self._started()
        found = {
            "lanes": {lane.direction.value: {"flying": lane.flying, "jobs": lane.moved} for lane in parts.lanes},
            "watched": parts.watcher.watched,
            "clients": {client.id.hex(): client.status() for client in self._clients.all()},
        }
        return json.dumps(found).encode(), ()

    def _on_stop(self, message: Message) -> None:
        stop = j.decode_call(message.body, j.Stop)
        if self._parts is not None:
            self._parts.close(stop.timeout_s)
        # The answer is sent when this returns; the end follows it.
        threading.Timer(0.01, self._over.set).start()


class _Parts:
    """What exists once the engine is started: device, registered arena, rings, threads."""

    def __init__(
        self,
        start: j.Start,
        fds: tuple[int, ...],
        backend: Backend,
        clients: Clients,
        lose: Callable[[DevIPCError], NoReturn],
    ) -> None:
        self.start = start
        self.backend = backend
        self._clients = clients
        arena_fd, *rings = fds
        self.arena = HostArena.open(arena_fd, start.arena_nbytes)
        consumers = [
            Consumer(rings[at : at + RING_FDS], limit_nbytes=j.MAX_JOB_NBYTES) for at in range(0, len(rings), RING_FDS)
        ]
        backups, restores, orders = consumers
        self.device = backend.open_device(start.device or None)
        need_memory(self.device)  # or no client's pool could be mapped: said now, and not to each of them
        self.carrier = LocalCarrier(
            self.device,
            self.arena,
            chunk_nbytes=start.chunk_nbytes,
            pin_required=start.pin_required,
            bounce_nbytes=start.bounce_nbytes,
            groups=start.groups,
            threads=submitter_count(),
        )
        self.carrier.lose = lose
        self.pulse = Pulse()
        self.reports = Producer(slots=1024, slot_nbytes=128, arena_nbytes=2**20)
        self.lanes = [
            JobLane(
                direction,
                self.carrier.copies(direction),
                ring,
                clients,
                self.pulse,
                report=self._report,
                lose=lose,
                announce=self.reports.announce,
            )
            for direction, ring in ((Direction.BACKUP, backups), (Direction.RESTORE, restores))
        ]
        self.watcher = Watcher(orders, clients, self.pulse, report=self._report, lose=lose)
        self._rings: list[Consumer | Producer] = [*consumers, self.reports]
        for lane in self.lanes:
            lane.start()
        self.watcher.start()

    def _report(self, report: j.Report) -> None:
        """Tell the supervisor; as long as that stands still, so does what has something to tell."""
        body, thread = j.encode(report), threading.current_thread().name.removeprefix("devipc-engine-")
        while True:
            try:
                self.reports.push(body, timeout_s=_REPORT_S)
                return
            except (ResourceExhausted, CompletionTimeout):
                if thread in WATCHED:
                    self.pulse.busy(thread)  # waiting, and not stuck in a call

    def ready(self) -> Reply:
        """Return the answer to START."""
        found = {name: capability.to_json() for name, capability in self.device.capabilities().items()}
        info = self.device.info
        facts = {
            "backend": dict(self.backend.facts()),
            "device": {"uuid": info.uuid, "name": info.name, "pci": info.pci},
            "capabilities": found,
            "floor_nbytes_per_s": self.carrier.floor_nbytes_per_s,
            "costs_s": asdict(self.carrier.cost),
            "submitting_threads": self.carrier.submitting.threads,
        }
        if self.carrier.submitting.threads > 1:
            facts["submitting_s"] = {
                way: asdict(getattr(self.carrier.submitting, way)) for way in ("to_device", "to_host")
            }
        told = json.dumps(facts).encode()
        answer = j.Ready(
            device_uuid=info.uuid,
            unpinned_reason=self.carrier.unpinned_reason[:4096],
            facts=told if len(told) <= _MAX_FACTS_NBYTES else json.dumps({"device": facts["device"]}).encode(),
        )
        return j.encode(answer), (*self.reports.fds(), self.pulse.fileno())

    def close(self, timeout_s: float) -> None:
        """Finish what is in flight, then give everything back, in the order in which it must not be touched again.

        Raises
        ------
        CompletionTimeout
            When a stream did not let go in time.
        """
        deadline = deadline_after(timeout_s)
        for lane in self.lanes:
            if not lane.stop(timeout_s=remaining(deadline)):
                raise CompletionTimeout(
                    f"the {lane.direction.value} stream has not let go after {timeout_s:g} s", code="stalled_stream"
                )
        self.watcher.stop(timeout_s=max(0.1, remaining(deadline)))
        for client in self._clients.all():
            client.close(timeout_s=min(_HANG_UP_S, max(0.1, remaining(deadline))))
        for direction in Direction:
            self.carrier.copies(direction).close()
        self.carrier.close()
        for ring in self._rings:
            ring.close()
        self.pulse.close()
        self.arena.close()
        self.device.close()


def main(fd: int, *, load: Callable[[str], Backend] | None = None) -> None:
    """Be an engine process for the supervisor at the other end of ``fd``. Returns when it said stop.

    Parameters
    ----------
    fd : int
        Inherited end of a connection; owned.
    load : callable, optional
        Returns the backend of a name, instead of what is installed.
    """
    # Ends are the supervisor's to bring, also where a terminal or a service manager signals the whole group.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # Also while a driver call keeps the interpreter, and nobody here could hear of the supervisor's death.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if load is None:
        from devipc.registry import load_backend

        load = load_backend
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s engine %(process)d %(levelname)s %(message)s")
    try:
        link = Link.accept(Channel.adopt(fd), facts={"role": "hicache-engine"}, timeout_s=_GREET_S)
    except (DevIPCError, ClosedError) as error:
        sys.exit(f"no supervisor: {error}")
    gc.collect()
    gc.freeze()  # as far as it is loaded: no collection between two orders looks at it again
    EngineMain(link, load).run()
