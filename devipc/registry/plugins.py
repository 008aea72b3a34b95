"""Backends by name: found among the installed distributions, loaded one by one, and put aside alone when they fail.

Owns discovery, isolation and quarantine. A plugin that raises, lacks a dependency, was written for another contract
or brings down its process must harm nobody but itself. It knows no vendor, and loads nothing before it is asked to:
neither plugins nor pluggy nor the metadata of the installed distributions.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from devipc.errors import DevIPCError, PluginError, UsageError

if TYPE_CHECKING:
    from importlib.metadata import Distribution, EntryPoint

    from devipc.interfaces.backend import Backend

__all__ = [
    "DISABLE_VARIABLE",
    "ENTRY_POINT_GROUP",
    "Quarantined",
    "backend_names",
    "describe_error",
    "load_backend",
    "quarantined",
]

ENTRY_POINT_GROUP = "devipc.backends"
"""Group of the entry points by which distributions name their backends."""

DISABLE_VARIABLE = "DEVIPC_BACKENDS_DISABLE"
"""Environment variable: names of backends, separated by commas, that are never loaded; read at the first use."""

_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
_MAX_REASON = 500


@dataclass(frozen=True, slots=True)
class Quarantined:
    """One backend that is installed and will not be used by this process.

    Parameters
    ----------
    name : str
        Name of the entry point; empty when a distribution's list of entry points could not be read at all.
    distribution : str
        Who brings it, ``name version``.
    reason : str
        What is wrong with it.
    remedy : str
        What would bring it back.
    """

    name: str
    distribution: str
    reason: str
    remedy: str


@dataclass(slots=True)
class _Slot:
    """One installed backend and what became of it; everything but the first three is guarded by ``lock``."""

    name: str
    entry_point: EntryPoint
    distribution: str
    lock: threading.RLock = field(default_factory=threading.RLock)
    loading: bool = False
    backend: Backend | None = None
    fault: Quarantined | None = None


class _Rejected(Exception):
    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.remedy = remedy


_lock = threading.RLock()
_slots: dict[str, _Slot] | None = None
_never_loaded: list[Quarantined] = []


def backend_names() -> list[str]:
    """Return the names of all backends that can be asked for, sorted; loads none of them.

    A name whose backend turned out to be broken stays in the list; disabled and ambiguous ones are only in
    :func:`quarantined`. The installed distributions are looked at once in a process. Any thread; reads files.
    """
    return sorted(_installed())


def load_backend(name: str) -> Backend:
    """Load the backend called ``name`` and return it; the same name again gives the same object.

    Runs the plugin's own code in this process: only one that hangs or crashes can hurt here, and
    :func:`~devipc.registry.check.check_backend_in_child` tells beforehand. Any thread; threads that ask for one name
    wait for the first of them. A failed load is not tried again.

    Raises
    ------
    PluginError
        When no such backend is installed (names those that are) or it is quarantined; says why and what to do.
    """
    if not isinstance(name, str):
        raise UsageError(f"a backend's name is a str, not {type(name).__name__}", remedy="see backend_names()")
    slot = _installed().get(name)
    if slot is None:
        raise _unknown(name)
    with slot.lock:
        if slot.backend is None and slot.fault is None:
            _load_into(slot)
        backend, fault = slot.backend, slot.fault
    if backend is None:
        assert fault is not None
        raise _quarantine_error(fault)
    return backend


def quarantined() -> tuple[Quarantined, ...]:
    """Return what is known *so far* to be unusable, sorted by name; loads nothing.

    A broken plugin shows up here once :func:`load_backend` was called for it.
    """
    faults = [slot.fault for slot in _installed().values() if slot.fault is not None]
    return tuple(sorted((*_never_loaded, *faults), key=lambda fault: (fault.name, fault.distribution)))


# --- errors ---------------------------------------------------------------------------------------------------------


def _unknown(name: str) -> PluginError:
    for fault in _never_loaded:
        if fault.name == name:
            return _quarantine_error(fault)
    from difflib import get_close_matches

    names = backend_names()
    close = get_close_matches(name, names, n=1, cutoff=0.5)
    return PluginError(
        f"no backend {name!r} is installed; installed are: {', '.join(names) or 'none'}",
        code="unknown_backend",
        remedy=f"did you mean {close[0]!r}?" if close else "install the package that brings it, or choose another",
    )


def _quarantine_error(fault: Quarantined) -> PluginError:
    """Make a new error each time: one object raised again and again would collect tracebacks."""
    others = ", ".join(name for name in backend_names() if name != fault.name)
    return PluginError(
        f"backend {fault.name!r} of {fault.distribution} is quarantined: {fault.reason}; others: {others or 'none'}",
        code="quarantined",
        remedy=fault.remedy,
        backend=fault.name,
    )


# --- discovery ------------------------------------------------------------------------------------------------------


def _installed() -> dict[str, _Slot]:
    """Return the slots by name; looks at the distributions on the first call."""
    global _slots
    with _lock:
        if _slots is None:
            claims: dict[str, list[tuple[EntryPoint, str, str]]] = {}
            faults: list[Quarantined] = []
            for distribution in _distributions(faults):
                project, title = _project(distribution), _title(distribution)
                for entry_point in distribution.entry_points:
                    if entry_point.group == ENTRY_POINT_GROUP:
                        claims.setdefault(entry_point.name, []).append((entry_point, project, title))
            slots = {slot.name: slot for name, claim in claims.items() for slot in _settle(name, claim, faults)}
            _never_loaded[:] = faults
            _slots = slots
        return _slots


def _distributions(faults: list[Quarantined]) -> Iterator[Distribution]:
    """Yield those that name backends, each read alone: one malformed file must not hide all others."""
    from importlib import metadata

    seen: set[str] = set()
    for distribution in metadata.distributions():
        try:
            if ENTRY_POINT_GROUP not in (distribution.read_text("entry_points.txt") or ""):
                continue
            project = _project(distribution)
            if project and project in seen:  # shadowed by an earlier folder of sys.path, as in an import
                continue
            seen.add(project)
            tuple(distribution.entry_points)
        except Exception as error:
            remedy = "reinstall that distribution, or uninstall it"
            faults.append(
                Quarantined(
                    "", _title(distribution), f"its entry points cannot be read: {describe_error(error)}", remedy
                )
            )
            continue
        yield distribution


def _settle(name: str, claims: list[tuple[EntryPoint, str, str]], faults: list[Quarantined]) -> list[_Slot]:
    """Decide who owns ``name``: devipc itself, else the distribution ``devipc-<name>``, else nobody if several ask."""
    if not _NAME.fullmatch(name):
        reason = "its name is not made of at most 32 lower-case letters, digits and underscores"
        faults.extend(Quarantined(name, title, reason, "ask its maker to rename it") for _, _, title in claims)
        return []
    if name in _disabled():
        reason = f"disabled by {DISABLE_VARIABLE}"
        remedy = f"take {name!r} out of {DISABLE_VARIABLE}"
        faults.extend(Quarantined(name, title, reason, remedy) for _, _, title in claims)
        return []
    winners = claims
    if len(claims) > 1:
        for owner in ("devipc", "devipc-" + name.replace("_", "-")):
            winners = [claim for claim in claims if claim[1] == owner]
            if winners:
                break
    for claim in claims:
        if len(winners) != 1 or claim is not winners[0]:
            titles = sorted(title for _, _, title in claims)
            reason = f"{len(claims)} entry points claim the name {name!r}: {', '.join(titles)}"
            faults.append(Quarantined(name, claim[2], reason, "uninstall all of them but one"))
    return [_Slot(name, winners[0][0], winners[0][2])] if len(winners) == 1 else []


def _disabled() -> set[str]:
    return {name.strip() for name in os.environ.get(DISABLE_VARIABLE, "").split(",") if name.strip()}


def _project(distribution: Distribution) -> str:
    return re.sub(r"[-_.]+", "-", _field(distribution, "Name")).lower()


def _title(distribution: Distribution) -> str:
    try:
        name = _field(distribution, "Name") or "a distribution without a name"
        return f"{name} {_field(distribution, 'Version')}".strip()
    except Exception:  # metadata can be broken in as many ways as a file can
        return "a distribution without readable metadata"


def _field(distribution: Distribution, key: str) -> str:
    fields = distribution.metadata
    return fields[key] if key in fields else ""  # noqa: SIM401 - PackageMetadata promises no get()


# --- loading --------------------------------------------------------------------------------------------------------


def _load_into(slot: _Slot) -> None:
    """Fill ``backend`` or ``fault``. Called with the slot's lock held."""
    if slot.loading:
        raise UsageError(f"backend {slot.name!r} asks for itself while it is loaded", backend=slot.name)
    slot.loading = True
    try:
        slot.backend = _load(slot)
    except KeyboardInterrupt:
        raise
    except _Rejected as rejected:
        slot.fault = Quarantined(slot.name, slot.distribution, rejected.reason, rejected.remedy)
    except BaseException as error:  # SystemExit at import too: a plugin never ends the process
        reason, remedy = _explain(slot, error)
        slot.fault = Quarantined(slot.name, slot.distribution, reason, remedy)
    finally:
        slot.loading = False


def _load(slot: _Slot) -> Backend:
    from devipc.hookspecs import CONTRACT_VERSION

    plugin = slot.entry_point.load()
    contract = getattr(plugin, "DEVIPC_CONTRACT", None)
    if contract is None:
        raise _Rejected(
            f"{slot.entry_point.value} carries no DEVIPC_CONTRACT",
            f"its maker adds DEVIPC_CONTRACT = {CONTRACT_VERSION} after testing against this version of devipc",
        )
    if type(contract) is not int or contract != CONTRACT_VERSION:
        newer = type(contract) is int and contract > CONTRACT_VERSION
        raise _Rejected(
            f"it was written for contract {contract!r}, this devipc offers {CONTRACT_VERSION}",
            "upgrade devipc" if newer else f"upgrade {slot.distribution.split()[0]}",
        )
    backend = _call_hook(plugin)
    _check_backend(slot.name, backend)
    return backend  # type: ignore[no-any-return]


def _call_hook(plugin: Any) -> Any:
    """Call the one hook of ``plugin`` by a manager of its own, so that plugins never meet."""
    import pluggy

    from devipc import hookspecs

    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(plugin)
    manager.check_pending()
    if not manager.get_hookcallers(plugin):
        raise _Rejected("it implements no hook", "its maker marks a function devipc_backend() with devipc.spi.hookimpl")
    return manager.hook.devipc_backend()


def _check_backend(name: str, backend: object) -> None:
    from devipc.interfaces.backend import Backend

    remedy = "its maker returns an object with name, facts(), devices() and open_device() from devipc_backend()"
    if isinstance(backend, type):
        raise _Rejected(f"its hook returned the class {backend.__name__}, not an instance", remedy)
    if not isinstance(backend, Backend):
        missing = [member for member in ("name", "facts", "devices", "open_device") if not hasattr(backend, member)]
        raise _Rejected(
            f"its hook returned {type(backend).__name__}, which is no Backend: it lacks {', '.join(missing)}", remedy
        )
    uncallable = [member for member in ("facts", "devices", "open_device") if not callable(getattr(backend, member))]
    if uncallable:
        raise _Rejected(f"its backend's {', '.join(uncallable)} cannot be called", remedy)
    if backend.name != name:
        raise _Rejected(
            f"its backend calls itself {backend.name!r}, its entry point {name!r}", "its maker uses one name for both"
        )


def _explain(slot: _Slot, error: BaseException) -> tuple[str, str]:
    """Return reason and remedy for what a plugin raised."""
    package = slot.distribution.split()[0]
    if isinstance(error, DevIPCError):
        return f"it refused to load: {describe_error(error)}", getattr(
            error, "remedy", ""
        ) or f"see the documents of {package}"
    if isinstance(error, ModuleNotFoundError) and isinstance(error.name, str) and error.name:
        if f"{slot.entry_point.value.partition(':')[0].strip()}.".startswith(f"{error.name}."):
            return f"its own module {error.name!r} is not there", f"reinstall {package}"
        return f"it needs the module {error.name!r}, which is not installed", f"install what {package} depends on"
    return f"loading it raised {describe_error(error)}", f"repair, upgrade or uninstall {package}"


def describe_error(error: BaseException) -> str:
    """Return type and text of a foreign exception, at most 500 characters; never raises."""
    try:
        return f"{type(error).__name__}: {error}"[:_MAX_REASON]
    except Exception:  # a foreign exception's own __str__
        return type(error).__name__


def _after_fork() -> None:
    """Another thread of the parent may have held a lock: it does not exist here to release it."""
    global _lock
    _lock = threading.RLock()
    for slot in (_slots or {}).values():
        slot.lock = threading.RLock()
        slot.loading = False


os.register_at_fork(after_in_child=_after_fork)
