"""The click group behind ``devipc``: names, help and error handling of all commands."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click

from devipc import __version__
from devipc.cli import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_NO_DEVICE, EXIT_USAGE
from devipc.errors import CapabilityError, DevIPCError, UsageError

__all__ = ["group"]

_COMMANDS = {
    "backends": "devipc.cli.backends",
    "bench": "devipc.cli.bench",
    "conformance": "devipc.cli.conformance",
    "demo": "devipc.cli.demo",
    "env": "devipc.cli.env",
    "explain": "devipc.cli.explain",
    "hicache": "devipc.cli.hicache",
    "matrix": "devipc.cli.matrix",
    "probe": "devipc.cli.probe",
}


class _LazyGroup(click.Group):
    """Imports a command's module when it is called or helped, and turns errors into exit codes."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        module = _COMMANDS.get(cmd_name)
        if module is None:
            return None
        command: click.Command = import_module(module).command
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("interrupted; nothing was left behind", err=True)
            ctx.exit(EXIT_INTERRUPTED)
        except OSError as error:
            click.echo(f"devipc: {error}", err=True)
            ctx.exit(EXIT_FAILED)
        except DevIPCError as error:
            click.echo(f"devipc: {type(error).__name__}: {error}", err=True)
            ctx.exit(_exit_code(error))


def _exit_code(error: DevIPCError) -> int:
    if isinstance(error, UsageError):
        return EXIT_USAGE
    return EXIT_NO_DEVICE if isinstance(error, CapabilityError) else EXIT_FAILED


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="devipc %(version)s")
def group() -> None:
    """Share accelerator memory between processes, and know when work on it is done.

    Exit codes: 0 success, 1 something failed, 2 wrong usage, 3 no usable backend or device, 4 the probe
    itself failed, 130 interrupted.
    """
