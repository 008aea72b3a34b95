"""What this process shares by name: exports, how they are looked at, and who still uses them.

Owns the table of shares and the rule that memory goes back to its owner only when nobody maps it any more. It knows
one device's memory interface and lease counting; it knows no connection.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Hashable
from dataclasses import dataclass

from devipc.deadline import bounded
from devipc.errors import ClosedError, CompletionTimeout, HandleError, StaleError, UsageError
from devipc.integrations import BufferView
from devipc.interfaces.memory import DeviceMemoryIPC
from devipc.lease import LeaseTable
from devipc.mappings import local_exports
from devipc.session.messages import MAX_NAME_NBYTES, MAX_NAMES, ShareMeta
from devipc.types import HandleKind
from devipc.undoing import undo
from devipc.wire import MemoryHandle

__all__ = ["Share", "ShareTable", "check_name"]


def check_name(name: object) -> str:
    """Return ``name`` if it can travel, else raise :class:`~devipc.errors.UsageError`."""
    if not isinstance(name, str) or not name or len(name.encode(errors="replace")) > MAX_NAME_NBYTES:
        raise UsageError(
            f"{name!r} is no name for a share or fence", remedy=f"use a text of 1 to {MAX_NAME_NBYTES} bytes"
        )
    if any("\ud800" <= character <= "\udfff" for character in name):  # as undecodable file names have
        raise UsageError(f"{name!r} cannot be written as UTF-8", remedy="use another name")
    return name


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """One shared range: its handle, how to look at it, and the object that keeps the memory alive."""

    name: str
    handle: MemoryHandle
    meta: ShareMeta
    owner: object
    low: int
    high: int

    def overlaps(self, low: int, high: int) -> bool:
        """Return True when the shared range meets ``[low, high)`` in this process's addresses."""
        return self.low < high and low < self.high


class ShareTable:
    """All shares of one endpoint. Every method may be called from any thread."""

    def __init__(self, memory: DeviceMemoryIPC, *, backend: str, device_uuid: str, instance: bytes) -> None:
        self._memory = memory
        self._backend = backend
        self._device_uuid = device_uuid
        self._instance = instance
        self._lock = threading.RLock()
        self._returned = threading.Condition(self._lock)
        self._shares: dict[str, Share] = {}
        self._retired: dict[str, list[Share]] = {}
        self._tokens: dict[Hashable, bytes] = {}
        self._leases = LeaseTable()
        self.generation = 1
        self._closed = False

    def names(self) -> list[str]:
        """Return the names that can be opened now."""
        with self._lock:
            return sorted(self._shares)

    def add(self, name: str, view: BufferView, *, kind: HandleKind | None, writable: bool) -> Share:
        """Export the memory behind ``view`` and share it as ``name``."""
        check_name(name)
        with self._lock:
            self._check_free(name)
        export_id = os.urandom(16)
        extent = self._memory.export(view.span_ptr, view.span_nbytes, kind=kind)
        try:
            meta = ShareMeta(
                view.dtype, view.shape, view.strides, view.ptr - view.span_ptr, writable and not view.readonly
            )
            with self._lock:  # the generation too: an older one would be refused by every peer
                self._check_free(name)
                identity = (self._backend, self._device_uuid, self._instance, self.generation, export_id)
                handle = MemoryHandle(*identity, extent)
                share = Share(name, handle, meta, view.owner, view.span_ptr, view.span_ptr + view.span_nbytes)
                self._leases.add(export_id)
                local_exports.add(export_id, view.span_ptr, view.span_nbytes)
                self._shares[name] = share
        except BaseException:
            with self._lock:
                shared = self._shares.get(name)
            if shared is None or shared.handle.export_id != export_id:  # an interrupt can come behind that
                local_exports.remove(export_id)
                self._leases.remove(export_id)
                undo(self._memory.release, extent)
            raise
        return share

    def grant(self, name: str, token: Hashable) -> Share:
        """Lend the share called ``name`` to whoever named ``token``.

        Raises
        ------
        HandleError
            For an unknown name; lists the ones there are.
        """
        with self._lock:
            share = self._shares.get(name)
            if share is None:
                known = ", ".join(sorted(self._shares)[:8]) or "nothing"
                if name in self._retired:
                    raise StaleError(f"{name!r} was taken back", code="revoked", remedy=f"shared now: {known}")
                raise HandleError(f"nothing is shared as {name!r}", code="unknown_name", remedy=f"shared now: {known}")
            if token in self._tokens:
                raise UsageError("this lease token is in use", code="duplicate")
            self._leases.grant(share.handle.export_id, token)
            self._tokens[token] = share.handle.export_id
            return share

    def give_back(self, token: Hashable) -> None:
        """End the lease of ``token``. Unknown tokens are passed over: the grant may have been refused."""
        with self._lock:
            export_id = self._tokens.pop(token, None)
            self._returned.notify_all()
        if export_id is not None:
            self._leases.release(export_id, token)

    def give_back_all(self, peer: Hashable) -> None:
        """End every lease whose token is ``(peer, ...)``; the peer is gone."""
        with self._lock:
            tokens = [token for token in self._tokens if isinstance(token, tuple) and token[0] == peer]
        for token in tokens:
            self.give_back(token)

    def lent_to(self, peer: Hashable) -> list[bytes]:
        """Return the exports that ``peer`` has a lease of."""
        with self._lock:
            mine = [export for token, export in self._tokens.items() if isinstance(token, tuple) and token[0] is peer]
        return sorted(set(mine))

    def wait_returned(self, peer: Hashable, *, timeout_s: float) -> bool:
        """Block until ``peer`` has no lease left; False when the time is up."""
        with self._returned:
            return self._returned.wait_for(lambda: not self.lent_to(peer), bounded(timeout_s))

    def retire(self, name: str) -> Share:
        """Stop lending ``name``; return the share whose leases must end before its memory may be freed."""
        with self._lock:
            share = self._shares.pop(name, None)
            if share is None:
                waiting = self._retired.get(name)
                if waiting:
                    return waiting[-1]
                raise UsageError(f"nothing is shared as {name!r}", remedy="share it first")
            self._retired.setdefault(name, []).append(share)
            self._leases.retire(share.handle.export_id)
            return share

    def finish(self, share: Share, *, timeout_s: float) -> None:
        """Wait until nobody maps a retired share, then take the export back.

        Raises
        ------
        CompletionTimeout
            When somebody still maps it. Freeing the memory now would be unsafe; call again to go on waiting.
        """
        export_id = share.handle.export_id
        if not self._leases.wait_free(export_id, timeout_s=timeout_s):
            holders = len(self._leases.holders(export_id))
            raise CompletionTimeout(
                f"{share.name!r} is still mapped by {holders} peer(s) after {timeout_s:g} s",
                code="still_mapped",
                remedy="do not free this memory yet; let the peers close it, or end them, and unshare again",
            )
        with self._lock:
            waiting = self._retired.get(share.name, [])
            if share not in waiting:
                return
            waiting.remove(share)
            if not waiting:
                del self._retired[share.name]
        local_exports.remove(export_id)
        self._leases.remove(export_id)
        self._memory.release(share.handle.extent)

    def overlapping(self, low: int, high: int) -> list[Share]:
        """Return every share, retired ones included, that meets ``[low, high)``."""
        with self._lock:
            waiting = [share for shares in self._retired.values() for share in shares]
            return [share for share in (*self._shares.values(), *waiting) if share.overlaps(low, high)]

    def next_generation(self) -> list[Share]:
        """Retire everything and count the generation up; return what is not finished yet."""
        with self._lock:
            unfinished = self.retire_all()
            self.generation += 1
            return unfinished

    def retire_all(self) -> list[Share]:
        """Stop lending everything; return all shares that are not finished yet."""
        for name in self.names():
            self.retire(name)
        with self._lock:
            return [share for waiting in self._retired.values() for share in waiting]

    def close(self) -> list[Share]:
        """Share nothing more, and retire everything; return all shares that are not finished yet."""
        with self._lock:
            self._closed = True
            return self.retire_all()

    @property
    def closed(self) -> bool:
        """True after :meth:`close`."""
        return self._closed

    def abandon(self, share: Share) -> None:
        """Take an export back although somebody may still map it; the memory itself must stay."""
        with self._lock:
            waiting = self._retired.get(share.name, [])
            if share in waiting:
                waiting.remove(share)
        local_exports.remove(share.handle.export_id)
        self._memory.release(share.handle.extent)

    def _check_free(self, name: str) -> None:
        if self._closed:
            raise ClosedError("the session is closed", remedy="make a new one")
        if name in self._shares:
            raise UsageError(f"{name!r} is shared already", code="duplicate", remedy="unshare it first")
        if len(self._shares) >= MAX_NAMES:
            raise UsageError(f"more than {MAX_NAMES} shares", remedy="share one larger range and cut views from it")
