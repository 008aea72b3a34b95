"""The catalogue: every case has a stable id, one sentence of what it demands, and the clause that demands it.

Owns the decorator and the list. It knows no backend and runs nothing.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

__all__ = ["ATTRIBUTE", "Case", "case", "cases"]

ATTRIBUTE = "devipc_case"
"""Where a test function carries its :class:`Case`."""

_IDENTITY = re.compile(r"[A-Z]{3,5}-\d{3}")
_CLAUSE = re.compile(r"[a-z_]+(/[a-z_]+)?\.py: \S.*")
_known: dict[str, tuple[str, Case]] = {}

_Function = TypeVar("_Function", bound=Callable[..., object])


@dataclass(frozen=True, slots=True)
class Case:
    """One demand on a backend.

    Parameters
    ----------
    id : str
        Area and number, for example ``MEM-011``; never given to another demand. Numbers from 200 on are additions to
        the catalogue of the first version.
    demand : str
        One sentence: what a backend must do.
    clause : str
        File and subject of the contract that says so, ``interfaces/memory.py: export``.
    large : bool
        True when it needs gigabytes, so that it runs on request only.
    """

    id: str
    demand: str
    clause: str
    large: bool = False


def case(identity: str, demand: str, *, clause: str, large: bool = False) -> Callable[[_Function], _Function]:
    """Make a test function the case ``identity``; see :class:`Case`.

    Raises
    ------
    ValueError
        For an id of another form or one that a different function has, a demand that is no sentence, or a clause
        that names no file.
    """
    if not _IDENTITY.fullmatch(identity):
        raise ValueError(f"{identity!r} is no case id; use an area and three digits, for example MEM-011")
    if not demand.endswith(".") or len(demand) > 200:
        raise ValueError(f"{identity}: the demand is one sentence of at most 200 characters, with a full stop")
    if not _CLAUSE.fullmatch(clause):
        raise ValueError(f"{identity}: the clause names a file of devipc and a subject, not {clause!r}")
    made = Case(identity, demand, clause, large)

    def mark(function: _Function) -> _Function:
        owner = f"{function.__module__}.{function.__qualname__}"
        other = _known.get(identity, (owner, made))[0]
        if other != owner:
            raise ValueError(f"{identity} is both {other} and {owner}")
        _known[identity] = owner, made
        setattr(function, ATTRIBUTE, made)
        return function

    return mark


def cases() -> tuple[Case, ...]:
    """Return all cases that ship with devipc, sorted by id. Imports the test modules, and so pytest; opens nothing."""
    package = importlib.import_module(__package__)
    for module in pkgutil.iter_modules(package.__path__, f"{__package__}."):
        if module.name.rpartition(".")[2].startswith("test_"):
            importlib.import_module(module.name)
    return tuple(sorted((known for _, known in _known.values()), key=lambda known: known.id))
