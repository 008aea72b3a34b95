"""``devipc explain``: one check in words: what it tries, what its verdicts say, and what helps."""

from __future__ import annotations

import textwrap
from difflib import get_close_matches

import click

from devipc.cli.tables import show_table
from devipc.errors import UsageError
from devipc.probe.catalogue import Explanation, all_checks, explain

__all__ = ["command"]

_WIDTH = 80
_VERDICTS = (
    ("yes", "it was tried here and did all that it must"),
    ("no", "the driver or the device refuses it, or has nothing like it; the reason says which"),
    ("broken", "it is offered and does the wrong thing, crashes or hangs: do not use it"),
    ("untested", "it could not be tried, for the reason given; count on nothing"),
)


@click.command()
@click.argument("check", required=False)
def command(*, check: str | None) -> None:
    """Say what a check of `devipc probe` tries and what helps; list all checks when none is named."""
    if check is None:
        found = [(name, explain(name)) for name in all_checks()]
        show_table("checks", ("check", "what it is about"), [(name, e.about) for name, e in found if e is not None])
        return
    explanation = explain(check)
    if explanation is None:
        close = get_close_matches(check, all_checks(), n=1, cutoff=0.4)
        raise UsageError(
            f"there is no check {check!r}",
            remedy=(f"did you mean {close[0]}? " if close else "") + "`devipc explain` lists all",
        )
    _show(explanation)


def _show(explanation: Explanation) -> None:
    click.echo(explanation.check)
    _paragraph("about", explanation.about)
    _paragraph("tries", explanation.tries)
    for verdict, meaning in _VERDICTS:
        _paragraph(verdict, meaning)
    for remedy in explanation.remedies:
        _paragraph("helps", remedy)
    _paragraph("demand it", f"devipc probe --require {explanation.check.replace('.', '=', 1)}")


def _paragraph(name: str, text: str) -> None:
    click.echo(textwrap.fill(text, _WIDTH, initial_indent=f"  {name:<11}", subsequent_indent=" " * 13))
