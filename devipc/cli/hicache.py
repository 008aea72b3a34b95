"""``devipc hicache``: run the cache daemon, look at it, and let it drain."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import click

from devipc.cli import EXIT_INTERRUPTED
from devipc.errors import CapabilityError

__all__ = ["command"]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@click.group()
def command() -> None:
    """Keep pages of serving systems in host memory: the cache daemon."""


def _with_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add a flag for every setting of the daemon."""
    _need_extra()
    from devipc.hicache.daemon.options import OPTIONS

    for option in reversed(OPTIONS):
        text = f"{option.help.replace('`', '')}  [default: {option.shown}]"
        function = click.option(option.flag, option.name, metavar=option.kind.upper(), help=text)(function)
    return function


def _need_extra() -> None:
    missing = [name for name in ("msgspec", "numpy", "prometheus_client") if find_spec(name) is None]
    if missing:
        raise CapabilityError(
            f"the cache needs {', '.join(missing)}", code="extra", remedy="pip install 'devipc[hicache]'"
        )


class _LazyServe(click.Command):
    """Gets its flags when somebody asks for them: they come from a module that needs the extra."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        known = {parameter.name for parameter in self.params}
        if "socket" not in known:
            holder = click.command()(_with_options(lambda **_: None))
            self.params.extend(holder.params)
        return super().get_params(ctx)


@command.command(cls=_LazyServe)
@click.option(
    "--config",
    "file",
    type=click.Path(dir_okay=False),
    envvar="DEVIPC_HICACHE_CONFIG",
    help="TOML file with the settings below, spelled with underscores. The environment counts more, flags most.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the line that says that it is ready as JSON.")
@click.option("--ready-fd", type=click.IntRange(3), help="Descriptor that the line is written to as well.")
def serve(*, file: str | None, as_json: bool, ready_fd: int | None, **flags: Any) -> None:
    """Serve until SIGTERM or SIGINT, which drains and ends; a second one ends at once.

    Every setting may also stand in the environment, as DEVIPC_HICACHE_ and its name in capitals.
    """
    from devipc.hicache.daemon.options import load_config
    from devipc.hicache.daemon.serve import serve as run

    raise SystemExit(run(load_config(file, flags=flags), as_json=as_json, ready_fd=ready_fd))


def _path(socket: str) -> str:
    _need_extra()
    from devipc.hicache.daemon.admin import default_socket

    return socket or default_socket()


_socket = click.option(
    "--socket", default="", envvar="DEVIPC_HICACHE_SOCKET", help="Where the daemon listens; as its own setting."
)


def _timeout(seconds: float) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return click.option(
        "--timeout",
        "timeout_s",
        default=seconds,
        show_default=True,
        type=click.FloatRange(min=0, min_open=True),
        help="Seconds to wait.",
    )


@command.command()
@_socket
@_timeout(10.0)
@click.option("--watch", is_flag=True, help="Ask again and again, until interrupted.")
@click.option("--every", "every_s", default=1.0, show_default=True, type=click.FloatRange(min=0.05), help="Seconds.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document a time instead of text.")
def status(*, socket: str, timeout_s: float, watch: bool, every_s: float, as_json: bool) -> None:
    """Show what the daemon does."""
    path = _path(socket)
    from devipc.hicache.daemon.admin import ask_status

    before: dict[str, Any] = {}
    try:
        while True:
            found = ask_status(path, timeout_s=timeout_s)
            if watch and not as_json and sys.stdout.isatty():
                click.clear()
            click.echo(json.dumps(found) if as_json else "\n".join(_lines(found, before)))
            if not watch:
                return
            before = found
            time.sleep(every_s)
    except KeyboardInterrupt:
        raise SystemExit(EXIT_INTERRUPTED if not watch else 0) from None


@command.command()
@_socket
@_timeout(30.0)
def drain(*, socket: str, timeout_s: float) -> None:
    """Let the daemon finish what is under way, refuse what comes, and end."""
    path = _path(socket)
    from devipc.hicache.daemon.admin import ask_drain

    ask_drain(path, timeout_s=timeout_s)
    click.echo("drained")


def _lines(found: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """Return a status as text; with rates when there is an older one."""
    engine, tier = found["engine"], found["tier"]
    pinned = "pinned" if engine["pinned"] else f"NOT pinned: {engine['unpinned_reason']}"
    lines = [
        f"{found['state']}, process {found['pid']} for {found['uptime_s']:.0f} s, {found['socket']}",
        f"engine   process {engine['pid'] or '-'}, {engine['backend']} {engine['device']}, started"
        f" {engine['starts']} times, last sign of life {engine['heartbeat_age_s']:.1f} s ago",
    ]
    if engine["last_end"]:
        lines.append(f"         ended last: {engine['last_end']}")
    lines.append(
        f"tier     {_size(tier['capacity_nbytes'])}, {pinned}; {tier['pages']} pages, {tier['holds']} holds,"
        f" {tier['evicted']} evicted"
    )
    for name, lane in found["lanes"].items():
        rate = ""
        if before:
            passed = max(found["uptime_s"] - before["uptime_s"], 1e-9)
            rate = f", {_size((lane['moved_nbytes'] - before['lanes'][name]['moved_nbytes']) / passed)}/s"
        reached = lane["share_of_floor"]
        share = "" if reached is None else f"; {reached:.0%} of {_size(found['floor_nbytes_per_s'])}/s while busy"
        forms = ", ".join(f"{count} {form}" for form, count in found["plans"].get(name, {}).items() if count)
        lines.append(
            f"{name:8} {_size(lane['moved_nbytes'])} moved{rate}, {lane['flying']} on the stream"
            f"; copies: {forms or 'none'}{share}"
        )
    operations = ", ".join(f"{count} {name}" for name, count in sorted(found["operations"].items())) or "none"
    lines.append(f"open     {operations}; the oldest for {found['oldest_s']:.1f} s")
    for client in found["clients"]:
        lines.append(
            f"client   {client['client'][:8]} process {client['pid']} user {client['uid']}, {client['way']},"
            f" {client['pools']} pools, {client['open']} open, for {client['attached_s']:.0f} s"
        )
    lines += [f"STALLED  {one}" for one in found["stalled"]]
    return lines


def _size(nbytes: float) -> str:
    unit = 0
    while nbytes >= 1024 and unit < len(_UNITS) - 1:
        nbytes /= 1024
        unit += 1
    return f"{nbytes:.4g} {_UNITS[unit]}"
