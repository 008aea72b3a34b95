"""Descriptors run out: this driver reports it as anything but that.

Names this backend to the core's check. Knows no driver call.
"""

from __future__ import annotations

from devipc.spi import DevIPCError, explain_missing_fd

__all__ = ["explain_missing"]


def explain_missing(error: DevIPCError) -> DevIPCError:
    """Return ``error``, or the ``ResourceExhausted`` that is behind it when no descriptor is left."""
    return explain_missing_fd(error, backend="cuda")
