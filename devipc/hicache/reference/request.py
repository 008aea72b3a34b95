"""A request as control sees it, and what is done with its pages.

Owns the record of one request from its submission to its end.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from devipc.hicache.reference.handles import RequestRuntimeHandle
from devipc.hicache.reference.prefixtree import Node

__all__ = ["BackupPolicy", "Finished", "Request"]


class BackupPolicy(enum.StrEnum):
    """When pages go to the cache below."""

    NONE = "none"
    """Never."""
    WRITE_THROUGH = "write_through"
    """As soon as they are computed."""
    SELECTIVE = "selective"
    """When a second request has used them."""
    WRITE_BACK = "write_back"
    """When they have to leave the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """How a request ended.

    Parameters
    ----------
    tokens : tuple of int
        The answer.
    prompt_tokens, from_device, restored, computed : int
        Where the prompt came from; computed counts only the prompt.
    first_token_s : float
        From the submission to the first token.
    restarts : int
        How often it began anew, because a restore failed or the runtime was lost.
    """

    name: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    from_device: int
    restored: int
    computed: int
    first_token_s: float
    restarts: int


@dataclass(slots=True, eq=False)
class Request:
    """One request, as control sees it: identifiers, and what was planned for it so far."""

    name: str
    prompt: tuple[int, ...]
    keys: list[bytes]
    max_tokens: int
    submitted: float
    handle: RequestRuntimeHandle | None = None
    node: Node | None = None
    from_device: int = 0  # pages
    restored: int = 0  # pages
    planned: int = 0  # prompt tokens that a plan computes, or that were there
    decodes: int = 0  # planned
    kept: bool = False
    answer: list[int] = field(default_factory=list)
    first_token_s: float = 0.0
    told: int = 0  # tokens of the answer
    restarts: int = 0
    may_restore: bool = True
    asked: bool = False
    below: bytes | None = None  # a byte a page: what the cache below has

    @property
    def admissible(self) -> bool:
        """True when what the cache below has is known, or does not matter."""
        return self.below is not None or not self.may_restore

    def begin_again(self) -> None:
        """Forget all that was planned: it begins anew."""
        self.handle, self.node = None, None
        self.from_device = self.restored = self.planned = self.decodes = 0
        self.kept = False
        self.answer = []
        self.asked, self.below = False, None
        self.restarts += 1
