"""``devipc probe``: what works on this machine, found out by trying, with evidence, reasons and remedies."""

from __future__ import annotations

from collections.abc import Sequence

import click

from devipc.cli.options import finish, probing_options, show_backends, show_evidence, words
from devipc.cli.tables import ProgressLine, show_table
from devipc.probe.report import Report, Row, parse_requirements
from devipc.probe.runner import DEFAULT_REQUIREMENTS, run_probe

__all__ = ["command"]


@click.command()
@probing_options
@click.option(
    "--require",
    "require",
    default=None,
    metavar="AREA[=CHECK],...",
    help="What must hold on every probed device, such as memory,sync=stream_memop.  [default: memory,sync]",
)
def command(
    *, backend: str | None, devices: Sequence[str], timeout_s: float, as_json: bool, require: str | None
) -> None:
    """Try what the devices of this machine can do.

    Two processes share memory and order work; each check runs under a deadline, so that a driver that crashes or hangs
    costs one row. Nothing is left behind.

    Exit codes: 0 all that is required holds, 1 something required is missing or broken, 2 wrong usage, 3 no usable
    backend or device, 4 the probe itself failed, 130 interrupted.
    """
    requirements = DEFAULT_REQUIREMENTS if require is None else parse_requirements(require)
    progress = ProgressLine()
    try:
        with progress:
            report = run_probe(
                backend=backend,
                devices=devices,
                requirements=requirements,
                timeout_s=timeout_s,
                progress=progress.update,
            )
    except Exception as error:
        report = Report(requirements=requirements, error=f"{type(error).__name__}: {error}")
    finish(report.to_json(), as_json=as_json, show=lambda: _show(report), devices=devices)


def _show(report: Report) -> None:
    if report.error:
        click.echo(f"devipc: the probe failed: {report.error}", err=True)
        return
    show_backends(report.backends)
    names = {(row.name, info.uuid): f"{row.name} {info.ordinal}" for row in report.backends for info in row.devices}
    titles = {
        (row.name, info.uuid): f"{names[row.name, info.uuid]}: {info.name}, {info.uuid}"
        for row in report.backends
        for info in row.devices
    }
    for device in dict.fromkeys((row.backend, row.device) for row in report.rows):
        _show_device(titles[device], [row for row in report.rows if (row.backend, row.device) == device])
    if not report.rows:
        return
    for requirement in report.requirements:
        bad = [(names[backend, device], reason) for r, backend, device, reason in report.missing if r is requirement]
        click.echo(f"required: {requirement}: {'holds' if not bad else 'MISSING'}")
        for name, reason in bad:
            click.echo(f"  on {name}: {reason}")
    counts = ", ".join(f"{count} {verdict}" for verdict, count in report.counts.items())
    click.echo(f"{len(report.rows)} checks in {report.duration_s:.1f} s: {counts}")


def _show_device(title: str, rows: Sequence[Row]) -> None:
    show_table(
        title,
        ("check", "verdict", "claim", "evidence or reason"),
        [
            (
                row.check,
                row.capability.verdict.value,
                row.claim.verdict.value if row.claim is not None else "-",
                words(row.capability) + _claimed(row),
            )
            for row in rows
        ],
    )
    for row in rows:
        show_evidence(row.check, row.capability)


def _claimed(row: Row) -> str:
    """Return what the claim rests on, attributes as a rule, on a line of its own."""
    claim = row.claim
    return f"\nclaim: {claim.evidence}" if claim is not None and claim.evidence and claim != row.capability else ""
