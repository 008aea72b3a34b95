"""What runs inside a peer: its rig, the things that roles keep there, and the table of roles.

Owns the life of a peer's objects. It knows no socket; :mod:`devipc.conformance.peer_main` brings the requests. Roles
are functions of modules of this package (or of a vendor's), marked by :func:`role` and called by name.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from devipc.conformance.profile import find_backend
from devipc.conformance.resources import Account
from devipc.conformance.results import SuiteError, backend_package
from devipc.conformance.rig import Rig
from devipc.interfaces.backend import Backend, Device
from devipc.types import Chunk, ExportedExtent, HandleKind

__all__ = [
    "Reply",
    "Role",
    "Worker",
    "extent_from_json",
    "extent_to_json",
    "find_role",
    "open_device",
    "role",
    "role_name",
]

Role = Callable[..., "dict[str, Any] | Reply | None"]
"""``f(worker, fds, **arguments)``; descriptors in ``fds`` are closed when it returns."""

_MARK = "devipc_role"
_F = TypeVar("_F", bound=Role)


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer with descriptors, which stay the worker's."""

    body: dict[str, Any]
    fds: tuple[int, ...] = field(default=())


def role(function: _F) -> _F:
    """Let a peer run ``function`` on request."""
    setattr(function, _MARK, True)
    return function


def role_name(function: Role) -> str:
    """Return the name by which a peer finds a role."""
    return f"{function.__module__}:{function.__qualname__}"


def find_role(name: str) -> Role:
    """Undo :func:`role_name`; refuses everything that is not marked."""
    module, _, attribute = name.partition(":")
    function = getattr(importlib.import_module(module), attribute, None)
    if not callable(function) or not getattr(function, _MARK, False):
        raise SuiteError(f"{name} is no role")
    found: Role = function
    return found


def open_device(backend: Backend, wanted: str) -> Device:
    """Open the device with this UUID or ordinal; the first one when empty."""
    if wanted.isdigit():
        infos = backend.devices()
        if int(wanted) >= len(infos):
            raise SuiteError(f"there are {len(infos)} devices, no number {wanted}")
        return backend.open_device(infos[int(wanted)].uuid)
    return backend.open_device(wanted or None)


class Worker:
    """State of one peer process.

    Parameters
    ----------
    backend, device : str
        As in :class:`~devipc.conformance.profile.BackendProfile`.
    deadline_s : float
        Limit of every wait.
    """

    def __init__(self, backend: str, device: str, *, deadline_s: float) -> None:
        self.backend = find_backend(backend)
        self.package = backend_package(self.backend)
        self.deadline_s = deadline_s
        self.leaving = False
        self._device = device
        self._rig: Rig | None = None
        self._keys = itertools.count(1)
        self._kept: dict[int, tuple[Any, Callable[[], object]]] = {}

    @property
    def rig(self) -> Rig:
        """The rig, opened at the first use."""
        if self._rig is None:
            self._rig = Rig(open_device(self.backend, self._device), deadline_s=self.deadline_s)
        return self._rig

    def forget_rig(self) -> None:
        """Drop a rig whose device was closed by a role."""
        self._rig = None

    def keep(self, thing: object, undo: Callable[[], object]) -> int:
        """Keep a thing between requests; return its key. ``undo`` runs when it is dropped."""
        key = next(self._keys)
        self._kept[key] = thing, undo
        return key

    def get(self, key: int) -> Any:
        """Return a kept thing."""
        if key not in self._kept:
            raise SuiteError(f"the peer keeps nothing under {key}")
        return self._kept[key][0]

    def drop(self, key: int) -> None:
        """Undo and forget a kept thing."""
        self.get(key)
        _, undo = self._kept.pop(key)
        undo()

    def release(self, key: int) -> Any:
        """Forget a kept thing without undoing it, and return it."""
        thing = self.get(key)
        del self._kept[key]
        return thing

    def drop_all(self) -> None:
        """Drop everything, the latest first."""
        for key in sorted(self._kept, reverse=True):
            self.drop(key)

    def account(self) -> Account:
        """Look at this process."""
        free = -1 if self._rig is None else self._rig.free_nbytes()
        return Account.now(device_free_nbytes=free)


def extent_to_json(extent: ExportedExtent) -> dict[str, Any]:
    """Return JSON-ready values; descriptors travel beside them."""
    chunks = [
        [chunk.allocation_nbytes, chunk.offset, chunk.nbytes, chunk.payload.hex(), chunk.has_fd]
        for chunk in extent.chunks
    ]
    return {"kind": extent.kind.value, "chunks": chunks}


def extent_from_json(values: dict[str, Any], fds: Sequence[int]) -> ExportedExtent:
    """Undo :func:`extent_to_json`; nothing is checked: that is the backend's part."""
    chunks = tuple(
        Chunk(allocation_nbytes, offset, nbytes, bytes.fromhex(payload), has_fd)
        for allocation_nbytes, offset, nbytes, payload, has_fd in values["chunks"]
    )
    return ExportedExtent(HandleKind(values["kind"]), chunks, tuple(fds))
