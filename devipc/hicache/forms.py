"""Which form single pages are copied in, and where a restore is cut: strided copies or a batch of plain ones.

Owns the comparison of the two by the cost model. A device takes longer for a strided copy than for its bytes, which a
batch of plain copies avoids, and cuts between layers cost a batch nothing; but a batch keeps several processors busy,
and there is nothing to be had from it when they are needed for the other direction too. Pure: it sees no address.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from devipc.hicache.grouping import Load, cut, took

__all__ = ["Form", "choose_form"]

_LEAST_GAIN = 0.03
"""How much sooner a batch must be over, to be worth its processor time."""
_MOST_SUBMITTING = 0.3
"""Most of a batch's time that submitting it may take. Planning and other threads take their part too: pages of 16, of
which it is .6, reached .91 and .88 of a contiguous copy in one run, .82 and .70 in another, and strided .83 and .79."""
_A_THREAD_MORE = 0.45
"""What a second and a third thread add, as shares of what one thread submits (read on an H200, 2026-11-30)."""
_BEGIN_S = 0.2e-3
"""How much later the first copy of a batch begins: what is submitted at once is some hundred entries."""


@dataclass(frozen=True, slots=True)
class Form:
    """How pages are copied.

    Parameters
    ----------
    plain : bool
        In batches of plain copies, also what could be strided.
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
    threads: int,
) -> Form:
    """Return how ``page_count`` pages are best copied.

    Parameters
    ----------
    page_count : int
        Pages that are moved.
    layers : sequence of int
        Layers of each group.
    load : callable
        Returns what a page of groups ``begin .. end - 1`` costs, in plain copies or in the form that is cheapest for
        the thread that submits it, ``load(plain, begin, end)``.
    by_layer_group : bool
        Whether to cut at all.
    threads : int
        How many submit a batch at a time; with one there is no choice.
    """

    def best(*, plain: bool) -> tuple[Form, Load]:
        def load_of(begin: int, end: int) -> Load:
            found = load(plain, begin, end)
            return Load(found.submit_s / (1 + _A_THREAD_MORE * (threads - 1)), found.move_s) if plain else found

        ranges = cut(page_count, layers, load_of) if by_layer_group else ((0, len(layers)),)
        return Form(plain, ranges), took(ranges, load_of)

    form, takes = best(plain=False)
    if threads < 2:
        return form
    batch, batch_takes = best(plain=True)
    sooner = batch_takes.move_s + _BEGIN_S / page_count <= (1 - _LEAST_GAIN) * takes.move_s
    submitted = batch_takes.submit_s <= _MOST_SUBMITTING * batch_takes.move_s
    return batch if sooner and submitted else form
