"""The supervisor: memory, clients and engine of one daemon, under one socket.

Owns the host tier, whether anything new is begun, and the order in which all of it begins and ends. It loads no driver:
what touches the device is another process, which can die and be replaced while the tier stays.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import msgspec

from devipc._version import __version__
from devipc.channel.link import Link, Reply
from devipc.channel.message import Message
from devipc.deadline import deadline_after, remaining
from devipc.errors import ClosedError, CompletionTimeout, DevIPCError, PeerRefused, ResourceExhausted, StaleError
from devipc.hicache.daemon.admin import default_socket
from devipc.hicache.daemon.attaching import Clients
from devipc.hicache.daemon.client import AttachedClient, Host
from devipc.hicache.daemon.gate import Gate
from devipc.hicache.daemon.keeper import Keeper, Life
from devipc.hicache.daemon.options import DaemonConfig
from devipc.hicache.daemon.watchdog import Watchdog
from devipc.hicache.moving.arena import HostArena
from devipc.hicache.operations import Kind
from devipc.hicache.tier.hosttier import HostTier
from devipc.hicache.tier.index import IndexWriter
from devipc.hicache.wire.protocol import decode_leave
from devipc.hicache.wire.transport import LinkKind

__all__ = ["SCHEMA", "Supervisor"]

SCHEMA = "devipc.hicache.status/1"
"""What the status of a daemon says it is."""

_LOOK_S = 0.05
_GOODBYE_S = 2.0
_ANSWERED_S = 0.1
_LINKS_BESIDE_CLIENTS = 16
_DRAINING = "the daemon drains"
_log = logging.getLogger("devipc.hicache")


class Supervisor(Host):
    """See the module. Any thread.

    Making it takes the socket's path, then the memory; nobody is served before :meth:`start`.

    Parameters
    ----------
    config : DaemonConfig
        All settings.
    on_stop : callable
        Called when somebody asks the daemon to drain and end.

    Raises
    ------
    UsageError, PeerRefused
        When the path is unsafe, or a living daemon listens there.
    ResourceExhausted
        When host memory is short.
    """

    def __init__(self, config: DaemonConfig, *, on_stop: Callable[[], None]) -> None:
        self._config = config
        self._on_stop = on_stop
        self._began = time.monotonic()
        self._refusal: DevIPCError | None = None
        self._drained = threading.Event()
        self._drains_asked = 0
        self._past: Counter[tuple[str, str]] = Counter()  # of clients and engines that are over
        self._lock = threading.Lock()
        path = os.path.abspath(config.socket or default_socket())
        self._gate = Gate(
            path,
            allowed_uids=config.allow_uids,
            max_links=config.max_clients + _LINKS_BESIDE_CLIENTS,
            prepare=self._prepare,
        )
        with ExitStack() as undo:
            undo.callback(self._gate.close)
            self._arena = HostArena(config.tier_nbytes)
            undo.callback(self._arena.close)
            self._index = IndexWriter(max_entries=config.index_entries or max(4096, config.tier_nbytes // 2**15))
            undo.callback(self._index.close)
            self._tier = HostTier(
                self._arena.chunks(config.chunk_nbytes),
                self._index,
                slab_nbytes=config.slab_nbytes,
                extent_pages=config.extent_pages,
            )
            undo.pop_all()
        self._keeper = Keeper(
            config,
            self._arena,
            self._tier,
            folder=os.path.dirname(path),
            let_go=self._let_clients_go,
            on_defect=on_stop,
        )
        self._clients = Clients(config, self._index, life=lambda: self._keeper.life, host=self)
        self._watchdog = Watchdog(
            self._keeper,
            self._tier,
            self._clients.all,
            self._clients.of,
            stall_s=config.stall_s,
            stuck_s=config.stuck_s,
            reap_s=config.reap_s,
            chores=[self._gate.sweep],
        )

    def start(self, *, given_up: Callable[[], bool]) -> bool:
        """Start the engine, then let clients in. Blocks until then; False when ``given_up()`` said so before.

        Raises
        ------
        DevIPCError
            Why the engine did not start: no device, host memory that must be pinned and cannot, or a time that is up.
        """
        self._keeper.start()
        while not self._keeper.wait_begun(_LOOK_S):
            if given_up():
                return False
        if self._keeper.failure is not None:
            raise self._keeper.failure
        self._watchdog.start()
        self._gate.open()
        return True

    def facts(self) -> dict[str, object]:
        """Return what somebody who waits for the daemon wants to know, JSON-ready."""
        status = self.status()
        engine = status["engine"]
        return {
            "socket": status["socket"],
            "pid": status["pid"],
            "engine_pid": engine["pid"],
            "backend": engine["backend"],
            "device": engine["device"],
            "pinned": "yes" if engine["pinned"] else "no",
            "tier_nbytes": self._arena.nbytes,
        }

    # --- Host --------------------------------------------------------------------------------------------------------

    @property
    def refusal(self) -> DevIPCError | None:
        """See :class:`~devipc.hicache.daemon.client.Host`."""
        return self._refusal

    def let_go(self, client: AttachedClient, timeout_s: float) -> None:
        """See :class:`~devipc.hicache.daemon.client.Host`."""
        self._clients.let_go(client, timeout_s)

    def forget(self, client: AttachedClient) -> None:
        """See :class:`~devipc.hicache.daemon.client.Host`."""
        with self._lock:
            self._past.update(client.counts())
            self._clients.forget(client)
        self._gate.forget(client.link)

    def status(self) -> dict[str, Any]:
        """Return what the daemon does, schema :data:`SCHEMA`, JSON-ready."""
        account = self._keeper.account()
        life = account.life
        with self._lock:  # so that each client counts once, whoever goes meanwhile
            clients, counted = self._clients.all(), self._past.copy()
        for client in clients:
            counted.update(client.counts())
        none = {**_NO_ENGINE, "tier": self._tier.status()}
        engine: dict[str, Any] = none if life is None else life.engine.status()
        lanes = {
            name: {**lane, "moved_nbytes": lane["moved_nbytes"] + account.moved[name]}
            for name, lane in engine["lanes"].items()
        }
        return {
            **engine,
            "schema": SCHEMA,
            "state": "draining" if self._refusal is not None else "running" if account.serving else "no_engine",
            "version": __version__,
            "pid": os.getpid(),
            "socket": self._gate.path,
            "uptime_s": time.monotonic() - self._began,
            "engine": {
                "pid": life.process.pid if life is not None else 0,
                "backend": self._config.backend,
                "device": engine["device"],
                "starts": account.starts,
                "pinned": engine["pinned"],
                "unpinned_reason": engine["unpinned_reason"],
                "heartbeat_age_s": life.process.stuck().get("process", 0.0) if life is not None else 0.0,
                "last_end": account.last_end,
                "facts": life.process.facts if life is not None else {},
            },
            "clients": [client.describe() for client in clients],
            "lanes": lanes,
            "stalled": self._watchdog.stalled,
            "submitted": {name: count for (what, name), count in sorted(counted.items()) if what == "submitted"},
            "answered": {name: count for (what, name), count in sorted(counted.items()) if what == "answered"},
            "write_policy": self._config.write_policy,
        }

    # --- what links ask ----------------------------------------------------------------------------------------------

    def _prepare(self, link: Link) -> None:
        link.handle(LinkKind.HELLO, lambda message: self._hello(link, message))
        link.handle(LinkKind.LEAVE, lambda message: self._leave(link, message))
        link.handle(LinkKind.STATUS, lambda _message: (msgspec.json.encode(self.status()), ()))
        link.handle(LinkKind.DRAIN, lambda message: self._drain(link, message))

    def _hello(self, link: Link, message: Message) -> Reply:
        reply = self._clients.hello(link, message)
        self._gate.used(link)
        return reply

    def _leave(self, link: Link, message: Message) -> None:
        leave = decode_leave(message.body)
        client = next((client for client in self._clients.all() if client.link is link), None)
        if client is None:
            raise StaleError("no client greeted on this connection", remedy="greet first")
        client.leave(leave.timeout_s)

    def _drain(self, link: Link, message: Message) -> None:
        timeout_s = decode_leave(message.body).timeout_s
        if link.peer.uid not in (os.geteuid(), 0):
            raise PeerRefused(f"user {link.peer.uid} may not end this daemon", remedy="ask its owner")
        self._gate.used(link)
        self._drains_asked += 1
        if self.begin_drain():  # else whoever asks again would end what the first one lets end
            self._on_stop()
        if not self._drained.wait(timeout_s):
            raise CompletionTimeout(f"operations are under way after {timeout_s:g} s: {self.under_way()}")

    # --- the end -----------------------------------------------------------------------------------------------------

    def begin_drain(self) -> bool:
        """Begin nothing new; what is under way goes on. False when that was so already."""
        with self._lock:
            if self._refusal is not None:
                return False
            self._refusal = ResourceExhausted(
                _DRAINING, code="draining", remedy="go on without the cache until it is back, or try again later"
            )
        _log.info("draining; under way: %s", self.under_way())
        return True

    def under_way(self) -> str:
        """Return which operations have not ended, as text."""
        life = self._keeper.current
        ops: Any = life.engine.status()["operations"] if life is not None else {}
        return ", ".join(f"{count} {name}" for name, count in sorted(ops.items())) or "nothing"

    def idle(self) -> bool:
        """Return True when no transfer is under way; leases end with the daemon."""
        kinds = (op.kind for client in self._clients.all() for op in client.session.open_ops())
        moving = any(kind in (Kind.BACKUP, Kind.RESTORE) for kind in kinds)
        if not moving:
            self._drained.set()
        return not moving

    def _let_clients_go(self, life: Life, timeout_s: float) -> bool:
        """Hang up on all clients of an engine, and wait until nothing of them is left; False when that took longer."""
        deadline = deadline_after(timeout_s)
        clients = self._clients.of(life)
        for client in clients:
            client.hang_up(ClosedError("the engine ended", remedy="connect again"))
        late = [client for client in clients if not client.wait_over(remaining(deadline))]
        if late:
            _log.error("%d clients are not let go after %g s: %s", len(late), timeout_s, self.under_way())
        return not late

    def close(self) -> None:
        """End: hang up on everybody, end the engine, give the memory back. Blocks for some seconds at most."""
        self.begin_drain()
        if self._drains_asked:
            time.sleep(_ANSWERED_S)  # for the answers to those who asked for it
        self._watchdog.close()
        self._keeper.close(_GOODBYE_S)
        self._gate.close()
        self._index.close()
        if self._keeper.over:
            self._arena.close()


_NO_ENGINE: dict[str, Any] = {
    "device": "",
    "lost": "",
    "pinned": False,
    "unpinned_reason": "no engine",
    "operations": {},
    "oldest_s": 0.0,
    "lanes": {
        name: {"flying": 0, "moved_nbytes": 0, "busy_s": 0.0, "share_of_floor": None} for name in ("backup", "restore")
    },
    "floor_nbytes_per_s": 0,
    "plans": {},
}
