"""Whether the host tier's columns are what its holds, reservations and pages say.

Owns the comparison, for tests and for reports of defects. It changes nothing, and runs under the tier's lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from devipc.hicache.tier.blocks import ALIGN_NBYTES, BlockSpace
from devipc.hicache.tier.records import Hold, Reservation

__all__ = ["differences"]


def differences(
    space: BlockSpace, pages: Mapping[bytes, int], holds: Iterable[Hold], filling: Iterable[Reservation]
) -> list[str]:
    """Return what differs, by name. Raises UsageError with code ``audit`` when the blocks themselves do not add up."""
    space.audit()
    columns = space.slots
    heads, slots = columns.heads(), np.array(sorted(pages.values()), np.int64)
    counted = {name: np.zeros(columns.count, np.int64) for name in ("holds", "filling", "live")}
    for hold in holds:
        np.add.at(counted["holds"], hold.extents, 1)
    for reservation in filling:
        np.add.at(counted["filling"], reservation.heads, 1)
    np.add.at(counted["live"], columns.head[slots], 1)
    needed = sum(counted.values())
    checks = {name: bool((getattr(columns, name)[heads] == of[heads]).all()) for name, of in counted.items()}
    checks |= {
        "extents": np.array_equal(np.flatnonzero(needed), heads),
        "pages": np.array_equal(slots, np.flatnonzero(columns.visible[: columns.count])),
        "sizes": bool((-(-columns.page_nbytes[slots] // ALIGN_NBYTES) * ALIGN_NBYTES == columns.size[slots]).all()),
        "names": columns.name[slots].tolist() == sorted(pages, key=pages.__getitem__),
    }
    return [name for name, holds_true in checks.items() if not holds_true]
