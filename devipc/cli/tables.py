"""Tables for people: drawn on a terminal, plain aligned text in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

__all__ = ["show_table"]


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print one table to standard output."""
    if sys.stdout is not None and sys.stdout.isatty():
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        table = Table(title=escape(title), title_justify="left")
        for column in columns:
            table.add_column(column, overflow="fold")  # a narrow terminal costs lines, not text
        for row in rows:
            table.add_row(*(escape(cell) for cell in row))
        Console().print(table)
        return
    widths = [max(len(row[at]) for row in (columns, *rows)) for at in range(len(columns))]
    click.echo(title)
    for row in (columns, *rows):
        click.echo("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
