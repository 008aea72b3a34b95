"""What bodies of tests use of pytest in processes of their own, without pytest: loading it is half of what one costs.

Owns marks that do nothing there and ``raises``, which holds what pytest's does. Whatever else is asked for loads the
real pytest and comes from it. It knows no test.
"""

from __future__ import annotations

import importlib
import re
import sys
from types import ModuleType, TracebackType
from typing import Any

_NAME = "pytest"
_Class = type[BaseException]


def _mark(*arguments: Any, **_options: Any) -> Any:
    """Return what is decorated as it is, whether the mark has arguments or not."""
    if len(arguments) == 1 and callable(arguments[0]):
        return arguments[0]
    return lambda decorated: decorated


class _Marks:
    """``pytest.mark``: any name is a mark."""

    def __getattr__(self, name: str) -> Any:
        return _mark


class raises:  # noqa: N801 - named as pytest's
    """Hold that the block raises one of ``expected``, in whose text ``match`` is found; ``value`` is the error."""

    value: BaseException

    def __init__(self, expected: _Class | tuple[_Class, ...], *, match: str | None = None) -> None:
        self._expected = expected
        self._match = match

    @property
    def type(self) -> _Class:
        """Class of the error."""
        return self.value.__class__

    def __enter__(self) -> raises:
        return self

    def __exit__(self, kind: _Class | None, error: BaseException | None, _trace: TracebackType | None) -> bool:
        if error is None:
            raise AssertionError(f"nothing was raised, and {self._expected} was to be")
        if not isinstance(error, self._expected):
            return False
        self.value = error
        text = "\n".join([str(error), *getattr(error, "__notes__", ())])
        if self._match is not None and re.search(self._match, text) is None:
            raise AssertionError(f"{self._match!r} is not found in {text!r}")
        return True


class _Plain(ModuleType):
    """The module that stands for pytest until more is asked for."""

    mark = _Marks()
    raises = raises
    fixture = staticmethod(_mark)

    @staticmethod
    def param(*values: Any, **_options: Any) -> Any:
        """Return the values: nobody makes tests of them."""
        return values

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python's own questions about a module
            raise AttributeError(name)
        return getattr(load(), name)


def load() -> Any:
    """Load the real pytest, for all that import it from now on; return it."""
    if isinstance(sys.modules.get(_NAME), _Plain):
        del sys.modules[_NAME]
    return importlib.import_module(_NAME)


def stand_in() -> None:
    """Let ``import pytest`` find what stands for it, in a process that has not loaded pytest."""
    sys.modules.setdefault(_NAME, _Plain(_NAME))
