"""``devipc conformance``: run the suite against a backend, list what it demands, and read results again."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from devipc.cli import EXIT_FAILED
from devipc.cli.tables import show_table
from devipc.errors import UsageError

__all__ = ["command"]


@click.group()
def command() -> None:
    """Hold a backend to the contract, with real processes, or read what earlier runs said.

    Needs the extra `conformance`: pip install 'devipc[conformance]'.
    """
    for name in ("hypothesis", "numpy", "pytest"):
        if find_spec(name) is None:
            raise UsageError(f"the suite needs {name}, which is missing", remedy="pip install 'devipc[conformance]'")


@command.command()
@click.option("--backend", default="", help="Name of an installed backend, or MODULE:FACTORY.")
@click.option("--profile", default="", metavar="MODULE:NAME", help="BackendProfile of a vendor; its backend is run.")
@click.option("--device", default="", help="UUID or ordinal of the device; the first one when left out.")
@click.option("--only", default="", metavar="ID|AREA,...", help="Run these cases alone; see `list`.")
@click.option("--results", type=click.Path(dir_okay=False, path_type=Path), help="Write the results here, as JSON.")
@click.option("--junit", type=click.Path(dir_okay=False, path_type=Path), help="Write a JUnit file here.")
@click.option("--required", is_flag=True, help="A skip that the profile does not list is a failure.")
@click.option("--simulated", is_flag=True, help="The driver is no real one; the results say so.")
@click.option("--jobs", type=click.IntRange(1, 64), default=1, help="Deal the cases out to as many processes.")
@click.option(
    "--share", default="1/1", metavar="NUMBER/OF", help="Run one part of the cases alone, 1/4 to 4/4 of four."
)
@click.option("--large", is_flag=True, help="Run cases that need gigabytes, and more rounds of some others.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print the results as one JSON document; progress goes to stderr."
)
def run(
    *,
    backend: str,
    profile: str,
    device: str,
    only: str,
    results: Path | None,
    junit: Path | None,
    required: bool,
    simulated: bool,
    jobs: int,
    share: str,
    large: bool,
    as_json: bool,
) -> None:
    """Run the suite against one device of a backend.

    Exit codes: 0 nothing failed, 1 a case failed or the suite broke, 2 wrong usage, 3 no such backend or device, 70 a
    case was stuck in the driver: the results so far are written, and the process is ended. 130 interrupted.
    """
    from devipc.conformance.results import SuiteError
    from devipc.conformance.running import profile_of, run
    from devipc.conformance.shares import read_share, run_shares

    part = read_share(share)
    if jobs > 1:
        _run_beside(run_shares, jobs, results, as_json=as_json, refused=bool(junit) or part != (1, 1))
        return
    if os.getcwd() not in sys.path:  # profiles and backends that are not installed are found where one stands
        sys.path.insert(0, os.getcwd())
    wanted = profile_of(backend=backend, profile=profile, device=device, required=required, simulated=simulated)
    names = [part.strip() for part in only.split(",") if part.strip()]
    try:
        with (
            os.fdopen(os.dup(1), "w", encoding="utf-8") as out,  # what is written to 1 during a case is captured
            contextlib.redirect_stdout(sys.stderr if as_json else sys.stdout),
        ):

            def told(document: dict[str, Any]) -> None:
                if as_json:
                    out.write(json.dumps(document, indent=1) + "\n")
                    out.flush()

            good, document = run(wanted, only=names, results=results, junit=junit, large=large, share=part, told=told)
    except SuiteError as error:
        click.echo(f"devipc: {error}", err=True)
        sys.exit(EXIT_FAILED)
    if as_json:
        click.echo(json.dumps(document, indent=1))
    if not good:
        sys.exit(EXIT_FAILED)


def _run_beside(run_shares: Any, jobs: int, results: Path | None, *, as_json: bool, refused: bool) -> None:
    if refused:
        raise UsageError("--jobs goes with neither --junit nor --share", remedy="leave one of them out")
    given = click.get_current_context().params
    arguments = [f"--{name}={given[name]}" for name in ("backend", "profile", "device", "only") if given[name]] + [
        f"--{name}" for name in ("required", "simulated", "large") if given[name]
    ]
    code, document = run_shares(arguments, jobs=jobs, results=results, say=lambda line: click.echo(line, err=as_json))
    if as_json and document:
        click.echo(json.dumps(document, indent=1))
    sys.exit(code)


@command.command("list")
@click.option("--only", default="", metavar="ID|AREA,...", help="List these cases alone.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")
def list_cases(*, only: str, as_json: bool) -> None:
    """List the cases: id, what a backend must do, and the clause of the contract that says so."""
    from devipc.conformance import cases

    names = {part.strip() for part in only.split(",") if part.strip()}
    found = [case for case in cases() if not names or names & {case.id, case.id.partition("-")[0]}]
    if not found:
        raise UsageError(f"no case or area {only}", remedy="leave --only out to see all of them")
    if as_json:
        rows = [{"id": case.id, "demand": case.demand, "clause": case.clause, "large": case.large} for case in found]
        click.echo(json.dumps({"schema": "devipc.conformance.cases/1", "cases": rows}, indent=2))
        return
    show_table(
        f"{len(found)} cases", ("case", "demand", "clause"), [(case.id, case.demand, case.clause) for case in found]
    )


@command.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")
def report(*, files: tuple[Path, ...], as_json: bool) -> None:
    """Say what result files hold. Ends with 1 when a case failed or the suite broke in any of them."""
    from devipc.conformance.reports import read_run

    runs = [read_run(path) for path in files]
    if as_json:
        document = {"schema": "devipc.conformance.report/1", "runs": [run.summary() for run in runs]}
        click.echo(json.dumps(document, indent=2))
    else:
        _show([run.summary() for run in runs])
    if not all(run.good for run in runs):
        sys.exit(EXIT_FAILED)


def _show(summaries: list[dict[str, Any]]) -> None:
    columns = ("backend", "device", "driver", "date", "pass", "skip", "deviation", "fail", "error")
    rows = []
    for one in summaries:
        device = f"{one['device']}{' (simulated)' if one['simulated'] else ''}"
        counts = [str(one["cases"][name]) for name in columns[4:]]
        rows.append((one["backend"], device, one["driver"], one["date"], *counts))
    show_table("cases of each run", columns, rows)
    for one in summaries:
        where = f"{one['backend']} on {one['device']}"
        for identity, parameters, result, reason in one["troubles"]:
            click.echo(f"{where}: {identity}{f'[{parameters}]' if parameters else ''} {result}: {reason}")
        for identity, reason in one["skips"].items():
            click.echo(f"{where}: {identity} skip: {reason}")
