"""Copies as plain lists: checked snapshots of the caller's arrays, and the loops that run them.

Owns layout checks of descriptor arrays and the fastest way to move bytes from Python. Which addresses may be touched
is asked of :mod:`devipc.host.ranges`. Works on any buffer of 64-bit unsigned integers; numpy is used when the process
has loaded it. Copies whose source and destination overlap have no defined result, as on devices, but harm nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from devipc.host.maps import move, view_at
from devipc.host.ranges import Range, loaded_numpy
from devipc.host.rows import move_rows
from devipc.spi import UsageError

__all__ = ["Rect", "column_of", "rects_of", "run_batch", "run_rects", "run_table", "spans_of", "table_of", "words_of"]

Rect = tuple[int, int, int, int, int, int]
"""dst, src, dst_pitch, src_pitch, width, height."""

_FEW = 64
"""So many copies are over sooner as plain lists."""
_LARGEST = 2**47
"""No address range of a process is longer, and products of two checked values stay far below 2**64."""


def words_of(array: object, *, name: str, width: int | None = None) -> memoryview:
    """Return a view of a C-contiguous buffer of uint64 of shape ``(n,)``, or ``(n, width)``.

    Raises
    ------
    UsageError
        For anything else; a wrong type or layout is never converted.
    """
    try:
        view = memoryview(array)  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(f"{name} is a {type(array).__name__}", remedy="pass a numpy array of uint64") from None
    layout = view.format, view.itemsize, view.ndim, tuple(view.shape or ())[1:]
    inner = () if width is None else (width,)
    if layout not in (("Q", 8, 1 + len(inner), inner), ("L", 8, 1 + len(inner), inner)):
        expected = "(n,)" if width is None else f"(n, {width})"
        raise UsageError(
            f"{name} has format {view.format!r} and shape {view.shape}, not uint64 and {expected}",
            remedy="pass a numpy array of uint64",
        )
    if not view.c_contiguous:
        raise UsageError(f"{name} is not C-contiguous", remedy="pass numpy.ascontiguousarray(...)")
    return view


def column_of(array: object, *, name: str) -> list[int]:
    """Snapshot ``n`` numbers as a list; errors as :func:`words_of`."""
    numbers: list[int] = words_of(array, name=name).tolist()
    return numbers


def rects_of(words: memoryview) -> list[Rect]:
    """Snapshot copies, ``(n, 6)``, as a list."""
    rows: Any = words.tolist()
    return [tuple(row) for row in rows]


def table_of(words: memoryview) -> tuple[Any, Any, Any] | None:
    """Snapshot many copies as an array, beside how many bytes each reaches over at its destination and at its source.

    None when they are few, there is no numpy, or one is empty or wrong: :func:`rects_of` and :func:`spans_of` then.
    """
    np = loaded_numpy()
    if np is None or len(words) <= _FEW:
        return None
    table = np.array(words, np.uint64)
    width, height = table[:, 4:5], table[:, 5:]
    if not (width.all() and height.all()):
        return None
    more = height - np.uint64(1)
    pitches = np.where(more, table[:, 2:4], width)  # that of a single row means nothing
    # In floats, which do not wrap around, and are exact as far as the limit.
    if (width > pitches).any() or (pitches * more.astype(float) + width).max() > _LARGEST:
        return None
    spans = pitches * more + width
    return table, spans[:, 0], spans[:, 1]


def spans_of(copies: Sequence[Rect]) -> tuple[list[int], list[int]]:
    """Return how many bytes each copy reaches over at its destination and at its source; 0 for empty copies.

    Raises
    ------
    UsageError
        When a row is wider than its pitch or a value is larger than any address range.
    """
    dst_spans, src_spans = [], []
    for index, (_, _, dst_pitch, src_pitch, width, height) in enumerate(copies):
        if width == 0 or height == 0:
            dst_spans.append(0)
            src_spans.append(0)
            continue
        if height == 1:
            dst_pitch = src_pitch = width
        if width > min(dst_pitch, src_pitch):
            raise UsageError(
                f"copies[{index}]: rows of {width} bytes are wider than the pitch {min(dst_pitch, src_pitch)}",
                remedy="width <= pitch, where there is more than one row",
            )
        spans = (height - 1) * dst_pitch + width, (height - 1) * src_pitch + width
        if max(spans) > _LARGEST:
            raise UsageError(f"copies[{index}] reaches over {max(spans)} bytes", remedy="check pitch and height")
        dst_spans.append(spans[0])
        src_spans.append(spans[1])
    return dst_spans, src_spans


def run_batch(copies: Iterable[tuple[int, int, int]]) -> None:
    """Move ``(dst, src, nbytes)`` one after the other."""
    for dst, src, nbytes in copies:
        move(dst, src, nbytes)


def run_table(table: Any, held: Sequence[Range]) -> None:
    """Run copies of :func:`table_of`, all together where that can be; ``held`` are the ranges that they lie in."""
    if not move_rows(loaded_numpy(), table, held):
        run_rects(table.tolist())


def run_rects(copies: Sequence[Rect]) -> None:
    """Run two-dimensional copies one after the other."""
    np = loaded_numpy()
    wide = [copy for copy in copies if copy[4] and copy[5]]
    if np is None or not wide:
        for dst, src, dst_pitch, src_pitch, width, height in wide:
            for row in range(height):
                move(dst + row * dst_pitch, src + row * src_pitch, width)
        return
    # One buffer from the first to the last byte for each side: making one for each copy costs more than many copies.
    targets, sources = _Window(np, wide, 0), _Window(np, wide, 1)
    for dst, src, dst_pitch, src_pitch, width, height in wide:
        if dst_pitch == src_pitch == width or height == 1:
            move(dst, src, width * height)
        else:
            # The widest unit that fits both sides: one element moves many bytes.
            unit = 8 if (dst | src | dst_pitch | src_pitch | width) % 8 == 0 else 1
            np.copyto(
                targets.rows(dst, dst_pitch, width, height, unit), sources.rows(src, src_pitch, width, height, unit)
            )


class _Window:
    """All that one side of ``copies`` reaches over (0: their destinations, 1: sources), as one buffer."""

    def __init__(self, np: Any, copies: Sequence[Rect], side: int) -> None:
        self._np = np
        self._start = min(copy[side] for copy in copies)
        end = max(copy[side] + (copy[5] - 1) * copy[2 + side] + copy[4] for copy in copies)
        self._span = view_at(self._start, end - self._start)

    def rows(self, address: int, pitch: int, width: int, height: int, unit: int) -> Any:
        """Return rows as a numpy array of ``unit`` bytes an element, over the memory itself."""
        np = self._np
        dtype = np.uint64 if unit == 8 else np.uint8
        return np.ndarray((height, width // unit), dtype, self._span, address - self._start, (pitch, unit))
