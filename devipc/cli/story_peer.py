"""The exporter's process of the demo: shares a pool, fills pages, obeys one-line commands on its standard input.

Started as ``python -m devipc.cli.story_peer BACKEND DEVICE SLOTS PAGE_NBYTES STRATEGY``. It ends with its standard
input, so that it never outlives the process that started it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any

from devipc.errors import DevIPCError
from devipc.interfaces.memory import Allocation
from devipc.probe.stage import Stage
from devipc.session import Exporter

__all__ = ["page"]

_READY, _DONE = "ready", "done"
_TIMEOUT_S = 30.0


def page(number: int, nbytes: int) -> bytes:
    """Return the content of page ``number``: its number, over and over, so that one stale byte shows."""
    return number.to_bytes(8, "little") * (nbytes // 8)


class _Producer:
    """Fills slots of the pool in turn; never overwrites one before the consumer is done with it."""

    def __init__(self, exporter: Exporter, pool: Allocation, *, slots: int, page_nbytes: int) -> None:
        self._exporter = exporter
        self._pool = pool
        self._slots = slots
        self._page_nbytes = page_nbytes
        self._stage = Stage(exporter.device, slots * page_nbytes)

    def fill(self, first: int) -> None:
        """Write pages ``first`` onward into all slots at once."""
        for slot in range(self._slots):
            self._put(slot, first + slot)
        self._stage.synchronize()

    def verify(self, first: int) -> int:
        """Return how many slots do not hold what the consumer said it wrote."""
        nbytes = self._page_nbytes
        self._stage.load(self._pool.ptr, self._slots * nbytes)
        self._stage.synchronize()
        view = self._stage.view
        return sum(
            bytes(view[slot * nbytes : (slot + 1) * nbytes]) != page(first + slot, nbytes)
            for slot in range(self._slots)
        )

    def hand_over(self, count: int) -> None:
        """Produce ``count`` pages in order; the consumer may be ``slots`` behind at most."""
        peer = self._exporter.wait_peer(timeout_s=_TIMEOUT_S)
        ready = peer.create_fence(_READY)
        say({"fence": _READY})
        done = None
        for number in range(1, count + 1):
            if number > self._slots:
                if done is None:
                    done = peer.open_fence(_DONE)
                done.synchronize(number - self._slots, _TIMEOUT_S)
            self._put(number % self._slots, number)
            ready.signal(self._stage.stream, number)
        if done is None:
            done = peer.open_fence(_DONE)
        done.synchronize(count, _TIMEOUT_S)
        done.close()
        ready.close()

    def close(self) -> None:
        self._stage.close()

    def _put(self, slot: int, number: int) -> None:
        at, nbytes = slot * self._page_nbytes, self._page_nbytes
        self._stage.view[at : at + nbytes] = page(number, nbytes)
        self._stage.store(self._pool.ptr + at, nbytes, at=at)


def say(answer: dict[str, Any]) -> None:
    """Print one answer as a JSON line; unbuffered, so that nothing is left to be flushed to a reader that died."""
    os.write(sys.stdout.fileno(), json.dumps(answer).encode() + b"\n")


def main() -> None:
    """Serve the demo until standard input ends; say what went wrong instead of failing."""
    try:
        _serve(*sys.argv[1:6])
    except BrokenPipeError:  # whoever asked is dead
        pass
    except DevIPCError as error:
        with contextlib.suppress(BrokenPipeError):
            say({"error": error.to_json()})


def _serve(backend: str, device: str, slots: str, page_nbytes: str, strategy: str) -> None:
    with Exporter(backend=backend, device=device or None, strategy=strategy or None) as exporter:
        pool = exporter.allocate(int(slots) * int(page_nbytes))
        exporter.share("pool", pool)
        producer = _Producer(exporter, pool, slots=int(slots), page_nbytes=int(page_nbytes))
        try:
            say({"path": exporter.path, "pid": os.getpid()})
            for line in sys.stdin:
                command, number = line.split()
                if command == "fill":
                    producer.fill(int(number))
                    say({"filled": True})
                elif command == "verify":
                    say({"wrong": producer.verify(int(number))})
                elif command == "hand_over":
                    producer.hand_over(int(number))
                    say({"handed_over": int(number)})
        finally:
            producer.close()


if __name__ == "__main__":
    main()
