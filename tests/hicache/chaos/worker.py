"""A scheduler of the random kills: it begins what it is told, then says how each operation ended, and what is wrong.

Run as ``python -m tests.hicache.chaos.worker COUNTS``; it waits for ``join`` by then, so that a spare one takes over
at once. COUNTS is a file of two words, mapped by both sides: operations begun, and operations with a status; what they
said when the process was killed, stays.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from devipc.errors import DevIPCError, PeerGone, StaleError
from devipc.hicache.api import UNFENCED, PoolHandle
from devipc.hicache.client.ticket import Ticket
from devipc.hicache.operations import Event, Kind, Status
from tests.hicache.daemon.scheduler import PAGES, Scheduler, SchedulerProcess, obey
from tests.hicache.pools import POISON, SENTINEL, TIMEOUT_S, PoolMemory

BEGUN, ENDED = 0, 1
NBYTES = 16
SOURCES, TARGETS = range(1, 33), range(33, PAGES)


class Worker(Scheduler):
    """See the module. Pages 1 .. 32 of a pool are sources of backups, the rest targets of restores."""

    def __init__(self, counts: str) -> None:
        self.counts = Counts(counts)

    def join(self, path: str) -> None:
        super().__init__(path, wait_s=TIMEOUT_S)
        self.old: dict[int, PoolHandle] = {}
        self.begun: list[tuple[Ticket, int, list[int], Any, list[Status]]] = []
        self.images = [pool.load() for pool in self.pools]

    # --- what is begun -----------------------------------------------------------------------------------------------

    def begin(self, seed: int, first_seed: int, stored: list[list[int]]) -> list[list[int]]:
        """Begin about six operations; return pool, number and pages of each backup. Nobody waits for any of them."""
        rng = random.Random(seed)
        for memory, image in zip(self.pools, self.images, strict=True):
            assert np.array_equal(memory.load(), image), "memory changed while no operation had it"
        plan = list(self._plan(rng, first_seed, stored))
        for number, memory in enumerate(self.pools):  # at once: it writes the whole pool, which nobody else may then
            of_pool = [one for one in plan if one[1] == number and one[0] not in ("restore", "lookup")]
            pages = [page for one in of_pool for page in one[3]]
            if pages:
                memory.fill(pages, np.concatenate([self._keys(number, len(one[3]), one[2]) for one in of_pool]))
        made: list[list[int]] = []
        restores: list[Ticket] = []
        for what, pool, name, pages in plan:
            try:
                if what in ("restore", "lookup"):
                    self._find(what, pool, name, pages, restores)
                else:
                    made.append([pool, name, len(pages)])
                    self._store(what, pool, name, pages, restores)
            except PeerGone as error:
                if error.code != "degraded":
                    raise
        return made

    def _plan(
        self, rng: random.Random, first_seed: int, stored: list[list[int]]
    ) -> Iterator[tuple[str, int, int, list[int]]]:
        """What to do: with which pool, by which name, with which pages."""
        sources = [rng.sample(SOURCES, len(SOURCES)) for _ in self.pools]
        targets = [rng.sample(TARGETS, len(TARGETS)) for _ in self.pools]
        for number in range(6):
            pool, name, count = rng.randrange(2), first_seed + number, rng.randint(1, 5)
            what, some = rng.choice(["backup", "backup", "after", "given up", "restore", "restore", "lookup"]), sources
            if what in ("restore", "lookup") and not stored:
                what = "backup"
            elif what in ("restore", "lookup"):
                (pool, name, count), some = rng.choice(stored), targets
            yield what, pool, name, some[pool][:count]
            del some[pool][:count]

    def _find(self, what: str, pool: int, name: int, pages: list[int], restores: list[Ticket]) -> None:
        keys = self._keys(pool, len(pages), name)
        if what == "lookup":
            self._began(self.client.lookup(self.handles[pool], keys), pool, [], keys)
            return
        restores.append(self.client.restore(self.handles[pool], keys, pages, ready=UNFENCED))
        self._began(restores[-1], pool, pages, keys)

    def _store(self, what: str, pool: int, name: int, pages: list[int], restores: list[Ticket]) -> None:
        keys = self._keys(pool, len(pages), name)
        after = restores[-1:] if what == "after" else ()
        ticket = self.client.backup(self.handles[pool], pages, keys, ready=self.stream, after=after)
        self._began(ticket, pool, pages, keys)
        if what == "given up" and ticket.cancel():
            self._spoil(self.pools[pool], pages)  # they are the client's own again

    def _spoil(self, memory: PoolMemory, pages: list[int]) -> None:
        """Poison these pages, and touch no other byte: operations are under way."""
        for places in memory.where[pages]:
            for run in np.split(places, np.flatnonzero(np.diff(places) != 1) + 1):
                chunk = int(np.searchsorted(memory._starts, run[0], "right")) - 1
                ptr = memory.built.exports[chunk][0] + int(run[0] - memory._starts[chunk])
                self.staging.write(ptr, np.full(len(run), POISON, np.uint8))

    def _began(self, ticket: Ticket, pool: int, pages: list[int], keys: Any) -> None:
        said: list[Status] = []
        self.counts.add(BEGUN)

        def ended() -> None:
            self.counts.add(ENDED)
            assert ticket.status is not None
            said.append(ticket.status)

        ticket.add_hook(ended)
        self.client._link.attend()
        self.begun.append((ticket, pool, pages, keys, said))

    # --- how it ended ------------------------------------------------------------------------------------------------

    def settle(self) -> dict[str, int]:
        """Wait for every status, look at every byte, and poison all pages; return how many ended how."""
        begun, self.begun = self.begun, []
        found: dict[str, int] = {}
        for ticket, _, _, _, _ in begun:
            if ticket.kind is Kind.LOOKUP and ticket.reached(Event.LEASED, TIMEOUT_S):
                self.client.release(ticket)
            status = ticket.wait(TIMEOUT_S).status
            found[f"{ticket.kind} {status}"] = found.get(f"{ticket.kind} {status}", 0) + 1
        images = [pool.load() for pool in self.pools]
        for ticket, number, pages, keys, said in begun:
            assert said == [ticket.status], (ticket, said)
            if ticket.kind is Kind.RESTORE and ticket.status is Status.COMPLETED:
                self._check(number, images[number], pages, keys)
            if ticket.kind is Kind.BACKUP and ticket.status in (Status.DISCARDED, Status.REFUSED):
                assert not self.client.find(self.handles[number], keys).any(), f"{ticket} is found"
        for pool, image in zip(self.pools, images, strict=True):
            assert (image[pool._outside] == SENTINEL).all(), "bytes outside of pages were written"
            image[~pool._outside] = POISON
            pool.store(image)
        self.images = images
        return found

    def _check(self, number: int, image: Any, pages: list[int], keys: Any) -> None:
        pool = self.pools[number]
        for page, key in zip(pages, keys, strict=True):
            assert np.array_equal(image[pool.where[page]], pool.content(key)), f"page {page} holds something else"

    def present(self, stored: list[list[int]]) -> list[list[int]]:
        """Return what is found of all that."""
        return [one for one in stored if self.match(one[0], one[2], one[1]) == one[2]]

    def read_back(self, stored: list[list[int]]) -> dict[str, int]:
        """Restore what any scheduler stored: what is found must be right."""
        said: dict[str, int] = {}
        for pool, name, count in stored:
            outcome = self.restore(pool=pool, pages=list(TARGETS[:count]), seed=name)
            assert outcome in ("completed", "refused missing"), outcome
            said[outcome] = said.get(outcome, 0) + 1
            self.pools[pool].poison(list(TARGETS[:count]))
        self.images = [pool.load() for pool in self.pools]
        return said

    def attached(self) -> float:
        """Wait until an engine serves this client; return for how many seconds that took."""
        began = time.monotonic()
        while True:
            self.attached_again()
            self._register_anew()
            if not self.old:
                break
            assert time.monotonic() < began + TIMEOUT_S, "a pool is not registered anew"
        return time.monotonic() - began

    # --- what is done to it ------------------------------------------------------------------------------------------

    def drop(self, which: str) -> None:
        """Shut a connection down under it: that to the supervisor, or the session with the engine."""
        link: Any = self.client._link
        current = link._current
        if current is not None:
            inner = current._link if which == "supervisor" else current.session.peer._link
            inner._channel._sock.shutdown(socket.SHUT_RDWR)

    def bump(self, pool: int) -> None:
        """Register a pool anew while its operations are under way: the older registration is refused from then on."""
        self.old[pool] = self.handles[pool]
        self._register_anew()

    def _register_anew(self) -> None:
        """Do so with those that were begun with, unless nobody serves; :meth:`attached` goes on."""
        for pool, old in list(self.old.items()):
            memory = self.pools[pool]
            try:
                if self.handles[pool] is old:
                    self.client.unregister(old, timeout_s=TIMEOUT_S)
                    self.handles[pool] = self.client.register_pool(memory.built, namespace=self._namespace(memory))
                outcome = self.client.restore(
                    old, self._keys(pool, 1, 0), [TARGETS[0]], ready=UNFENCED, timeout_s=TIMEOUT_S
                ).wait(TIMEOUT_S)
            except DevIPCError as error:  # nobody serves, or whoever did ended meanwhile
                if not isinstance(error, PeerGone) and error.code != Status.LOST:
                    raise
                continue
            assert outcome.status in (Status.REFUSED, Status.LOST), outcome
            if isinstance(outcome.error, StaleError):
                del self.old[pool]

    def hold_interpreter(self, delay_s: float) -> None:
        """Keep the interpreter's lock on the main thread: no other thread of this process runs meanwhile."""
        ctypes.PyDLL(None).usleep(int(delay_s * 1e6))


class Counts:
    """The two words."""

    def __init__(self, path: str) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(fd, NBYTES)
        self._map = mmap.mmap(fd, NBYTES)
        os.close(fd)
        self._words = memoryview(self._map).cast("Q")

    def add(self, word: int) -> None:
        self._words[word] += 1

    @property
    def open(self) -> int:
        """How many operations have no status."""
        return self._words[BEGUN] - self._words[ENDED]

    def close(self) -> None:
        self._words.release()
        self._map.close()


class WorkerProcess(SchedulerProcess):
    """The rig's end."""

    def __init__(self, folder: str, number: int) -> None:
        self.path = os.path.join(folder, f"counts-{number}")
        self.counts = Counts(self.path)
        self.log = os.path.join(folder, f"log-{number}")
        with open(self.log, "wb") as log:
            super().__init__(self.path, module="tests.hicache.chaos.worker", stderr=log)

    @property
    def pid(self) -> int:
        return self.process.pid

    def said(self) -> str:
        """What it logged so far."""
        with open(self.log) as file:
            return file.read()

    def kill(self) -> None:
        super().kill()
        self.counts.close()
        os.unlink(self.log)
        os.unlink(self.path)


if __name__ == "__main__":
    obey(Worker(*sys.argv[1:]))
