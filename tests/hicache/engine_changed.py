"""What an engine process with faults does otherwise than the real one: many threads submit, an order is misread.

Owns what is put in place of the engine's own names, before it begins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from devipc.hicache.engine import localcopies
from devipc.hicache.engineproc import process
from devipc.hicache.engineproc.orders import Orders
from devipc.hicache.moving import fan
from devipc.hicache.planning import forms
from devipc.hicache.planning.forms import Entries, Submitting
from devipc.hicache.planning.planner import Planner
from devipc.hicache.wire import jobs

if TYPE_CHECKING:
    from tests.hicache.engine_with_faults import Switches


def spread(threads: int, switches: Switches) -> None:
    """Have ``threads`` submit all copies, in short pieces of batches."""
    cast(Any, process).submitter_count = lambda: threads
    cast(Any, localcopies).submitting = lambda *_arguments, most: Submitting(most, Entries(0.0), Entries(0.0, 1e-12))
    fan.PIECES, fan._MEANWHILE_PIECES = 4, 8
    forms._LEAST_S, forms._AROUND_S = -1.0, 0.0  # in batches, half of them beside the other direction
    take_ahead, plan = Orders.take_ahead, Planner.copies

    def counted(orders: Orders) -> None:
        before = orders.empty
        take_ahead(orders)
        if before and not orders.empty:
            planned = getattr(orders._ahead, "planned", None) is not None
            switches.ahead.append("PlannedOrder" if planned else type(orders._ahead).__name__)

    def planned(planner: Planner, *arguments: Any, **options: Any) -> Any:
        switches.plans += 1
        return plan(planner, *arguments, **options)

    cast(Any, Orders).take_ahead = counted
    cast(Any, Planner).copies = planned


def misreading(switches: Switches) -> None:
    """Let the reading of an order be a defect, when it was asked for."""
    lists_of = jobs.lists_of

    def misread(move: Any) -> Any:
        if switches.misread:
            raise MemoryError("reading an order")
        return lists_of(move)

    cast(Any, jobs).lists_of = misread
