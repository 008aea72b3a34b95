"""``devipc demo --model``: the life of a cache, told with a language model."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from devipc.cli import EXIT_FAILED
from devipc.cli.life import Life, Progress

__all__ = ["run", "show"]

_NAMES = ("library-1", "library-2", "bridge-1", "bridge-2", "bridge-4", "chat-1b")


def run(*, backend: str, max_tokens: int, as_json: bool, progress: Progress) -> None:
    """Live through it, and show the report."""

    def driver(url: str) -> list[str]:
        return [sys.executable, "-m", "devipc.hicache.reference.model_driver", url, backend, str(max_tokens)]

    report = Life(driver, _NAMES, backend=backend, tier="256MiB", progress=progress).run()
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        show(report)
    if not report["ok"]:
        raise SystemExit(EXIT_FAILED)


def show(report: dict[str, Any]) -> None:
    """Print a report."""
    from devipc.cli.tables import show_table

    rows = []
    for step in report["steps"]:
        if "restored" in step:
            found = (step["restored"], step["computed"], f"{step['first_token_ms']:.0f} ms", step["answers"])
            rows.append((step["step"], *map(str, found), str(step["different"])))
        else:
            took = f"{step['seconds']:.2f} s" if "seconds" in step else ""
            rows.append((step["step"], "", "", took, str(step.get("answers", "")), str(step.get("different", ""))))
    show_table(
        "the life of a cache (tokens of prompts, time to the first token)",
        ("step", "restored", "computed", "first token", "answers", "different"),
        rows,
    )
    texts: dict[str, str] = next((step["texts"] for step in report["steps"] if step.get("texts")), {})
    for name, text in texts.items():
        if text:
            click.echo(f"{name:<10} {text}")
    click.echo(f"{report['different_answers']} answers changed, in {report['seconds']} s")
