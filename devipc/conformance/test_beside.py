"""Several extents side by side, for devices that choose where they map."""
# ruff: noqa: D103 - the demand of a case is its documentation

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from devipc.conformance import roles_beside as roles
from devipc.conformance.catalogue import case
from devipc.conformance.peers import Peer
from devipc.conformance.rig import Rig
from devipc.conformance.sharing import allocated, exported
from devipc.conformance.worker import extent_to_json
from devipc.types import ExportedExtent, HandleKind

MIB = 1 << 20
CLAUSE = "interfaces/memory.py: SideBySide.open_side_by_side"


@contextlib.contextmanager
def several(rig: Rig, kind: HandleKind, count: int = 4) -> Iterator[list[ExportedExtent]]:
    """Yield exports of equal size, of seeds 1, 2, ..."""
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(allocated(rig, 2 * MIB, kind, seed=seed)) for seed in range(1, count + 1)]
        yield [stack.enter_context(exported(rig, one.ptr, 2 * MIB)) for one in made]


def send(extents: Sequence[ExportedExtent]) -> dict[str, Any]:
    """Return the arguments that bring several extents to a role."""
    return {"extents": [extent_to_json(one) for one in extents], "fds": [fd for one in extents for fd in one.fds]}


@case(
    "MEM-220",
    "Extents that are opened side by side are one region at equal distances, which one strided copy spans.",
    clause=CLAUSE,
)
def test_one_region(rig: Rig, peer: Peer, kind: HandleKind) -> None:
    with several(rig, kind) as extents:
        body = peer.call(roles.open_beside, **send(extents), nbytes=2 * MIB, row_nbytes=3000).body
    assert len(body["distances"]) == 1, f"the extents lie at distances of {body['distances']} bytes"
    assert body["distances"][0] >= 2 * MIB
    assert len(body["regions"]) == 1
    assert body["regions"][0] != 0
    assert body["column"] == 4 * 3000


@case(
    "MEM-221",
    "Of extents of which one is bad none is opened side by side, and nothing stays mapped.",
    clause=CLAUSE,
)
def test_all_or_none(rig: Rig, peer: Peer, kind: HandleKind) -> None:
    with several(rig, kind) as extents:
        peer.call(roles.open_beside, **send(extents), nbytes=2 * MIB, row_nbytes=3000)
        bad = dataclasses.replace(extents[-1].chunks[0], nbytes=extents[-1].chunks[0].allocation_nbytes + 4096)
        wrong = [*extents[:-1], ExportedExtent(kind, (bad,), extents[-1].fds)]
        body = peer.call(roles.refuse_beside, **send(wrong), times=16).body
    assert not body["accepted"], "extents with a bad chunk among them were opened"
    assert body["maps"] < 16, f"{body['maps']} mapped files are left of 16 refused opens"


@case(
    "LIFE-220",
    "Extents that were opened side by side are closed one by one, in any order, and those that are left stay usable.",
    clause=CLAUSE,
)
def test_closed_one_by_one(rig: Rig, peer: Peer, kind: HandleKind) -> None:
    with several(rig, kind) as extents:
        peer.call(roles.close_one_by_one, **send(extents), nbytes=64 << 10, times=6)
