"""Tables and progress for people: drawn on a terminal, plain aligned text in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import click

__all__ = ["ProgressLine", "show_table"]

_STYLES = {"yes": "green", "no": "yellow", "broken": "bold red", "untested": "dim"}
"""How a cell that is just a verdict is drawn; nothing is when NO_COLOR is set."""


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print one table to standard output. A cell may have several lines."""
    if sys.stdout is not None and sys.stdout.isatty():
        _draw(title, columns, rows)
        return
    widths = [
        max(len(line) for row in (columns, *rows) for line in row[at].splitlines() or [""])
        for at in range(len(columns))
    ]
    click.echo(title)
    for row in (columns, *rows):
        cells = [cell.splitlines() or [""] for cell in row]
        for at in range(max(map(len, cells))):
            line = [cell[at] if at < len(cell) else "" for cell in cells]
            click.echo("  " + "  ".join(map(str.ljust, line, widths)).rstrip())


def _draw(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    table = Table(title=escape(title), title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")  # a narrow terminal costs lines, not text
    for row in rows:
        table.add_row(*(Text(cell, style=_STYLES.get(cell, ""), overflow="fold") for cell in row))
    Console().print(table)


class ProgressLine:
    """One bar on standard error that says what is done now; nothing where that is no terminal.

    Parameters
    ----------
    enabled : bool
        False shows nothing on a terminal either.
    """

    def __init__(self, *, enabled: bool = True) -> None:
        self._bar: Any = None
        if enabled and sys.stderr is not None and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            console = Console(stderr=True)
            self._bar = Progress(
                BarColumn(bar_width=20), TextColumn("{task.description}", markup=False), console=console, transient=True
            )
            self._task = self._bar.add_task("", total=None)

    def update(self, what: str, done: int, total: int) -> None:
        """Show ``what`` and how far it is."""
        if self._bar is not None:
            self._bar.update(self._task, description=what, completed=done, total=total, refresh=True)

    def __enter__(self) -> ProgressLine:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()
