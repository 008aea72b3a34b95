"""Any order of operations, against a model that fits on a page: a list of pages, the least recently used first.

As a program it runs as many operations as it is told, in as many processes, and looks whether memory and descriptors
stay flat: ``python -m tests.hicache.stateful --operations 1000000 --processes 14 --seed 1 --json FILE``. It needs
numpy, msgspec and hypothesis, no device and no torch.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from devipc.hicache.api import UNFENCED
from devipc.hicache.operations import Event, Status
from devipc.hicache.results import PageResult
from devipc.hicache.ticket import Ticket
from devipc.registry import load_backend
from tests.hicache.deployment import DAEMON, INPROC, MESSAGES, InProcess, chosen, deployed
from tests.hicache.enough import Enough, start, wait_for
from tests.hicache.resident import resident_nbytes
from tests.hicache.scenario import done
from tests.hicache.world import TIMEOUT_S, World, until, world

KEYS, TIER_PAGES, PAGE_NBYTES = 14, 8, 512
STEPS = 200
LAST_S = 120.0
some = st.lists(st.integers(0, KEYS - 1), min_size=1, max_size=5, unique=True)


class Model:
    """What is in the host tier, in the order in which it would be evicted, and what must stay."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.held: list[list[int]] = []

    @property
    def pinned(self) -> set[int]:
        return {key for hold in self.held for key in hold}

    @property
    def present(self) -> set[int]:
        return set(self.order)

    def use(self, keys: list[int]) -> None:
        for key in keys:
            if key in self.order:
                self.order.remove(key)
                self.order.append(key)

    def room_for(self, keys: list[int]) -> bool:
        return len(self.pinned) + len(set(keys) - self.pinned) <= TIER_PAGES

    def store(self, keys: list[int]) -> list[PageResult]:
        self.use(keys)
        missing = [key for key in keys if key not in self.order]
        results = [PageResult.STORED if key in missing else PageResult.PRESENT for key in keys]
        while len(self.order) + len(missing) > TIER_PAGES:
            self.order.remove(next(key for key in self.order if key not in self.pinned))
        self.order += missing
        return results

    def hold(self, keys: list[int]) -> list[int]:
        found = [key for key in keys if key in self.order]
        self.held.append(found)
        return found

    def release(self, found: list[int]) -> None:
        self.held.remove(found)
        # Whoever was held is used at the end of the last hold.
        self.use([key for key in found if key not in self.pinned])

    def take_away(self, keys: set[int]) -> int:
        gone = len(keys & self.present)
        self.order = [key for key in self.order if key not in keys]
        return gone


class Later:
    """A ready point that is reached when this test says so."""

    now = False

    def reached(self) -> bool:
        return self.now


class CacheMachine(RuleBasedStateMachine):
    """One client after another on one engine; destinations are poisoned before each restore."""

    operations = 0
    world: World | None = None
    """Lent by :func:`run`: all of its examples have one engine, which is empty at the beginning of each."""

    def __init__(self) -> None:
        super().__init__()
        assert self.world is not None
        self.it = self.world
        self.model = Model()
        self.leases: list[tuple[Ticket, list[int]]] = []

    @initialize()
    def begin(self) -> None:
        pools = self.it.pools
        self.memory = pools[0] if pools else self.it.mla_pool(pages=2 * KEYS, page_tokens=4, layers=8, row=16)
        assert self.memory.layout.page_nbytes == PAGE_NBYTES
        self.join()
        self.keys = self.it.keys(self.handle, KEYS)
        self.memory.fill(range(1, KEYS + 1), self.keys)

    def join(self) -> None:
        self.client = self.it.client()
        self.handle = self.it.register(self.client, self.memory)

    def count(self) -> None:
        """Note that an operation is begun."""
        CacheMachine.operations += 1

    def chosen(self, keys: list[int]) -> Any:
        return self.keys[np.array(keys)]

    @rule(keys=some)
    def match(self, keys: list[int]) -> None:
        self.count()
        found = [key in self.model.present for key in keys]
        assert self.client.find(self.handle, self.chosen(keys)).tolist() == found
        assert self.client.match(self.handle, self.chosen(keys)) == [*found, False].index(False)

    @precondition(lambda self: len(self.model.pinned) < TIER_PAGES)
    @rule(keys=some)
    def backup(self, keys: list[int]) -> None:
        if not self.model.room_for(keys):
            return
        self.count()
        pages = [key + 1 for key in keys]
        ticket = self.client.backup(self.handle, pages, self.chosen(keys), ready=UNFENCED)
        assert done(ticket) == self.model.store(keys)

    @rule(keys=some, partial=st.booleans(), lease=st.booleans())
    def restore(self, keys: list[int], partial: bool, lease: bool) -> None:
        self.count()
        used = self.leases.pop() if lease and self.leases else None
        targets = [KEYS + 1 + number for number in range(len(keys))]
        self.memory.poison(targets)
        ready = UNFENCED if used is None else Later()
        ticket = self.client.restore(
            self.handle, self.chosen(keys), targets, ready=ready, partial=partial, lease=used and used[0]
        )
        if isinstance(ready, Later):
            self.client.ping()  # the lease has ended by then, before the restore: that is the order of the model
            ready.now = True
        outcome = ticket.wait(TIMEOUT_S)
        hit = [key in self.model.present for key in keys]
        admitted = all(hit) or (partial and any(hit))
        held = self.model.hold(keys if admitted else [])
        if used is not None:
            self.model.release(used[1])
        self.model.release(held)
        if admitted:
            assert outcome.status is Status.COMPLETED
            results = [PageResult.RESTORED if found else PageResult.MISSING for found in hit]
            assert outcome.results.tolist() == results
            restored = [number for number, found in enumerate(hit) if found]
            self.memory.check([targets[number] for number in restored], self.chosen([keys[n] for n in restored]))
        else:
            assert outcome.status is Status.REFUSED
            restored = []
        missed = [target for number, target in enumerate(targets) if number not in restored]
        assert not missed or self.memory.is_poisoned(missed)

    @precondition(lambda self: len(self.leases) < 3)
    @rule(keys=some)
    def lookup(self, keys: list[int]) -> None:
        self.count()
        ticket = self.client.lookup(self.handle, self.chosen(keys))
        ticket.reached(Event.LEASED, TIMEOUT_S)
        found = self.model.hold(keys)
        assert ticket.hit.tolist() == [key in found for key in keys]
        if found:
            assert ticket.reached(Event.LEASED, 0)
            self.leases.append((ticket, found))
        else:
            assert ticket.status is Status.COMPLETED
            self.model.held.remove(found)

    @precondition(lambda self: bool(self.leases))
    @rule(which=st.integers(0, 2))
    def release(self, which: int) -> None:
        self.count()
        ticket, found = self.leases.pop(which % len(self.leases))
        assert self.client.release(ticket)
        self.model.release(found)

    # What a lease holds is freed when it ends: the model would have to know how much memory that is.
    @precondition(lambda self: not self.leases)
    @rule(keys=some)
    def invalidate(self, keys: list[int]) -> None:
        self.count()
        assert self.client.invalidate(self.handle, self.chosen(keys)) == self.model.take_away(set(keys))

    @precondition(lambda self: not self.leases)
    @rule(really=st.integers(0, 5))
    def flush(self, really: int) -> None:
        if not really:
            self.count()
            assert self.client.flush(self.handle) == self.model.take_away(self.model.present)

    @rule(really=st.integers(0, 59))
    def crash(self, really: int) -> None:
        """The client is gone; its successor finds what it left."""
        if really >= (6 if chosen() == INPROC else 1):  # to attach to a daemon takes longer
            return
        self.count()
        self.client.ping()  # whatever it said before has been heard
        holders = list(self.it.tier._holds)
        crash(self.it, self.client)
        assert not self.it.tier._holds
        order = {lease.op: found for lease, found in self.leases}
        for _, op in holders:
            self.model.release(order[op])
        self.leases.clear()
        self.join()

    def teardown(self) -> None:
        self.it.tier.audit()
        if hasattr(self, "handle"):
            self.client.flush(self.handle)
        for client in self.it.clients:
            client.close(timeout_s=TIMEOUT_S)
            client.check_ends(lookups=True)
        self.it.clients.clear()
        status: Any = self.it.tier.status()
        assert (status["pages"], status["holds"], status["reservations"]) == (0, 0, 0), status


class SeededMachine(CacheMachine):
    """The same, with a seed of its own: Hypothesis keeps every class of machines that it has seen."""


def crash(it: World, client: Any) -> None:
    """Let a client be gone as one that was killed: its connections end, and it attaches to nobody again."""
    if isinstance(it.deployment, InProcess):
        client.session.dying()
        return
    link, supervisor = client.link, it.deployment.supervisor  # type: ignore[attr-defined]
    with link._changed:
        link._closing = True
    current = link._current
    for connection in (current.session.peer._link, current._link):
        connection._channel._sock.shutdown(socket.SHUT_RDWR)
    until(lambda: all(one.client != link._target.client for one in supervisor._clients.all()))


def run(examples: int, *, steps: int = STEPS, deployment: str = INPROC, start: int | None = None) -> None:
    """Run so many times, with so many operations each; the same ``start`` brings the same operations."""
    device: Any = load_backend("host").open_device()
    nbytes = TIER_PAGES * PAGE_NBYTES
    with (
        deployed(deployment),
        world(device, tier_nbytes=nbytes, slab_nbytes=nbytes, extent_pages=1, kept_percent=0) as it,
    ):
        machine: Any = CacheMachine if start is None else seed(start)(SeededMachine)
        machine.world = it
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=examples,
                stateful_step_count=steps,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
    machine.world = None  # the class stays
    device.close()


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _work(operations: int, deployment: str, start: int, enough: Enough) -> dict[str, Any]:
    """Run until so many operations are done, or it is enough; return how many, and what was held on the way."""
    began, number = time.monotonic(), 0
    held: list[tuple[int, int]] = []
    while CacheMachine.operations < operations and not (held and enough):
        run(20, deployment=deployment, start=start + number)
        number += 1
        gc.collect()
        held.append((resident_nbytes(), _descriptors()))
    early = held[: max(1, len(held) // 5)]
    return {
        "operations": CacheMachine.operations,
        "s": time.monotonic() - began,
        "resident_early": max(one[0] for one in early),
        "resident_late": held[-1][0],
        "descriptors_early": max(one[1] for one in early),
        "descriptors_late": held[-1][1],
    }


def _shared(chosen: argparse.Namespace, enough: Enough) -> int:
    """Share the work out to processes, and say what they said."""
    share = -(-chosen.operations // chosen.processes)
    began = time.monotonic()
    command = ["tests.hicache.stateful", "--operations", str(share), "--processes", "1"]
    command += ["--deployment", chosen.deployment]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as files:
        said = [files.enter_context(open(os.path.join(folder, str(n)), "w+")) for n in range(chosen.processes)]
        children = [
            start([*command, "--seed", str(chosen.seed + 1_000_000 * number)], stdout=file, folder=folder)
            for number, file in enumerate(said)
        ]
        why = wait_for(children, lambda: any(child.poll() is None for child in children), enough, LAST_S)
        found = _account([(child.returncode, file) for child, file in zip(children, said, strict=True)])
    found = {
        "command": f"python -m tests.hicache.stateful --operations {chosen.operations} --processes {chosen.processes}"
        f" --deployment {chosen.deployment} --seed {chosen.seed}",
        "incomplete": f"{why}: {found['operations']} of {chosen.operations} operations" if why else "",
        "wall_s": round(time.monotonic() - began, 1),
        **found,
    }
    text = json.dumps(found, indent=2)
    print(text)
    if chosen.json:
        Path(chosen.json).write_text(text + "\n")
    return 1 if found["failed"] else enough.exit_code


def _account(ended: list[tuple[int, TextIO]]) -> dict[str, Any]:
    said: list[dict[str, Any]] = []
    for code, file in ended:
        file.seek(0)
        if code:
            print(file.read())  # the operations that failed
        else:
            said.append(json.loads(file.read()))
    return {
        "operations": sum(one["operations"] for one in said),
        "failed": len(ended) - len(said),
        "resident_grew_nbytes_at_most": max((one["resident_late"] - one["resident_early"] for one in said), default=0),
        "descriptors_grew_at_most": max(
            (one["descriptors_late"] - one["descriptors_early"] for one in said), default=0
        ),
        "processes": said,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hicache.stateful")
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--deployment", choices=[INPROC, DAEMON, MESSAGES], default=INPROC)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--time-limit", type=float, default=0.0, metavar="S", help="end early, after S seconds")
    parser.add_argument("--json", default="", help="also write the account there, of several processes")
    chosen = parser.parse_args()
    enough = Enough(chosen.time_limit)
    if chosen.processes > 1:
        return _shared(chosen, enough)
    print(json.dumps(_work(chosen.operations, chosen.deployment, chosen.seed, enough)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
