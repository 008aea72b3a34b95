"""Roles of peers for the state machines: what a mapping shows, as a digest.

Owns what a peer does on request.
"""

from __future__ import annotations

import hashlib
from typing import Any

from devipc.conformance.worker import Worker, role
from devipc.errors import DevIPCError

__all__ = ["ask", "digest"]

Fds = tuple[int, ...]
Body = dict[str, Any]


@role
def digest(worker: Worker, fds: Fds, key: int, offset: int, nbytes: int) -> Body:
    """Return a digest of what a mapping shows."""
    found = worker.rig.read(worker.get(key).ptr + offset, nbytes)
    return {"digest": hashlib.sha256(found).hexdigest()}


@role
def ask(worker: Worker, fds: Fds, key: int, value: int) -> Body:
    """Ask a kept fence; return the answer, or the code of the refusal."""
    try:
        return {"answer": str(worker.get(key).query(value))}
    except DevIPCError as error:
        return {"answer": error.code}
