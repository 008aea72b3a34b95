"""``devipc env``: facts about this machine, to be pasted into a report; private data is taken out."""

from __future__ import annotations

import json

import click

from devipc.cli.options import SECONDS
from devipc.cli.tables import ProgressLine
from devipc.probe.environment import collect
from devipc.probe.runner import DEFAULT_TIMEOUT_S

__all__ = ["command"]


@click.command()
@click.option("--no-backends", is_flag=True, help="Ask no backend; no driver is loaded, not even in a child.")
@click.option(
    "--timeout",
    "timeout_s",
    default=DEFAULT_TIMEOUT_S,
    show_default=True,
    type=SECONDS,
    help="Seconds that each backend may take.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")
def command(*, no_backends: bool, timeout_s: float, as_json: bool) -> None:
    """Print what decides which devices work here: versions, namespaces, limits, settings, what each driver says.

    Names of user and host and home paths are replaced, identities and serial numbers shortened.
    """
    with ProgressLine() as progress:
        progress.update("asking the backends", 0, 1)
        sections = collect(backends=not no_backends, timeout_s=timeout_s)
    if as_json:
        click.echo(json.dumps({"schema": "devipc.env/1", "facts": sections}, indent=2))
        return
    for title, facts in sections.items():
        click.echo(f"{title}:")
        for name, value in facts.items():
            click.echo(f"  {name}: {value}")
        if not facts:
            click.echo("  none")
