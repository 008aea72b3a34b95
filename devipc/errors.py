"""The error tree of devipc: who is to blame, what to do about it, and whether trying again can help.

Owns every exception type that a caller may see. It knows no driver and does no I/O: a vendor's status arrives
here as plain values in a :class:`VendorStatus` and is never swallowed on the way.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "BoundsError",
    "CapabilityError",
    "ClosedError",
    "CompletionTimeout",
    "DevIPCError",
    "DeviceLostError",
    "DriverError",
    "FencePoisoned",
    "ForkError",
    "HandleError",
    "PeerError",
    "PeerGone",
    "PeerRefused",
    "PluginError",
    "ProtocolError",
    "ResourceExhausted",
    "StaleError",
    "UsageError",
    "VendorStatus",
    "WireError",
]


@dataclass(frozen=True, slots=True)
class VendorStatus:
    """What a vendor's library answered, kept verbatim.

    Parameters
    ----------
    call : str
        The C name of the call that failed.
    value : int
        The numeric status.
    name : str
        The vendor's name of that status, empty when the library has none.
    """

    call: str
    value: int
    name: str = ""

    def __str__(self) -> str:
        name = f" {self.name}" if self.name else ""
        return f"{self.call} -> {self.value}{name}"


class DevIPCError(Exception):
    """Root of everything that devipc raises on purpose.

    Parameters
    ----------
    message : str
        What is wrong, in one sentence.
    code : str
        Stable lower-case identifier for programs and logs; the class's default when empty.
    remedy : str
        What the reader can do about it: a setting, a command or a change in the calling code.
    retryable : bool
        True when the same call can succeed later without any change.
    backend, device : str
        Name of the backend and identity of the device, when known.
    status : VendorStatus or None
        The vendor's own answer, when a driver call was involved.

    Attributes
    ----------
    left : tuple of Exception
        What kept the rest of the failed call from being undone: what each names stays mapped or held, at the latest
        until the process ends (on the host backend until the memory beside it is given back, too).
    """

    default_code = "devipc"

    def __init__(
        self,
        message: str,
        *,
        code: str = "",
        remedy: str = "",
        retryable: bool = False,
        backend: str = "",
        device: str = "",
        status: VendorStatus | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        self.remedy = remedy
        self.retryable = retryable
        self.backend = backend
        self.device = device
        self.status = status
        self.left: tuple[Exception, ...] = ()

    def __str__(self) -> str:
        where = "/".join(part for part in (self.backend, self.device) if part)
        text = f"[{where}] {self.message}" if where else self.message
        if self.status is not None:
            text += f" ({self.status})"
        if self.left:
            text += f"; not undone until this process ends: {', '.join(map(_short, self.left))}"
        if self.remedy:
            text += f"; remedy: {self.remedy}"
        return text

    def to_json(self) -> dict[str, object]:
        """Return the error as JSON-ready values, the spelling used by ``--json`` and by peers."""
        return {
            "type": type(self).__name__,
            "code": self.code,
            "message": self.message,
            "remedy": self.remedy,
            "retryable": self.retryable,
            "backend": self.backend,
            "device": self.device,
            "status": str(self.status) if self.status is not None else "",
            "left": [_short(error) for error in self.left],
        }


def _short(error: Exception) -> str:
    status = error.status if isinstance(error, DevIPCError) else None
    return str(status or error)


class UsageError(DevIPCError):
    """The calling code broke a rule of the contract; no driver was called."""

    default_code = "usage"


class ClosedError(UsageError):
    """The object was closed before the call."""

    default_code = "closed"


class ForkError(UsageError):
    """The object was made in another process, before a ``fork``."""

    default_code = "forked"


class HandleError(DevIPCError):
    """Bytes or a handle from elsewhere cannot be trusted, decoded or used here."""

    default_code = "handle"


class WireError(HandleError):
    """Bytes do not decode: wrong magic, version, length, count or padding."""

    default_code = "wire"


class BoundsError(HandleError):
    """An extent does not lie inside the allocation that the importing driver reports."""

    default_code = "bounds"


class StaleError(HandleError):
    """The handle belongs to an older life or generation of its exporter."""

    default_code = "stale"


class PeerError(DevIPCError):
    """The other process is the cause."""

    default_code = "peer"


class PeerGone(PeerError):
    """The other process is dying, dead or has closed the connection."""

    default_code = "peer_gone"


class PeerRefused(PeerError):
    """The other process is not one that we talk to, or does not talk to us."""

    default_code = "peer_refused"


class ProtocolError(PeerError):
    """The other process broke the protocol; the connection is closed."""

    default_code = "protocol"


class FencePoisoned(PeerError):
    """A fence was released as failed: the work it stands for never completed as far as anyone knows."""

    default_code = "poisoned"


class CapabilityError(DevIPCError):
    """This platform, device or build cannot do what was asked; the reason is in the message."""

    default_code = "capability"


class PluginError(CapabilityError):
    """A backend plugin is missing, quarantined or does not fit this version of devipc."""

    default_code = "plugin"


class DriverError(DevIPCError):
    """A vendor's library refused a call; ``status`` holds its answer."""

    default_code = "driver"


class DeviceLostError(DriverError):
    """A sticky device error: every later call of this process on that device fails too."""

    default_code = "device_lost"


class CompletionTimeout(DevIPCError):
    """The work did not complete before the deadline; it may still complete later."""

    default_code = "timeout"

    def __init__(self, message: str, **details: object) -> None:
        details.setdefault("retryable", True)
        super().__init__(message, **details)  # type: ignore[arg-type]


class ResourceExhausted(DevIPCError):
    """Memory, descriptors, slots or another bounded resource ran out; ``message`` names it and the limit."""

    default_code = "exhausted"

    def __init__(self, message: str, **details: object) -> None:
        details.setdefault("retryable", True)
        super().__init__(message, **details)  # type: ignore[arg-type]
