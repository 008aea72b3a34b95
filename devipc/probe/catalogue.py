"""Every check in words: what it tries, what each verdict says, and what to do about it.

Owns the list of checks and their explanations. It runs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from devipc.types import HandleKind, Mechanism, Strategy

__all__ = ["AREAS", "TRANSFER_NAMES", "Area", "Explanation", "all_checks", "check_names", "explain"]

TRANSFER_NAMES = ("copy", "batch", "strided", "order", "host_registration")
"""The checks of the area ``transfer``, in the order in which they run."""


@dataclass(frozen=True, slots=True)
class Area:
    """A group of checks.

    Parameters
    ----------
    title : str
        What it is about.
    tries : str
        What a check of it does, in one sentence.
    any_of : bool
        True when one passing check is enough where the area as a whole is required.
    names : tuple of str
        The checks in it; empty for an area that is one check.
    remedies : tuple of str
        What helps, most frequent first; one line each.
    """

    title: str
    tries: str
    any_of: bool
    names: tuple[str, ...]
    remedies: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """One check in words.

    Parameters
    ----------
    check : str
        Identifier.
    about : str
        What it is, and what it is needed for.
    tries : str
        What is done.
    remedies : tuple of str
        What helps.
    """

    check: str
    about: str
    tries: str
    remedies: tuple[str, ...]


_CONTAINER = "start the container with the device, the driver's libraries and --ipc=host"
_MEMLOCK = "ulimit -l unlimited (in a container: --ulimit memlock=-1)"
_UPDATE = "upgrade the driver, or the plugin (pip install -U), and run the probe again"

AREAS = {
    "identity": Area(
        "the device opens in two processes, and is the same one",
        "Two processes open the device and compare identity, name, bus address and size.",
        False,
        (),
        (
            "pick the device by its identity: devipc probe --device UUID",
            "set the device's compute mode to one that lets several processes in",
            _CONTAINER,
        ),
    ),
    "memory": Area(
        "sharing device memory, one check for each handle kind",
        "The exporter shares a part of an allocation that neither begins nor ends on a page. Random bytes are compared"
        " both ways; what the exporter writes later must be seen; its other bytes must stay as they are; and its data"
        " must survive the importer's close.",
        True,
        tuple(kind.value for kind in HandleKind),
        (_CONTAINER, "run both processes as one user, in one pid namespace", _UPDATE),
    ),
    "mechanism": Area(
        "the primitives from which fences are made, one check for each mechanism",
        "The primitive is used between two processes by itself: behind work that runs it must not be seen, after it"
        " it must, and where a stream waits, the host must be able to release it.",
        True,
        tuple(mechanism.value for mechanism in Mechanism),
        (_UPDATE, "use a completion strategy that does not need it"),
    ),
    "sync": Area(
        "knowing in one process that work of another is done, one check for each completion strategy",
        "A fence is made in one process and opened in the other. It is signalled behind copies and asked while they"
        " run and after, several values must come in order, a stream's wait must hold and be released, and poison must"
        " be seen.",
        True,
        tuple(strategy.value for strategy in Strategy),
        ("let devipc choose: it takes the best strategy that passes", _MEMLOCK, _UPDATE),
    ),
    "transfer": Area(
        "copies, markers and registered host memory, one check for each",
        "Random bytes are moved with the device's copy engines and all of them are compared.",
        False,
        TRANSFER_NAMES,
        (_MEMLOCK, _UPDATE),
    ),
}
"""Areas by name, in the order of the report."""

_ABOUT = {
    "identity": "Handles name the device by an identity that must be equal in every process of the machine.",
    "memory.legacy": "The driver's classic handle for plainly allocated memory: bytes, no descriptor.",
    "memory.vmm_fd": "Physical memory that is mapped by hand, shared as a file descriptor for each block.",
    "memory.pool": "Memory of a stream-ordered pool that was made to be shared.",
    "memory.dmabuf": "Memory as a dma-buf descriptor, which other drivers and devices can import too.",
    "memory.fabric": "A handle that travels between machines of one fabric; needs its own service and rights.",
    "memory.opaque": "A handle of which only the driver knows what is in it.",
    "memory.memfd": "Host memory as a sealed memory file: what the built-in backend shares.",
    "mechanism.stream_memop": "A stream stores a 64-bit word in registered host memory, and waits for one.",
    "mechanism.event": "An event of the driver, recorded by one process and asked by another.",
    "mechanism.host": "The host publishes a number once its own marker is done; every platform can.",
    "sync.stream_memop": "A stream signals and a stream waits: no host takes part, the fastest.",
    "sync.host_flag": "A stream stores a word, the consumer's host polls it.",
    "sync.polling": "The producer's host polls a marker of its own and publishes the number; works everywhere.",
    "sync.event": "A ring of inter-process events that the consumer's host asks; used on request only.",
    "transfer.copy": "Single copies of odd sizes at odd places.",
    "transfer.batch": "One call for many ranges; what a cache with scattered pages uses.",
    "transfer.strided": "Rectangles with two pitches; what a cache with one plane for each layer uses.",
    "transfer.order": "Markers: unrecorded is not done, pending is not done, and another stream can wait for one.",
    "transfer.host_registration": "Shared host memory that is pinned in both processes and reached by each device.",
}
_HELP = {
    "memory.pool": ("close the importer's mapping before the exporter frees",),
    "memory.fabric": ("ask the administrator for the fabric's service and its access rights",),
    "memory.vmm_fd": ("ulimit -n 65536 (each block costs a descriptor)",),
    "sync.event": ("give both containers one pid namespace and one /dev/shm: --pid=host --ipc=host",),
    "mechanism.event": ("give both containers one pid namespace and one /dev/shm: --pid=host --ipc=host",),
    "transfer.batch": ("pip install numpy",),
    "transfer.strided": ("pip install numpy",),
}


def check_names(area: str) -> tuple[str, ...]:
    """Return the names of an area's checks, without the area."""
    return AREAS[area].names


def all_checks() -> tuple[str, ...]:
    """Return all identifiers, areas included, in the order of the report."""
    return tuple(check for area, entry in AREAS.items() for check in (area, *(f"{area}.{n}" for n in entry.names)))


def explain(check: str) -> Explanation | None:
    """Return what ``check`` (an area or one of its checks) is; None when there is no such check."""
    if check not in all_checks():
        return None
    area = AREAS[check.partition(".")[0]]
    about = _ABOUT.get(check, area.title[0].upper() + area.title[1:] + ".")
    return Explanation(check, about, area.tries, (*_HELP.get(check, ()), *area.remedies))
