"""``devipc backends``: which backends are installed, which devices they see, and why one is not usable."""

from __future__ import annotations

import json
import textwrap
from typing import Any

import click

from devipc.cli.options import SECONDS
from devipc.cli.tables import show_table
from devipc.probe.runner import DEFAULT_TIMEOUT_S, list_backends

__all__ = ["command"]


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")
@click.option(
    "--timeout",
    "timeout_s",
    default=DEFAULT_TIMEOUT_S,
    show_default=True,
    type=SECONDS,
    help="Seconds that each backend may take.",
)
def command(*, as_json: bool, timeout_s: float) -> None:
    """List installed backends and their devices. Each is loaded in a child, so that a crash costs one row."""
    rows: list[dict[str, Any]] = []
    for one in list_backends(timeout_s=timeout_s):
        devices = [{"uuid": device.uuid, "name": device.name} for device in one.devices]
        rows.append({"backend": one.name, "devices": devices, **one.capability.to_json()})
    if as_json:
        click.echo(json.dumps({"schema": "devipc.backends/1", "backends": rows}, indent=2))
        return
    show_table(
        "installed backends",
        ("backend", "verdict", "devices", "evidence or reason", "remedy"),
        [
            (
                str(row["backend"]),
                str(row["verdict"]),
                ", ".join(device["name"] for device in row["devices"]) or "-",
                str(row["reason"] or row["evidence"]),
                str(row["remedy"]),
            )
            for row in rows
        ],
    )
    for row in rows:
        if row["reason"] and row["evidence"]:  # a stack, as a rule: too long for a cell
            click.echo(f"evidence of {row['backend']}:\n{textwrap.indent(row['evidence'].rstrip(), '  ')}")
