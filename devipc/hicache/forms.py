"""Which form single pages are copied in, and where a restore is cut: strided copies or a batch of plain ones.

Owns the comparison of the two by the cost model. A device takes longer for a strided copy than for its bytes, which a
batch of plain copies avoids, and cuts between layers cost a batch nothing; but a batch keeps several processors busy,
and there is nothing to be had from it when they are needed for the other direction too. Pure: it sees no address.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from devipc.hicache.grouping import Load, cut, took

__all__ = ["Form", "Submitting", "choose_form"]

_MOST_SUBMITTING = 0.6
"""Most of a batch's time that submitting it may take. Planning and the interpreter take their part too, and what an
entry takes is measured in short bursts: lists that were to be submitted in .6 of their time, most of each in batches,
took 1.4 times as long as strided copies on one host (restores of 512-byte rows, H200, 2026-11-30)."""
_BEGIN_S = 0.2e-3
"""How much later the first copy of a batch begins: what is submitted at once is some hundred entries."""


@dataclass(frozen=True, slots=True)
class Submitting:
    """How long batches are best submitted: by how many threads, and what an entry then takes until it is submitted."""

    threads: int = 1
    entry_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Form:
    """How pages are copied.

    Parameters
    ----------
    plain : bool
        In batches of plain copies, also single pages and runs that could be strided; rows with gaps are chosen for
        themselves.
    ranges : tuple of (int, int)
        Layer groups that are submitted as one, as the first of them and the one behind the last.
    """

    plain: bool
    ranges: tuple[tuple[int, int], ...]


def choose_form(
    page_count: int,
    layers: Sequence[int],
    load: Callable[[bool, int, int], Load],
    *,
    by_layer_group: bool,
    batches: bool,
) -> Form:
    """Return how ``page_count`` pages are best copied.

    Parameters
    ----------
    page_count : int
        Pages that are moved.
    layers : sequence of int
        Layers of each group.
    load : callable
        Returns what a page of groups ``begin .. end - 1`` costs, ``load(plain, begin, end)``: in plain copies that
        several threads submit, or in the form that is cheapest for one.
    by_layer_group : bool
        Whether to cut at all.
    batches : bool
        Whether several threads submit a batch, and have no other direction to submit for; else there is no choice.
    """

    def best(*, plain: bool) -> tuple[Form, Load]:
        ranges = cut(page_count, layers, partial(load, plain)) if by_layer_group else ((0, len(layers)),)
        return Form(plain, ranges), took(ranges, partial(load, plain))

    form, takes = best(plain=False)
    if not batches:
        return form
    batch, batch_takes = best(plain=True)
    sooner = batch_takes.move_s + _BEGIN_S / page_count < takes.move_s
    submitted = batch_takes.submit_s <= _MOST_SUBMITTING * batch_takes.move_s
    return batch if sooner and submitted else form
