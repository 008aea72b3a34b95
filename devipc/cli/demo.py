"""``devipc demo``: runs the story and shows it, as a table on a terminal, as lines in a pipe, or as JSON."""

from __future__ import annotations

import importlib.util
import json
import sys
from typing import Any

import click

from devipc.cli import EXIT_FAILED
from devipc.cli.demo_model import show as show_life
from devipc.cli.life import Life, Progress
from devipc.cli.story import Story

__all__ = ["command"]


@click.command()
@click.option("--backend", default="host", show_default=True, help="Backend to run on; see `devipc backends`.")
@click.option("--device", default="", help="Identity of the device; the backend's first when left out.")
@click.option(
    "--strategy",
    type=click.Choice(["auto", "stream_memop", "host_flag", "polling", "event"]),
    default="auto",
    show_default=True,
    help="Completion strategy to insist on.",
)
@click.option("--hand-overs", default=1000, show_default=True, type=click.IntRange(8, 1_000_000), help="Ordered pages.")
@click.option("--page-kib", default=64, show_default=True, type=click.IntRange(1, 65536), help="Page size in KiB.")
@click.option("--slots", default=4, show_default=True, type=click.IntRange(2, 1024), help="Pages in the pool.")
@click.option("--no-cache", is_flag=True, help="Leave out the part with the cache daemon.")
@click.option("--model", is_flag=True, help="Let a language model's cache outlive scheduler and daemon instead.")
@click.option("--max-tokens", default=16, show_default=True, type=click.IntRange(4, 256), help="Of an answer.")
@click.option("--progress", "told", is_flag=True, help="Tell what is done now as lines, where no bar can be drawn.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")
def command(
    *,
    backend: str,
    device: str,
    strategy: str,
    hand_overs: int,
    page_kib: int,
    slots: int,
    no_cache: bool,
    model: bool,
    max_tokens: int,
    told: bool,
    as_json: bool,
) -> None:
    """Let two processes share memory, order hand-overs, and survive a kill.

    A second process exports a pool; this one imports it. Both write and check what the other wrote; then every page
    is handed over in order; then the exporter is killed in the middle of a second round. At last a cache daemon serves
    schedulers that are killed, and is killed itself; every page is checked.
    """
    progress = _Progress(drawn=not as_json and sys.stderr.isatty(), told=told)
    if model:
        from devipc.cli import demo_model

        with progress:
            demo_model.run(backend=backend, max_tokens=max_tokens, as_json=as_json, progress=progress.update)
        return
    story = Story(
        backend=backend,
        device=device,
        strategy="" if strategy == "auto" else strategy,
        hand_overs=hand_overs,
        slots=slots,
        page_nbytes=page_kib * 1024,
        progress=progress.update,
    )
    with progress:
        report = story.run()
        skipped = {"skipped": "left out", "remedy": "run without --no-cache"}
        report["life"] = skipped if no_cache else _life(backend, progress.update)
        report["ok"] = report["ok"] and report["life"].get("ok", True)
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        _show(report)
    if not report["ok"]:
        raise SystemExit(EXIT_FAILED)


def _life(backend: str, progress: Progress) -> dict[str, Any]:
    """Let the pages of a cache outlive scheduler and daemon; says why not, where that cannot be shown."""
    missing = [name for name in ("numpy", "msgspec") if importlib.util.find_spec(name) is None]
    if backend != "host" or missing:
        why = f"{', '.join(missing)} not installed" if missing else "its schedulers compute in host memory"
        return {"skipped": why, "remedy": "pip install 'devipc[hicache]'" if missing else "see --model"}
    from devipc.hicache.reference.page_driver import NAMES

    command = [sys.executable, "-m", "devipc.hicache.reference.page_driver"]
    return Life(lambda url: [*command, url, backend], NAMES, backend=backend, tier="64MiB", progress=progress).run()


class _Progress:
    """A bar on a terminal; elsewhere lines where they are wanted, or nothing."""

    def __init__(self, *, drawn: bool, told: bool) -> None:
        self._bar: Any = None
        self._told = told and not drawn
        self._tasks: dict[str, Any] = {}
        if drawn:
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(stderr=True), transient=True)

    def update(self, step: str, done: int, total: int) -> None:
        if self._told:
            click.echo(f"{step}: {done} of {total}", err=True)
        if self._bar is None:
            return
        if step not in self._tasks:
            self._tasks[step] = self._bar.add_task(step, total=total)
        self._bar.update(self._tasks[step], completed=done)

    def __enter__(self) -> _Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def _show(report: dict[str, Any]) -> None:
    from devipc.cli.tables import show_table

    share, hand_over, kill, decision = (report[step] for step in ("share", "hand_over", "kill", "decision"))
    click.echo(f"backend {report['backend']}, device {report['device']}")
    click.echo(
        f"share      {share['nbytes']} bytes written and read by both processes, {share['wrong_pages']} wrong pages"
    )
    click.echo(
        f"hand-over  {hand_over['count']} pages in order, {hand_over['wrong_pages']} wrong,"
        f" {hand_over['per_second']} per second, {hand_over['mb_per_second']} MB/s"
    )
    click.echo(
        f"kill       exporter killed after page {kill['pages_taken']}: told 'dying' after {kill['dying_ms']} ms,"
        f" 'gone' after {kill['gone_ms']} ms, {kill['wrong_pages']} wrong pages"
    )
    click.echo(f"           the wait ended with {kill['ended_with']}")
    show_table(
        f"completion strategy: {decision['strategy']}" + (" (degraded)" if decision["degraded"] else ""),
        ("strategy", "verdict", "tried", "evidence or reason"),
        [
            (row["strategy"], row["verdict"], row["phase"], row["reason"] or row["evidence"])
            for row in decision["candidates"]
        ],
    )
    life = report["life"]
    if "skipped" in life:
        click.echo(f"cache: not shown, {life['skipped']}; {life['remedy']}")
    else:
        show_life(life)
    click.echo("all right" if report["ok"] else "WRONG: see above")
