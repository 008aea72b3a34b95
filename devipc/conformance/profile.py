"""BackendProfile: the one thing that a vendor fills in, and how a backend and its profile are found by name.

Owns what is *expected* of a backend beyond the contract. It opens no device.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from devipc.errors import PluginError, UsageError
from devipc.interfaces.backend import Backend, Device
from devipc.interfaces.memory import Allocation
from devipc.interfaces.transfer import Stream
from devipc.types import HandleKind, Strategy

__all__ = ["BackendProfile", "Deviation", "find_backend", "find_object", "find_profile"]


@dataclass(frozen=True, slots=True)
class Deviation:
    """A case that is known to fail, with the place where that is followed up.

    Parameters
    ----------
    case : str
        Id of the case.
    reason : str
        What the backend does instead.
    link : str
        Issue, driver bug or document.
    """

    case: str
    reason: str
    link: str

    def __post_init__(self) -> None:
        if not self.reason or "://" not in self.link:
            raise UsageError(f"deviation {self.case} needs a reason and a link", remedy="say what it does, and where")


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendProfile:
    """What the suite needs to know about one backend on one device.

    Parameters
    ----------
    backend : str
        Name of the entry point, or ``module:factory`` for a backend that is not installed.
    device : str
        UUID or ordinal; the first device when empty.
    environment : mapping of str to str
        Set in peers besides the environment of the run.
    handle_kinds, strategies : tuple, optional
        What must be available: then a missing one is a failure. None takes the backend's own answers.
    deviations : tuple of Deviation
        Cases that are known to fail.
    skips_allowed : bool
        False makes every skip that is not in ``expected_skips`` a failure.
    expected_skips : frozenset of str
        Ids of cases that this device cannot run.
    keeps_freed_memory : bool
        True when a mapping stays readable after its exporter freed the memory or died; False when use of it fails
        with a typed error.
    recycled_kinds : frozenset of HandleKind
        Kinds whose memory is handed out anew as soon as it is freed, so that nothing can be said of its content then.
    allocate_grown : callable, optional
        ``f(device, sizes) -> Allocation`` over several driver blocks. The device's own ``memory.allocate_grown``
        when None and there is one.
    capture : callable, optional
        ``f(device, stream)``, a context manager in which ``stream`` records a graph. Streams that have
        ``begin_capture`` and ``end_capture`` need none.
    hidden, reordered : mapping of str to str, optional
        Environment of a process that sees no device, and of one that sees all of them in another order.
    simulated : bool
        True when the driver below is no real one: the results say so, and are no evidence about hardware.
    exclusive_device : bool
        True when nobody else uses the device, so that its free memory is part of the accounts.
    memory_slack_nbytes, map_slack, thread_slack : int
        What may be left after a case: device memory (where exclusive), mapped files, threads of the driver.
    deadline_s : float
        Limit of every call of a peer and of every wait.
    """

    backend: str
    device: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    handle_kinds: tuple[HandleKind, ...] | None = None
    strategies: tuple[Strategy, ...] | None = None
    deviations: tuple[Deviation, ...] = ()
    skips_allowed: bool = True
    expected_skips: frozenset[str] = frozenset()
    keeps_freed_memory: bool = True
    recycled_kinds: frozenset[HandleKind] = frozenset((HandleKind.POOL,))
    allocate_grown: Callable[[Device, Sequence[int]], Allocation] | None = None
    capture: Callable[[Device, Stream], AbstractContextManager[object]] | None = None
    hidden: Mapping[str, str] | None = None
    reordered: Mapping[str, str] | None = None
    simulated: bool = False
    exclusive_device: bool = False
    memory_slack_nbytes: int = 64 << 20
    map_slack: int = 4
    thread_slack: int = 0
    deadline_s: float = 20.0

    def deviation(self, identity: str) -> Deviation | None:
        """Return the declared deviation of a case."""
        return next((known for known in self.deviations if known.case == identity), None)


def find_object(name: str) -> Any:
    """Return what ``module:object`` names.

    Raises
    ------
    UsageError
        When the module cannot be imported or has no such object.
    """
    module_name, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"{name!r} cannot be loaded: {error}", remedy="pass module:object, importable here") from error


def find_backend(name: str) -> Backend:
    """Return the backend ``name``: an entry point, or ``module:factory``, which needs nothing installed.

    Raises
    ------
    PluginError, UsageError
        When there is none, or it is no backend.
    """
    if ":" not in name:
        from devipc.registry import load_backend

        return load_backend(name)
    backend = find_object(name)()
    if not isinstance(backend, Backend):
        raise PluginError(f"{name!r} returned {type(backend).__name__}, which is no Backend")
    return backend


def find_profile(name: str) -> BackendProfile:
    """Return the profile that ``module:object`` names; the object may also be a function that returns one."""
    profile = find_object(name)
    if callable(profile) and not isinstance(profile, BackendProfile):
        profile = profile()
    if not isinstance(profile, BackendProfile):
        raise UsageError(f"{name!r} is a {type(profile).__name__}, no BackendProfile")
    return profile
