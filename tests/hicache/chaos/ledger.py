"""A daemon that keeps a ledger of its operations: each line of it says that one began, or that it has a status.

Run as ``python -m tests.hicache.chaos.ledger LEDGER NAME=VALUE...``: the daemon itself, with these options. What was
written outlives a SIGKILL, so that whoever reads it can say that no operation had two statuses, whatever was killed.
"""

from __future__ import annotations

import itertools
import os
import struct
import sys
from collections.abc import Callable
from typing import Any

from devipc.hicache.daemon import keeper
from devipc.hicache.daemon.options import load_config
from devipc.hicache.daemon.serve import serve
from devipc.hicache.engine.engineop import EngineOp

_LINE = struct.Struct("<QB")
_BEGAN, _ENDED = 0, 1


class LedgerReader:
    """Reads what a daemon wrote so far."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115
        self._rest = b""
        self.began = self.ended = 0
        self.open: set[int] = set()
        self.wrong: list[str] = []

    def read(self) -> None:
        body = self._rest + self._file.read()
        whole = len(body) - len(body) % _LINE.size
        self._rest = body[whole:]
        for number, what in _LINE.iter_unpack(body[:whole]):
            if what == _BEGAN:
                self.began += 1
                self.open.add(number)
            elif number in self.open:
                self.ended += 1
                self.open.remove(number)
            else:
                self.wrong.append(f"operation {number} has a second status")

    def close(self) -> None:
        self._file.close()


def keep(path: str) -> None:
    """Write down every operation of this process from now on."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    numbers = itertools.count(1)
    begin = EngineOp.__init__

    def recorded(self: EngineOp, request: Any, owner: bytes, tell: Any, on_end: Callable[[EngineOp], None]) -> None:
        number = next(numbers)
        os.write(fd, _LINE.pack(number, _BEGAN))

        def ended(operation: EngineOp) -> None:
            os.write(fd, _LINE.pack(number, _ENDED))
            on_end(operation)

        begin(self, request, owner, tell, ended)

    EngineOp.__init__ = recorded  # type: ignore[method-assign]


def main() -> int:
    path, *options = sys.argv[1:]
    keep(path)
    keeper._LIVED_S = 0.0  # engines are killed often here, which is no reason to wait before the next one
    return serve(load_config(environment={}, flags=dict(option.split("=", 1) for option in options)), as_json=True)


if __name__ == "__main__":
    sys.exit(main())
