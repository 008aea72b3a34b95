"""The end of a round that takes too long."""

from __future__ import annotations

import faulthandler
import threading
from collections.abc import Callable


class Patience:
    """Ends all processes of a rig whose round takes too long: whoever waits for one of them then raises."""

    def __init__(self, limit_s: float, kill_all: Callable[[], None]) -> None:
        self.limit_s, self.kill_all = limit_s, kill_all
        self.hung = False
        self._next = threading.Event()
        self._over = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def again(self) -> None:
        self._next.set()

    def end(self) -> None:
        self._over = True
        self._next.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over:
            if not self._next.wait(self.limit_s):
                self.hung = True
                faulthandler.dump_traceback(all_threads=True)
                self.kill_all()
                return
            self._next.clear()
