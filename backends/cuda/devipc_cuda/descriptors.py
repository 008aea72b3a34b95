"""Descriptors run out: drivers report it as anything but that.

Owns the check that tells a full descriptor table from the driver's own troubles. Knows no driver call.
"""

from __future__ import annotations

import errno
import os
import resource

from devipc.spi import DevIPCError, ResourceExhausted

__all__ = ["explain_missing"]


def explain_missing(error: DevIPCError) -> DevIPCError:
    """Return ``error``, or the :class:`ResourceExhausted` that is behind it when no descriptor is left."""
    try:
        os.close(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
    except OSError as failed:
        if failed.errno in (errno.EMFILE, errno.ENFILE):
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            return ResourceExhausted(
                f"no file descriptor left: limit {soft}, at most {hard}; every physical block costs one",
                code="fds",
                remedy="raise `ulimit -n`, or release exports and mappings that are no longer used",
                backend="cuda",
                status=error.status,
            )
    return error
