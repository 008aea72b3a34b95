"""Capabilities: what a device can do, as a result with evidence rather than a flag.

Owns the four possible answers and the record around them. A driver's attribute is only ever a claim; the answer
comes from trying it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["Capability", "Verdict", "is_offered"]


class Verdict(enum.StrEnum):
    """``yes``: seen working. ``no``: refused or absent. ``broken``: offered, but wrong. ``untested``: nobody tried."""

    YES = "yes"
    NO = "no"
    BROKEN = "broken"
    UNTESTED = "untested"


@dataclass(frozen=True, slots=True)
class Capability:
    """One answer with its evidence.

    Parameters
    ----------
    verdict : Verdict
        The answer.
    evidence : str
        What was tried or read and what came back.
    reason : str
        Why it is not ``yes``; empty for ``yes``.
    remedy : str
        One line that would change the answer; empty when nothing would.
    """

    verdict: Verdict
    evidence: str = ""
    reason: str = ""
    remedy: str = ""

    def __bool__(self) -> bool:
        """True only for ``yes``."""
        return self.verdict is Verdict.YES

    @classmethod
    def yes(cls, evidence: str) -> Capability:
        """Return a ``yes`` backed by ``evidence``."""
        return cls(Verdict.YES, evidence)

    @classmethod
    def no(cls, reason: str, *, remedy: str = "", evidence: str = "") -> Capability:
        """Return a ``no`` for ``reason``."""
        return cls(Verdict.NO, evidence, reason, remedy)

    @classmethod
    def broken(cls, reason: str, *, remedy: str = "", evidence: str = "") -> Capability:
        """Return a ``broken``: the platform offers it and it does not do what it says."""
        return cls(Verdict.BROKEN, evidence, reason, remedy)

    @classmethod
    def untested(cls, reason: str, *, remedy: str = "") -> Capability:
        """Return an ``untested``: offered by the driver, proven by nobody yet."""
        return cls(Verdict.UNTESTED, "", reason, remedy)

    def to_json(self) -> dict[str, str]:
        """Return the four fields as JSON-ready values."""
        return {
            "verdict": self.verdict.value,
            "evidence": self.evidence,
            "reason": self.reason,
            "remedy": self.remedy,
        }


def is_offered(capability: Capability) -> bool:
    """Return True when there is something to be tried: neither refused nor known to be broken."""
    return capability.verdict in (Verdict.YES, Verdict.UNTESTED)
