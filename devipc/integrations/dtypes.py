"""Element types: one spelling of our own, and how each array protocol says the same.

Owns the table. The names are those of torch and numpy where both have one. Sources: the DLPack header 1.1
(``DLDataTypeCode``) and the array interface protocol, version 3 (``typestr``).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from devipc.errors import UsageError

__all__ = ["DType", "dtype_named", "dtype_of_dlpack", "dtype_of_typestr", "itemsize_of"]


@dataclass(frozen=True, slots=True)
class DType:
    """One element type.

    Parameters
    ----------
    name : str
        Our spelling.
    itemsize : int
        Bytes per element.
    dlpack_code : int
        DLPack's type code; its bits are ``8 * itemsize``, its lanes 1.
    typestr : str
        The array interface's spelling, empty where it has none.
    """

    name: str
    itemsize: int
    dlpack_code: int
    typestr: str = ""


_ORDER = "<" if sys.byteorder == "little" else ">"
_TABLE = {
    dtype.name: dtype
    for dtype in (
        DType("bool", 1, 6, "|b1"),
        *(DType(f"int{8 * n}", n, 0, f"{_ORDER if n > 1 else '|'}i{n}") for n in (1, 2, 4, 8)),
        *(DType(f"uint{8 * n}", n, 1, f"{_ORDER if n > 1 else '|'}u{n}") for n in (1, 2, 4, 8)),
        *(DType(f"float{8 * n}", n, 2, f"{_ORDER}f{n}") for n in (2, 4, 8)),
        *(DType(f"complex{8 * n}", n, 5, f"{_ORDER}c{n}") for n in (8, 16)),
        DType("bfloat16", 2, 4),
        DType("float8_e4m3fn", 1, 10),
        DType("float8_e4m3fnuz", 1, 11),
        DType("float8_e5m2", 1, 12),
        DType("float8_e5m2fnuz", 1, 13),
        DType("float8_e8m0fnu", 1, 14),
    )
}
_BY_DLPACK = {(dtype.dlpack_code, 8 * dtype.itemsize, 1): dtype for dtype in _TABLE.values()}
_BY_TYPESTR = {dtype.typestr: dtype for dtype in _TABLE.values() if dtype.typestr}


def itemsize_of(name: str) -> int:
    """Return the bytes per element of ``name``; raises as :func:`dtype_named` does."""
    return dtype_named(name).itemsize


def dtype_named(name: str) -> DType:
    """Return the element type that devipc spells ``name``.

    Raises
    ------
    UsageError
        For an unknown one; lists the known ones.
    """
    dtype = _TABLE.get(name)
    if dtype is None:
        raise UsageError(
            f"unknown element type {name!r}", code="dtype", remedy=f"known are: {', '.join(_TABLE)}; or share as uint8"
        )
    return dtype


def dtype_of_dlpack(code: int, bits: int, lanes: int) -> DType:
    """Return the element type for a ``DLDataType``; :class:`~devipc.errors.UsageError` when there is none."""
    dtype = _BY_DLPACK.get((code, bits, lanes))
    if dtype is None:
        raise UsageError(
            f"elements of DLPack type code {code}, {bits} bits, {lanes} lanes cannot be shared as such",
            code="dtype",
            remedy="share a view of the same bytes as uint8",
        )
    return dtype


def dtype_of_typestr(typestr: str) -> DType:
    """Return the element type for an array interface's ``typestr``.

    Raises
    ------
    UsageError
        For objects, texts, records, dates, and numbers in the other byte order.
    """
    dtype = _BY_TYPESTR.get(typestr)
    if dtype is None:
        swapped = typestr[:1] in "<>" and _BY_TYPESTR.get(_ORDER + typestr[1:])
        raise UsageError(
            f"elements of type {typestr!r} are in the other byte order"
            if swapped
            else f"elements of type {typestr!r} are no plain numbers",
            code="dtype",
            remedy="share a view of the same bytes as uint8, or a converted array",
        )
    return dtype
