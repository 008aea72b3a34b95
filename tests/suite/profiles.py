"""Profiles that the tests of this folder name on the command line."""

from __future__ import annotations

from devipc.conformance import BackendProfile, Deviation
from devipc.types import HandleKind

HOST = "devipc.host.plugin:devipc_backend"

known_short = BackendProfile(
    backend="tests.suite.liars:short_mapping",
    deviations=(Deviation("MEM-011", "maps a page less", "https://example.org/issues/1"),),
)
passes_anyway = BackendProfile(
    backend=HOST, deviations=(Deviation("MEM-011", "was broken once", "https://example.org/issues/2"),)
)
no_skips = BackendProfile(backend=HOST, skips_allowed=False)
listed_skips = BackendProfile(backend=HOST, skips_allowed=False, expected_skips=frozenset(("DISC-010",)))
wants_pools = BackendProfile(backend=HOST, handle_kinds=(HandleKind.MEMFD, HandleKind.POOL))


def made_by_a_function() -> BackendProfile:
    return BackendProfile(backend=HOST, device="0", environment={"DEVIPC_TEST": "1"})
