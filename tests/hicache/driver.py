"""Runs rules of the machine in random order, without Hypothesis, which keeps nothing of that.

There are no crashes among them, so that the client is one.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.hicache.machine import KEYS, TIER_PAGES, CacheMachine


class Driver:
    """See the module. The same ``start`` brings the same operations."""

    def __init__(self, machine: CacheMachine, start: int = 1) -> None:
        self.machine = machine
        self._random = random.Random(start)

    def _keys(self) -> list[int]:
        return self._random.sample(range(KEYS), self._random.randint(1, 5))

    def _flag(self) -> bool:
        return self._random.random() < 0.5

    def run(self, operations: int) -> None:
        until = CacheMachine.operations + operations
        while CacheMachine.operations < until:
            self._random.choice(self._rules())()

    def _rules(self) -> list[Callable[[], object]]:
        """Return those that may be next."""
        it, model = self.machine, self.machine.model
        rules: list[Callable[[], object]] = [
            lambda: it.match(self._keys()),
            lambda: it.restore(self._keys(), self._flag(), self._flag()),
        ]
        if len(model.pinned) < TIER_PAGES:
            rules.append(lambda: it.backup(self._keys()))
        if len(it.leases) < 3:
            rules.append(lambda: it.lookup(self._keys()))
        if it.leases:
            rules.append(lambda: it.release(self._random.randint(0, 2)))
        else:
            rules += [lambda: it.invalidate(self._keys()), lambda: it.flush(self._random.randint(0, 5))]
        return rules
