"""What two sessions say to each other: numbers of the messages and the layout of their bodies.

Owns encoding and decoding, with every length checked. It does no I/O and keeps no state.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from devipc.capabilities import Capability, Verdict
from devipc.completion import Candidate, Decision, Phase
from devipc.errors import CapabilityError, WireError
from devipc.types import Strategy
from devipc.wire import (
    MAX_MESSAGE_NBYTES,
    MemoryHandle,
    Reader,
    Writer,
    decode_memory_handle,
    encode_memory_handle,
)

__all__ = [
    "Kind",
    "ShareMeta",
    "agreed_strategy",
    "decode_decision",
    "decode_names",
    "decode_offers",
    "decode_opened",
    "decode_token",
    "decode_token_name",
    "decode_tokens_names",
    "encode_decision",
    "encode_names",
    "encode_offers",
    "encode_opened",
    "encode_token",
    "encode_token_name",
    "encode_tokens_names",
]

MAX_NAMES = 4096
MAX_NAME_NBYTES = 255
MAX_DIMENSIONS = 32
MAX_TEXT_NBYTES = 2048
STRATEGY_FACT = "strategy"
"""By which an end says that it insists on a strategy."""


class Kind(enum.IntEnum):
    """Numbers of the session's messages; those below 64 belong to the link."""

    NAMES = 64
    OPEN = 65
    RETURN = 66
    REVOKE = 67
    GENERATION = 68
    FENCE_OPEN = 69
    FENCE_TAKEN = 70
    FENCE_RETURN = 71
    TRIAL = 72
    DECIDE = 73
    DECIDED = 74


@dataclass(frozen=True, slots=True)
class ShareMeta:
    """How the shared bytes are to be looked at.

    Parameters
    ----------
    dtype : str
        Element type in devipc's spelling; ``uint8`` for plain bytes.
    shape : tuple of int
        Elements per dimension.
    strides : tuple of int
        Distance in elements per dimension.
    offset : int
        Bytes from the first shared byte to element zero.
    writable : bool
        What the exporter intends. No vendor enforces it for device memory.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0
    writable: bool = True


def encode_token(token: int) -> bytes:
    """Return the body of a message that ends one lease."""
    return Writer().u64(token).done()


def decode_token(body: bytes) -> int:
    """Decode :func:`encode_token`."""
    reader = Reader(body)
    token = reader.u64()
    reader.end()
    return token


def encode_token_name(token: int, name: str) -> bytes:
    """Return the body of a question for ``name`` that will be lent under ``token``."""
    return Writer().u64(token).text(name, limit=MAX_NAME_NBYTES).done()


def decode_token_name(body: bytes) -> tuple[int, str]:
    """Decode :func:`encode_token_name`."""
    reader = Reader(body)
    token, name = reader.u64(), reader.text(limit=MAX_NAME_NBYTES)
    reader.end()
    return token, name


def encode_names(shares: Sequence[str], fences: Sequence[str]) -> bytes:
    """Return the body of an answer to NAMES."""
    writer = Writer()
    for names in (shares, fences):
        writer.u32(len(names))
        for name in names:
            writer.text(name, limit=MAX_NAME_NBYTES)
    return writer.done()


def decode_names(body: bytes) -> tuple[list[str], list[str]]:
    """Decode :func:`encode_names`."""
    reader = Reader(body)
    shares, fences = (
        [reader.text(limit=MAX_NAME_NBYTES) for _ in range(reader.count(limit=MAX_NAMES))] for _ in range(2)
    )
    reader.end()
    return shares, fences


def encode_offers(offers: Mapping[Strategy, Capability]) -> dict[str, str]:
    """Return offers as facts for the greeting."""
    return {
        f"offer.{strategy.value}": "|".join((answer.verdict.value, answer.reason, answer.remedy))[:MAX_TEXT_NBYTES]
        for strategy, answer in offers.items()
    }


def decode_offers(facts: Mapping[str, str]) -> dict[Strategy, Capability]:
    """Decode :func:`encode_offers`; what cannot be understood counts as not offered."""
    offers = {}
    for strategy in Strategy:
        verdict, reason, remedy = ([*facts.get(f"offer.{strategy.value}", "").split("|", 2), "", ""])[:3]
        try:
            offers[strategy] = Capability(Verdict(verdict), "the peer says so", reason, remedy)
        except ValueError:
            continue
    return offers


def agreed_strategy(own: Strategy | None, facts: Mapping[str, str]) -> Strategy | None:
    """Return the strategy that this end or the peer insists on, or None when neither does.

    Raises
    ------
    CapabilityError
        When both insist, and not on the same one.
    """
    wanted = facts.get(STRATEGY_FACT, "")
    if not wanted or wanted == own:
        return own
    if own is not None or wanted not in tuple(Strategy):
        raise CapabilityError(
            f"the peer insists on completion strategy {wanted[:32]!r}, this end on {own or 'one that it knows'}",
            code="completion",
            remedy="name the same strategy at both ends, or at one of them only",
        )
    return Strategy(wanted)


def encode_decision(decision: Decision) -> bytes:
    """Return the body of a message that carries a decision; long texts are cut."""
    writer = Writer().text(decision.strategy.value).u8(int(decision.degraded)).u32(len(decision.candidates))
    for candidate in decision.candidates:
        capability = candidate.capability
        writer.text(candidate.strategy.value).text(candidate.phase.value).text(capability.verdict.value)
        for text in (capability.evidence, capability.reason, capability.remedy):
            writer.blob(text.encode()[:MAX_TEXT_NBYTES], limit=MAX_TEXT_NBYTES)
    return writer.done()


def decode_decision(body: bytes) -> Decision:
    """Decode :func:`encode_decision`."""
    reader = Reader(body)
    try:
        strategy, degraded = Strategy(reader.text()), bool(reader.u8())
        candidates = []
        for _ in range(reader.count(limit=len(Strategy))):
            name, phase, verdict = Strategy(reader.text()), Phase(reader.text()), Verdict(reader.text())
            evidence, reason, remedy = (reader.blob(limit=MAX_TEXT_NBYTES).decode(errors="replace") for _ in range(3))
            candidates.append(Candidate(name, Capability(verdict, evidence, reason, remedy), phase))
    except ValueError as error:
        raise WireError(f"unknown word in a decision ({error})", code="decision") from error
    reader.end()
    return Decision(strategy, degraded, tuple(candidates))


def encode_tokens_names(wanted: Sequence[tuple[int, str]]) -> bytes:
    """Return the body of OPEN: names, each with the token under which it will be lent."""
    writer = Writer().u32(len(wanted))
    for token, name in wanted:
        writer.u64(token).text(name, limit=MAX_NAME_NBYTES)
    return writer.done()


def decode_tokens_names(body: bytes) -> list[tuple[int, str]]:
    """Decode :func:`encode_tokens_names`; at least one."""
    reader = Reader(body)
    wanted = [(reader.u64(), reader.text(limit=MAX_NAME_NBYTES)) for _ in range(reader.count(limit=MAX_NAMES))]
    reader.end()
    if not wanted:
        raise WireError("a question for no name", code="count")
    return wanted


def encode_opened(shares: Sequence[tuple[MemoryHandle, ShareMeta]]) -> bytes:
    """Return the body of an answer to OPEN; the handles' descriptors travel beside it, in order."""
    writer = Writer().u32(len(shares))
    for handle, meta in shares:
        one = Writer().text(meta.dtype, limit=32).u8(int(meta.writable)).u64(meta.offset).u32(len(meta.shape))
        for extent, stride in zip(meta.shape, meta.strides, strict=True):
            one.u64(extent).i64(stride)
        writer.u32(len(handle.extent.fds)).blob(one.done() + encode_memory_handle(handle), limit=MAX_MESSAGE_NBYTES)
    return writer.done()


def decode_opened(body: bytes, fds: Sequence[int]) -> list[tuple[MemoryHandle, ShareMeta]]:
    """Decode :func:`encode_opened`; the descriptors stay the caller's."""
    reader = Reader(body)
    opened, at = [], 0
    for _ in range(reader.count(limit=MAX_NAMES)):
        count = reader.u32()
        opened.append(_decode_share(reader.blob(limit=MAX_MESSAGE_NBYTES), fds[at : at + count]))
        at += count
    reader.end()
    if at != len(fds):
        raise WireError(f"{len(fds)} descriptors came, {at} were announced", code="count")
    return opened


def _decode_share(body: bytes, fds: Sequence[int]) -> tuple[MemoryHandle, ShareMeta]:
    reader = Reader(body)
    dtype, writable, offset = reader.text(limit=32), bool(reader.u8()), reader.u64()
    dimensions = [(reader.u64(), reader.i64()) for _ in range(reader.count(limit=MAX_DIMENSIONS))]
    meta = ShareMeta(
        dtype, tuple(extent for extent, _ in dimensions), tuple(stride for _, stride in dimensions), offset, writable
    )
    handle = decode_memory_handle(reader, fds)
    reader.end()
    return handle, meta
