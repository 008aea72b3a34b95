"""How much a runtime backs up while it decodes.

Owns one number, the bytes that may be started in a batch; it is halved while tokens come too late, and grows slowly
while they do not. It knows no page.
"""

from __future__ import annotations

from collections import deque

__all__ = ["BackupThrottle"]

_WINDOW = 64  # batches
_GROWTH = 1.1


class BackupThrottle:
    """See the module. One thread.

    Parameters
    ----------
    target_s : float or None
        Longest time between two tokens that is fine; None: there is no limit, and nothing is throttled.
    most_nbytes, least_nbytes : int
        Bounds of what may be started in a batch.
    """

    def __init__(self, target_s: float | None, *, most_nbytes: int, least_nbytes: int) -> None:
        self._target_s = target_s
        self._most, self._least = float(most_nbytes), float(least_nbytes)
        self._recent: deque[float] = deque(maxlen=_WINDOW)
        self.nbytes = most_nbytes
        self.halvings = 0

    def decoded(self, seconds: float) -> None:
        """Note how long a batch with decodes took."""
        if self._target_s is None:
            return
        self._recent.append(seconds)
        ordered = sorted(self._recent)
        late = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))] > self._target_s
        if late:
            self.nbytes = int(max(self._least, self.nbytes / 2))
            self.halvings += 1
            self._recent.clear()  # what comes now was measured under the new limit
        else:
            self.nbytes = int(min(self._most, self.nbytes * _GROWTH))
