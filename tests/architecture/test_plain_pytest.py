"""What stands for pytest in processes of test bodies holds what pytest does, and makes way when it is not enough."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.plain_pytest import raises


def noted(error: BaseException) -> BaseException:
    error.add_note("a note")
    return error


def verdict(form: Callable[..., Any], error: BaseException | None, expected: Any, **options: Any) -> str:
    """Return how a block that raises ``error`` ended."""
    try:
        with form(expected, **options) as caught:
            if error is not None:
                raise error
    except pytest.fail.Exception:
        return "failed"
    except AssertionError as found:
        return "let through" if found is error else "failed"
    except BaseException as found:
        return "let through" if found is error else "odd"
    return "held" if caught.value is error and caught.type is type(error) else "odd"


@pytest.mark.parametrize(
    ("error", "expected", "options", "ends"),
    [
        (ValueError("some text"), ValueError, {}, "held"),
        (UnicodeError("some text"), ValueError, {}, "held"),
        (ValueError("some text"), (KeyError, ValueError), {"match": "e t"}, "held"),
        (KeyboardInterrupt(), KeyboardInterrupt, {}, "held"),
        (noted(ValueError("some text")), ValueError, {"match": "text\na n"}, "held"),
        (ValueError("some text"), ValueError, {"match": "^text"}, "failed"),
        (None, ValueError, {}, "failed"),
        (None, (KeyError, ValueError), {"match": "text"}, "failed"),
        (ValueError("some text"), KeyError, {}, "let through"),
        (AssertionError("some text"), (KeyError, ValueError), {"match": "text"}, "let through"),
    ],
)
@pytest.mark.parametrize("form", [raises, pytest.raises], ids=["ours", "pytest's"])
def test_raises_holds_the_same(
    form: Callable[..., Any], error: BaseException | None, expected: Any, options: dict[str, str], ends: str
) -> None:
    assert verdict(form, error, expected, **options) == ends


STANDS_IN = """
import sys
from tests import plain_pytest
plain_pytest.stand_in()
import pytest

@pytest.mark.long
@pytest.mark.parametrize("one", [pytest.param(1, marks=pytest.mark.chaos), 2])
@pytest.fixture
def body():
    return 7

assert body() == 7
assert pytest.raises is plain_pytest.raises
assert "_pytest" not in sys.modules
try:
    pytest.skip("why")
except pytest.skip.Exception as skipped:
    assert str(skipped) == "why"
import pytest
assert "_pytest" in sys.modules
assert pytest.raises is not plain_pytest.raises
"""


def test_it_stands_for_pytest_until_more_is_asked_for() -> None:
    done = subprocess.run([sys.executable, "-c", STANDS_IN], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
