"""Options and endings that the probing commands share."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from devipc.capabilities import Capability
from devipc.cli.tables import show_table
from devipc.probe.report import EXIT_NO_DEVICE, EXIT_TOOL_FAILED, BackendRow
from devipc.probe.runner import DEFAULT_TIMEOUT_S

__all__ = ["SECONDS", "finish", "probing_options", "show_backends", "show_evidence", "words"]


class _Seconds(click.FloatRange):
    """A time that every wait can take: above zero, at most a day, and a number."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        seconds = super().convert(value, param, ctx)
        if seconds != seconds:
            self.fail(f"{value} is not a number of seconds", param, ctx)
        return seconds


SECONDS = _Seconds(min=0, max=86400, min_open=True)
"""Type of an option that takes seconds."""

F = TypeVar("F", bound=Callable[..., Any])


def probing_options(function: F) -> F:
    """Add ``--backend``, ``--device``, ``--timeout`` and ``--json``."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text."),
        click.option(
            "--timeout",
            "timeout_s",
            default=DEFAULT_TIMEOUT_S,
            show_default=True,
            type=SECONDS,
            help="Seconds that listing a backend, and each check, may take.",
        ),
        click.option(
            "--device",
            "devices",
            multiple=True,
            metavar="UUID|N",
            help="Open this device and no other: its identity, the beginning of it, or its number in its backend's"
            " list. May be repeated; all devices when left out.",
        ),
        click.option("--backend", default=None, help="Look at this backend alone; all installed ones when left out."),
    ):
        function = option(function)
    return function


def words(found: Capability) -> str:
    """Return the sentence of a verdict, with the remedy on a line of its own."""
    text = found.evidence if found else found.reason
    return text + (f"\nremedy: {found.remedy}" if found.remedy else "")


def show_backends(rows: Sequence[BackendRow]) -> None:
    """Print which backends there are and what they list."""
    show_table(
        "backends",
        ("backend", "verdict", "devices", "reason"),
        [
            (
                row.name,
                row.capability.verdict.value,
                "\n".join(f"{info.ordinal} {info.name}" for info in row.devices) or "-",
                "" if row.capability else words(row.capability),
            )
            for row in rows
        ],
    )
    for row in rows:
        show_evidence(f"backend {row.name}", row.capability)


def show_evidence(of: str, found: Capability) -> None:
    """Print what a verdict that is not ``yes`` rests on; as a rule a stack, too long for a cell."""
    if not found and found.evidence and found.evidence != found.reason:
        click.echo(f"evidence of {of}:\n{textwrap.indent(found.evidence.rstrip(), '  ')}")


def finish(document: dict[str, Any], *, as_json: bool, show: Callable[[], None], devices: Sequence[str]) -> None:
    """Print a document or its words, and exit with its code.

    An output that takes nothing is a failure of the tool: 4.
    """
    code = int(document["exit_code"])
    try:
        if as_json:
            click.echo(json.dumps(document, indent=2))
        else:
            show()
        if code == EXIT_NO_DEVICE:
            wanted = f" that matches {', '.join(devices)}" if devices else ""
            click.echo(
                f"devipc: no backend lists a device{wanted}; remedy: see the reasons above, and `devipc backends`",
                err=True,
            )
    except OSError as error:
        click.echo(f"devipc: {error}", err=True)
        code = EXIT_TOOL_FAILED
    raise SystemExit(code)
