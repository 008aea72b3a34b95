"""``devipc demo --model``: the life of a cache, told with a language model."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import click

from devipc.cli import EXIT_FAILED
from devipc.cli.life import Life, Progress

__all__ = ["run", "show"]

_NAMES = ("library-1", "library-2", "bridge-1", "bridge-2", "bridge-4", "chat-1b")


def run(*, backend: str, max_tokens: int, as_json: bool, progress: Progress) -> None:
    """Live through it, and show the report."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # torch's threads share few processors with the daemon

    def driver(url: str) -> list[str]:
        return [sys.executable, "-m", "devipc.hicache.reference.model_driver", url, backend, str(max_tokens)]

    report = Life(driver, _NAMES, backend=backend, tier="256MiB", progress=progress).run()
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        show(report)
    if not report["ok"]:
        raise SystemExit(EXIT_FAILED)


def _forms(plans: dict[str, dict[str, int]]) -> str:
    """Say in which forms the cache's engine has moved pages."""
    said = []
    for direction, forms in plans.items():
        if any(forms.values()):
            said.append(f"{direction} " + ", ".join(f"{count} {form}" for form, count in forms.items() if count))
    return "; ".join(said)


def show(report: dict[str, Any]) -> None:
    """Print a report."""
    from devipc.cli.tables import show_table

    rows = []
    for step in report["steps"]:
        took = f"{step['seconds']:.2f} s" if "seconds" in step else ""
        if "restored" in step:
            took = f"{step['first_token_ms']:.0f} ms"
        told = [step.get(name, "") for name in ("answers", "different", "strategy")]
        counted = [step.get(name, "") for name in ("restored", "kept", "computed")]
        rows.append([step["step"], *map(str, counted), took, *map(str, told), _forms(step.get("plan", {}))])
    show_table(
        "the life of a cache (tokens of prompts: from host memory, from the device, computed)",
        ("step", "restored", "kept", "computed", "first token", "answers", "different", "strategy", "copies so far"),
        rows,
    )
    first = report["first_token_ms"]
    if len(first) == 2:
        with_and_without = f"{first['computed']:g} ms without, {first['restored']:g} ms with pages from host memory"
        click.echo(f"first token after {with_and_without} (medians)")
    texts: dict[str, str] = next((step["texts"] for step in report["steps"] if step.get("texts")), {})
    for name, text in texts.items():
        if text:
            click.echo(f"{name:<10} {text}")
    click.echo(f"{report['different_answers']} answers changed, in {report['seconds']} s")
