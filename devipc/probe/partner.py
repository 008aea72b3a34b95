"""How the two processes of a check talk, and the ways in which a check ends other than well.

Owns the bytes between exporter and importer. It knows no device and no check.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from devipc.channel.datagram import close_all
from devipc.channel.seqpacket import Channel, Message
from devipc.errors import CapabilityError, CompletionTimeout, DevIPCError, PeerGone, ResourceExhausted
from devipc.wire import MAX_MESSAGE_NBYTES, Reader, Writer

__all__ = [
    "CALL",
    "STARTED",
    "START_LIMIT_S",
    "TRIAL",
    "CheckFailed",
    "NotTried",
    "Partner",
    "decode_call",
    "encode_call",
    "encode_failure",
]

CALL = 1
"""Kind of a message that asks the importer for one thing by name, and of its answer."""
STARTED = 3
"""Kind of the first message of a process: it is there, and has loaded no backend yet."""
START_LIMIT_S = 60.0
"""How long a process may take for that; a busy machine needs seconds, and none of them is a backend's."""
TRIAL = 2
"""Kind of a message of a fence's trial, whose bytes are :mod:`devipc.completion.trial`'s."""


class CheckFailed(Exception):
    """Something was seen that must not be; the text is the reason."""

    def __init__(self, reason: str, *, remedy: str = "", evidence: str = "") -> None:
        super().__init__(reason)
        self.remedy = remedy
        self.evidence = evidence


class NotTried(Exception):
    """The check could not be done for want of something else; the text names it."""

    def __init__(self, reason: str, *, remedy: str = "") -> None:
        super().__init__(reason)
        self.remedy = remedy


def encode_call(fields: Mapping[str, Any], data: bytes = b"") -> bytes:
    """Return the bytes of a question or an answer: named values, and content beside them."""
    text = json.dumps(fields)
    return Writer().text(text, limit=MAX_MESSAGE_NBYTES).blob(data, limit=MAX_MESSAGE_NBYTES).done()


def decode_call(body: bytes) -> tuple[dict[str, Any], bytes]:
    """Take apart what :func:`encode_call` made."""
    reader = Reader(body)
    fields: dict[str, Any] = json.loads(reader.text(limit=MAX_MESSAGE_NBYTES))
    return fields, reader.blob(limit=MAX_MESSAGE_NBYTES)


def encode_failure(error: Exception) -> bytes:
    """Return the importer's answer when a step raised ``error``."""
    refused = isinstance(error, CapabilityError | ResourceExhausted)
    told = error if isinstance(error, DevIPCError | NotTried) else None
    text = error.message if isinstance(error, DevIPCError) else str(error)
    return encode_call(
        {
            "refused": refused,
            "not_tried": isinstance(error, NotTried),
            "error": text if refused or isinstance(error, NotTried) else f"{type(error).__name__}: {text}",
            "remedy": told.remedy if told is not None else "",
            "status": str(error.status or "") if isinstance(error, DevIPCError) else "",
        }
    )


class Partner:
    """The importer, as the exporter's process sees it. One question at a time.

    Parameters
    ----------
    channel : Channel
        The connection; owned.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.timeout_s = 10.0
        """Longest wait for one answer, in seconds."""

    def wait_started(self) -> None:
        """Block until the importer's process takes questions; one that never will is noticed by the first of them."""
        with contextlib.suppress(PeerGone, CompletionTimeout):
            close_all(self._channel.receive(START_LIMIT_S / 2).fds)

    def ask(self, what: str, data: bytes = b"", *, fds: Sequence[int] = (), **fields: Any) -> dict[str, Any]:
        """Have one step done and return what came of it; content that comes back is under ``"data"``.

        Raises
        ------
        CapabilityError
            When the importer was told that its platform cannot.
        CheckFailed
            When the step failed in any other way.
        NotTried
            When the importer lacks what the step needs.
        PeerGone, CompletionTimeout
            When the importer does not answer any more.
        """
        answer = self._exchange(CALL, encode_call({"do": what, **fields}, data), fds, self.timeout_s)
        close_all(answer.fds)
        told, content = decode_call(answer.body)
        if "error" not in told:
            return {**told, "data": content}
        reason = f"in the importer: {told['error']}"
        if told["not_tried"]:
            raise NotTried(reason, remedy=told["remedy"])
        if told["refused"]:
            status = f" ({told['status']})" if told["status"] else ""
            raise CapabilityError(reason + status, remedy=told["remedy"])
        raise CheckFailed(reason, remedy=told["remedy"], evidence=told["status"])

    def call(self, body: bytes, fds: Sequence[int], timeout_s: float) -> tuple[bytes, Sequence[int]]:
        """Carry one step of a fence's trial; descriptors of the answer become the caller's."""
        answer = self._exchange(TRIAL, body, fds, timeout_s)
        return answer.body, answer.fds

    def _exchange(self, kind: int, body: bytes, fds: Sequence[int], timeout_s: float) -> Message:
        self._channel.send(kind, body, fds=fds, timeout_s=timeout_s)
        return self._channel.receive(timeout_s)
