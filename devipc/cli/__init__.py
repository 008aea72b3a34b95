"""The command line: one group, each command imported when it is called.

Owns what a command may count on in its process, and how an error reaches a person: the sentence, the remedy, and an
exit code.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from types import FrameType

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
    _fill_descriptors()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # under nohup it is not
            signal.signal(number, _interrupt)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what a driver calls its device need not fit the terminal's alphabet
            stream.reconfigure(errors="backslashreplace")
    try:
        from devipc.cli.commands import group

        group()
    except KeyboardInterrupt:  # before the command has begun; one that has begun says what it left
        raise SystemExit(EXIT_INTERRUPTED) from None


def _fill_descriptors() -> None:
    """Open 0 to 2 where they are closed: a socket or pipe that got such a number would be lost to a child's streams."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """End as an interrupt does: in order, with nothing left behind."""
    raise KeyboardInterrupt
