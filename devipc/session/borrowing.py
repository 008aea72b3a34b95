"""Memory that one peer lent to this process: the tokens it was lent under, and when each is given back.

Owns the rule that a token is due once nothing is mapped under it, and never before. It knows mappings and messages; how
a message travels, and what a connection is, it is told.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from devipc.channel import Message
from devipc.deadline import deadline_after, remaining
from devipc.errors import ClosedError, WireError
from devipc.mappings import Mapping
from devipc.session.messages import Kind, decode_opened, encode_token, encode_tokens_names
from devipc.session.remote import RemoteMemory, check_handle, check_meta
from devipc.undoing import undo

if TYPE_CHECKING:
    from devipc.session.endpoint import Endpoint

__all__ = ["Borrowed"]


class Borrowed:
    """What this process has open of one peer's memory. Any thread.

    Parameters
    ----------
    endpoint : Endpoint
        This side.
    instance : bytes
        The peer's.
    ask : callable
        ``(kind, body, timeout_s)``: a question to the peer; returns its answer, whose descriptors are the caller's.
    tell : callable
        ``(kind, body)``: False when the peer lives and did not take it.
    on_last : callable
        Called when, after :meth:`end`, the last token was given back. On a thread of its own.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        instance: bytes,
        *,
        ask: Callable[[Kind, bytes, float], Message],
        tell: Callable[[Kind, bytes], bool],
        on_last: Callable[[], None],
    ) -> None:
        self._endpoint = endpoint
        self._instance = instance
        self._ask = ask
        self._tell = tell
        self._on_last = on_last
        self._lock = threading.Lock()
        self._tokens = itertools.count(1)
        self._leases: set[int] = set()  # tokens that the peer may take for lent: asked for and not given back yet
        self._ending = False
        self.mappings = endpoint.new_mapping_cache(on_unmapped=self._unmapped)

    def open_all(self, names: Sequence[str], *, timeout_s: float) -> list[RemoteMemory]:
        """Open all of ``names`` or none; see :meth:`devipc.session.Peer.open_all`."""
        deadline = deadline_after(timeout_s)
        opened: list[RemoteMemory] = []
        try:
            while len(opened) < len(names):  # an answer holds as many as fit into it
                opened += self._open_some(names[len(opened) :], remaining(deadline))
        except BaseException:
            for memory in opened:
                undo(memory.close)
            raise
        return opened

    def _open_some(self, names: Sequence[str], timeout_s: float) -> list[RemoteMemory]:
        deadline = deadline_after(timeout_s)
        tokens = self._new_tokens(len(names))
        found: list[tuple[Mapping, bool]] = []
        opened: list[RemoteMemory] = []
        try:
            answer = self._ask(Kind.OPEN, encode_tokens_names(list(zip(tokens, names, strict=True))), timeout_s)
            try:
                shares = decode_opened(answer.body, answer.fds)
                if not 0 < len(shares) <= len(names):
                    raise WireError(f"{len(shares)} shares came for {len(names)} names", code="count")
                for handle, meta in shares:
                    check_handle(handle, self._instance, self._endpoint.backend_name, self._endpoint.device)
                    check_meta(meta, handle.extent.nbytes)
                found = self.mappings.acquire_all(
                    [handle for handle, _ in shares], timeout_s=remaining(deadline), leases=tokens[: len(shares)]
                )
                make = partial(RemoteMemory, release=self.mappings.release)
                mapped, metas = [mapping for mapping, _ in found], [meta for _, meta in shares]
                # By map: no interrupt comes between that one is complete, and owns its use, and that it is in the list.
                opened.extend(map(make, names, itertools.repeat(self._endpoint.device), mapped, metas))
            finally:
                answer.close_fds()
            # The driver's mapping holds one lease, whoever opened it first; a hit needs no second one.
            kept = {token for token, (_, fresh) in zip(tokens, found, strict=False) if fresh}
            for token in tokens:
                if token not in kept:
                    self.give_back(token)
        except BaseException:
            for memory in opened:
                undo(memory.close)
            for mapping, _ in found[len(opened) :]:
                undo(self.mappings.release, mapping)
            for token in tokens:
                if not self.mappings.holds(token):
                    self.give_back(token)
            raise
        return opened

    def _new_tokens(self, count: int) -> list[int]:
        with self._lock:
            if self._ending:
                raise ClosedError("this side has closed the connection to the peer", remedy="connect again")
            tokens = list(itertools.islice(self._tokens, count))
            self._leases.update(tokens)
            return tokens

    def _unmapped(self, mapping: Mapping) -> None:
        if isinstance(mapping.lease, int):
            self.give_back(mapping.lease)

    def give_back(self, token: int) -> None:
        """Tell the peer that nothing is mapped under ``token`` any more; the last one after the end is the last."""
        if not self._tell(Kind.RETURN, encode_token(token)):
            # A peer that is stopped takes nothing. It would keep its memory for ever if it were never told.
            threading.Thread(target=self.give_back, args=(token,), name="devipc-return", daemon=True).start()
            return
        with self._lock:
            last = token in self._leases and self._leases == {token} and self._ending
            self._leases.discard(token)
        if last:  # perhaps on a garbage collector's thread, which must not wait for the link's threads
            threading.Thread(target=self._on_last, name="devipc-goodbye", daemon=True).start()

    @property
    def ending(self) -> bool:
        """True after :meth:`end`."""
        return self._ending

    def end(self) -> bool:
        """Open nothing more. True for the first call."""
        with self._lock:
            first, self._ending = not self._ending, True
        return first

    @property
    def unused(self) -> bool:
        """True when the peer has nothing lent to this process."""
        with self._lock:
            return not self._leases
