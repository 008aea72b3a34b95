"""``devipc matrix``: who can share with whom, and how the other side learns that work is done."""

from __future__ import annotations

from collections.abc import Sequence

import click

from devipc.cli.options import finish, probing_options, show_backends
from devipc.cli.tables import ProgressLine, show_table
from devipc.probe.matrix import Cell, Matrix, run_matrix

__all__ = ["command"]


@click.command()
@probing_options
def command(*, backend: str | None, devices: Sequence[str], timeout_s: float, as_json: bool) -> None:
    """Try every exporting device against every importing one.

    A cell has the handle kind and the completion strategy that a session between the two would use.

    Exit codes: 0 every device can be shared with another process on it, 1 one cannot, 2 wrong usage, 3 no usable
    backend or device, 4 the matrix itself failed, 130 interrupted.
    """
    progress = ProgressLine()
    try:
        with progress:
            matrix = run_matrix(backend=backend, devices=devices, timeout_s=timeout_s, progress=progress.update)
    except Exception as error:
        matrix = Matrix((), (), (), error=f"{type(error).__name__}: {error}")
    finish(matrix.to_json(), as_json=as_json, show=lambda: _show(matrix), devices=devices)


def _show(matrix: Matrix) -> None:
    if matrix.error:
        click.echo(f"devipc: the matrix failed: {matrix.error}", err=True)
        return
    if not matrix.devices:
        show_backends(matrix.backends)
        return
    labels = [label for label, _, _ in matrix.devices]
    cells = {(cell.exporter, cell.importer): cell for cell in matrix.cells}
    show_table(
        "exporter (rows) to importer (columns)",
        ("", *labels),
        [(row, *(_text(cells[row, column]) for column in labels)) for row in labels],
    )
    click.echo("cell: handle kind + completion strategy; - is none, * is not the best, for the reasons below")
    for label, _, info in matrix.devices:
        click.echo(f"{label}: {info.name}, {info.uuid}")
    for cell in matrix.cells:
        if cell.reasons:
            click.echo(f"* {cell.exporter} to {cell.importer}")
            for reason in cell.reasons:
                click.echo(f"  {reason}")


def _text(cell: Cell) -> str:
    return f"{cell.kind or '-'} + {cell.strategy or '-'}{' *' if cell.reasons else ''}"
