"""What the conformance suite may expect of the Acorn device: for the tests of the backend, no part of its wheel."""

from __future__ import annotations

from devipc.conformance import BackendProfile
from devipc.types import HandleKind, Strategy

whole_device = BackendProfile(
    backend="acorn",
    handle_kinds=(HandleKind.MEMFD,),
    strategies=(Strategy.STREAM_MEMOP, Strategy.HOST_FLAG, Strategy.POLLING),  # there are no events
)
