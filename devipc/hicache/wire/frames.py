"""The frames between a client and a daemon: their fields, and the limits that the types of the fields say.

Owns what travels. How a frame becomes bytes, and what is refused beyond the types, is in
:mod:`~devipc.hicache.wire.protocol`, where everybody gets them from.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from devipc.hicache.keys import KEY_NBYTES
from devipc.hicache.operations import Event

__all__ = [
    "FEATURE_PASSED",
    "MAGIC",
    "MAX_FRAME_NBYTES",
    "MAX_PAGES",
    "AnswerFrame",
    "AnyFrame",
    "BackupFrame",
    "Blob",
    "Count63",
    "Digest",
    "FlushFrame",
    "HelloFrame",
    "InvalidateFrame",
    "LeaveFrame",
    "LookupFrame",
    "Number",
    "Op",
    "PingFrame",
    "Point",
    "PoolNumber",
    "PrefetchFrame",
    "ReadyForm",
    "RegisterPoolFrame",
    "RequestFrame",
    "RestoreFrame",
    "StatusFrame",
    "TellFrame",
    "UnregisterFrame",
    "WelcomeFrame",
]

MAX_FRAME_NBYTES = 4 * 1024 * 1024
"""Size of the largest frame in bytes."""
MAX_PAGES = 64 * 1024
"""Most pages of one operation."""

MAGIC = b"dIPChica"
"""What a greeting begins with; the same in all versions."""
FEATURE_PASSED = 1
"""Feature bit of a client that takes several events in one answer."""

_LONGEST_S = 86400.0 * 365  # what devipc.deadline.bounded() makes of infinity
_MAX_GROUPS = 64
_MAX_ERROR_NBYTES = 8 * 1024
_MAX_DETAIL_NBYTES = 1024 * 1024
_MAX_PASSED = 8

Op = Annotated[int, Meta(ge=1, le=2**63 - 1)]
"""Number of an operation, or of a generation."""
Count63 = Annotated[int, Meta(ge=0, le=2**63 - 1)]
"""Any other number."""
Number = Annotated[int, Meta(ge=0, le=2**32 - 1)]
"""Number of something that is shared: a fence, a slot."""
PoolNumber = Annotated[int, Meta(ge=1, le=2**32 - 1)]
"""Number of a pool."""
Version = Annotated[int, Meta(ge=0, le=2**16 - 1)]
# What is not a number is refused by the bounds, too.
Seconds = Annotated[float, Meta(ge=0.0, le=_LONGEST_S)]
Digest = Annotated[bytes, Meta(min_length=KEY_NBYTES, max_length=KEY_NBYTES)]
"""16 bytes: a key, a namespace, or one life of a process or client."""
PagesForm = Annotated[bytes, Meta(max_length=8 * MAX_PAGES)]
KeysForm = Annotated[bytes, Meta(max_length=KEY_NBYTES * MAX_PAGES)]
Name = Annotated[str, Meta(max_length=128)]
Blob = Annotated[bytes, Meta(max_length=MAX_FRAME_NBYTES)]
"""Bytes with a form of their own."""


class HelloFrame(Struct, frozen=True, kw_only=True, tag="hello"):
    """What a client says first; its fields and their meaning stay for all versions.

    ``features`` are bits. ``self_test`` is the key that this side computes for a known page. ``client`` is one life of
    one client object, the same when it attaches again. ``way`` says how it wants frames to travel; the descriptors of
    that come behind the one of its slots.
    """

    magic: Annotated[bytes, Meta(min_length=len(MAGIC), max_length=len(MAGIC))]
    min_version: Version
    max_version: Version
    features: Count63
    key_version: Version
    self_test: Digest
    client: Digest
    way: Literal["rings", "messages"]


class WelcomeFrame(Struct, frozen=True, kw_only=True, tag="welcome"):
    """What is answered: version and features of the connection, the index's epoch, and where the engine is.

    ``engine_path`` is where the engine process listens, ``engine_instance`` that process's own: nobody else will do.
    ``device_uuid`` and ``backend`` are what a client has to open, too. ``write_policy`` is when pages should be backed
    up where the client has no opinion of its own; one that it does not know means the first.
    """

    magic: Annotated[bytes, Meta(min_length=len(MAGIC), max_length=len(MAGIC))]
    version: Version
    features: Count63
    key_version: Version
    self_test: Digest
    epoch: Count63
    layer_groups: Annotated[tuple[Annotated[int, Meta(ge=1, le=2**16)], ...], Meta(max_length=_MAX_GROUPS)]
    engine_path: Annotated[str, Meta(min_length=1, max_length=107)]
    engine_instance: Digest
    device_uuid: Name
    backend: Name
    write_policy: Name


class LeaveFrame(Struct, frozen=True, kw_only=True, tag="leave"):
    """How long to wait for what is open: of this client, or of all."""

    timeout_s: Seconds


class Point(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A value of the client's fence ``ready/<fence>`` in its session with the engine: when pages may be touched."""

    fence: Number
    n: Annotated[int, Meta(ge=1, le=2**62 - 1)]


ReadyForm = Point | bool
"""When pages may be touched: at a shared value; True: now; False: when the ready word of the slot says so."""


class OpFrame(Struct, frozen=True, kw_only=True):
    """What every request carries: the client's number for it."""

    op: Op


class PoolFrame(OpFrame, frozen=True, kw_only=True):
    """A request about one generation of a pool."""

    pool: PoolNumber
    generation: Op


class RegisterPoolFrame(PoolFrame, frozen=True, kw_only=True, tag="register_pool"):
    """Make a pool known: ``layout`` as :func:`~devipc.hicache.layout.encode_layout` writes it.

    The client shares chunk ``i`` of it in its session with the engine, as ``pool/<pool>/<generation>/<i>``.
    """

    device_uuid: Name
    layout: Blob
    namespace: Digest


class UnregisterFrame(PoolFrame, frozen=True, kw_only=True, tag="unregister"):
    """Forget a pool once no copy touches it any more."""


class BackupFrame(PoolFrame, frozen=True, kw_only=True, tag="backup"):
    """Copy pages to the host tier. ``slot`` is the operation's own until it has ended."""

    pages: PagesForm
    keys: KeysForm
    ready: ReadyForm
    slot: Number
    timeout_s: Seconds
    confirmed: bool
    partial: bool


class RestoreFrame(PoolFrame, frozen=True, kw_only=True, tag="restore"):
    """Copy pages to the device; fields as :class:`BackupFrame`."""

    pages: PagesForm
    keys: KeysForm
    ready: ReadyForm
    slot: Number
    timeout_s: Seconds
    partial: bool


class LookupFrame(PoolFrame, frozen=True, kw_only=True, tag="lookup"):
    """Find pages and keep what was found for ``lease_s`` seconds at most."""

    keys: KeysForm
    lease_s: Seconds


class PrefetchFrame(PoolFrame, frozen=True, kw_only=True, tag="prefetch"):
    """Bring pages from the storage tier to the host tier."""

    keys: KeysForm


class InvalidateFrame(PoolFrame, frozen=True, kw_only=True, tag="invalidate"):
    """Forget pages."""

    keys: KeysForm


class FlushFrame(PoolFrame, frozen=True, kw_only=True, tag="flush"):
    """Forget all pages of the pool's namespace."""


class StatusFrame(OpFrame, frozen=True, kw_only=True, tag="status"):
    """Ask what the engine does."""


class PingFrame(OpFrame, frozen=True, kw_only=True, tag="ping"):
    """Ask whether anybody is there; answered by whoever takes frames, before any engine."""


class TellFrame(OpFrame, frozen=True, kw_only=True, tag="tell"):
    """Say something about an operation that was submitted: cancel, confirmed, discard, use or release."""

    event: Event


class AnswerFrame(OpFrame, frozen=True, kw_only=True, omit_defaults=True, tag="answer"):
    """What the engine tells about an operation.

    Parameters
    ----------
    event : Event
        Progress or a status.
    results : bytes or None
        A :class:`~devipc.hicache.results.PageResult` a page.
    error : bytes or None
        As the channel's errors travel.
    detail : bytes or None
        A JSON object.
    passed : tuple of Event
        What happened just before ``event``, and is told with it. Only for those who have :data:`FEATURE_PASSED`.
    """

    event: Event
    results: Annotated[bytes, Meta(max_length=MAX_PAGES)] | None = None
    error: Annotated[bytes, Meta(max_length=_MAX_ERROR_NBYTES)] | None = None
    detail: Annotated[bytes, Meta(max_length=_MAX_DETAIL_NBYTES)] | None = None
    passed: Annotated[tuple[Event, ...], Meta(max_length=_MAX_PASSED)] = ()


RequestFrame = (
    RegisterPoolFrame
    | UnregisterFrame
    | BackupFrame
    | RestoreFrame
    | LookupFrame
    | PrefetchFrame
    | InvalidateFrame
    | FlushFrame
    | StatusFrame
    | PingFrame
    | TellFrame
)
"""Everything that a client sends after its greeting."""
AnyFrame = RequestFrame | AnswerFrame | HelloFrame | WelcomeFrame | LeaveFrame
"""Everything that travels."""
