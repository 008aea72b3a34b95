"""The command line: one group, each command imported when it is called.

Owns the list of commands and how an error reaches a person: the sentence, the remedy, and an exit code.
"""

from __future__ import annotations

import sys

__all__ = ["main"]

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_NO_DEVICE = 3
EXIT_INTERRUPTED = 130


def main() -> None:
    """Run the command named on the command line, and exit."""
    if sys.argv[1:] == ["--version"]:  # the one question that must not wait for a terminal library
        from devipc import __version__

        sys.stdout.write(f"devipc {__version__}\n")
        raise SystemExit(0)
    try:
        from devipc.cli.commands import group

        group()
    except KeyboardInterrupt:  # before the command has begun; one that has begun says what it left
        raise SystemExit(EXIT_INTERRUPTED) from None
