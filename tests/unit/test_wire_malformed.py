"""100,000 malformed handles and frames: each is refused by name, or it was well formed after all."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections import Counter
from collections.abc import Callable

import pytest

from devipc.errors import HandleError
from devipc.types import Chunk, ExportedExtent, HandleKind
from devipc.wire import (
    HEADER_NBYTES,
    Header,
    MemoryHandle,
    Reader,
    decode_header,
    decode_memory_handle,
    encode_header,
    encode_memory_handle,
)

INPUTS = 100_000


def valid(random_: random.Random) -> tuple[bytes, int]:
    """Return an encoded handle and how many descriptors it needs."""
    parts = tuple(
        Chunk(2**21, random_.randrange(2**20), random_.randint(1, 2**20), random_.randbytes(random_.choice((0, 8, 64))),
              random_.random() < 0.5)
        for _ in range(random_.choice((1, 1, 2, 5)))
    )  # fmt: skip
    fds = tuple(range(sum(part.has_fd for part in parts)))
    extent = ExportedExtent(random_.choice(list(HandleKind)), parts, fds)
    return encode_memory_handle(
        MemoryHandle("host", "host-0123", random_.randbytes(16), 1, random_.randbytes(16), extent)
    ), len(fds)


def flip(data: bytes, random_: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(random_.randint(1, 4)):
        changed[random_.randrange(len(data))] = random_.randrange(256)
    return bytes(changed)


def lie(data: bytes, random_: random.Random) -> bytes:
    """Put an extreme number somewhere: a length, a count, an offset or a size, wherever one happens to be."""
    layout, extremes = random_.choice(
        [
            ("<I", (0, 1, 512, 513, 65536, 2**31 - 1, 2**31, 2**32 - 1)),
            ("<Q", (0, 1, 2**56, 2**56 + 1, 2**63, 2**64 - 1)),
        ]
    )
    number = struct.pack(layout, random_.choice(extremes))
    at = random_.randrange(len(data) - len(number))
    return data[:at] + number + data[at + len(number) :]


def cut(data: bytes, random_: random.Random) -> bytes:
    return data[: random_.randrange(len(data))]


def pad(data: bytes, random_: random.Random) -> bytes:
    at = random_.choice((0, len(data), random_.randrange(len(data))))
    return data[:at] + random_.randbytes(random_.randint(1, 32)) + data[at:]


def noise(data: bytes, random_: random.Random) -> bytes:
    return random_.randbytes(random_.randrange(2 * len(data)))


def splice(data: bytes, random_: random.Random) -> bytes:
    at = random_.randrange(len(data))
    return data[:at] + valid(random_)[0][at:]


MUTATIONS: tuple[Callable[[bytes, random.Random], bytes], ...] = (flip, lie, cut, pad, noise, splice)


def decode(data: bytes, fds: int) -> MemoryHandle:
    reader = Reader(data)
    decoded = decode_memory_handle(reader, range(fds))
    reader.end()
    return decoded


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_malformed_handles_are_refused_or_mean_exactly_what_they_say(
    mutation: Callable[[bytes, random.Random], bytes],
) -> None:
    random_ = random.Random(mutation.__name__)
    answers: Counter[str] = Counter()
    for _ in range(INPUTS // len(MUTATIONS)):
        data, needed = valid(random_)
        data = mutation(data, random_)
        fds = random_.choice((needed, needed, needed, needed + 1, 0))
        try:
            decoded = decode(data, fds)
        except HandleError as error:
            answers[error.code] += 1
        else:
            answers["decoded"] += 1
            assert encode_memory_handle(decoded) == data, "two spellings of one handle"
    assert sum(answers.values()) == INPUTS // len(MUTATIONS)
    assert answers["truncated"] + answers["length"] > 0
    if mutation in (cut, pad, noise):
        assert answers["decoded"] <= 2


def test_malformed_frames_are_refused_or_mean_exactly_what_they_say() -> None:
    random_ = random.Random("frames")
    answers: Counter[str] = Counter()
    for _ in range(INPUTS):
        body = random_.randbytes(random_.randrange(16))
        frame = encode_header(Header(random_.randrange(2**16), random_.randrange(2**64), len(body), 1)) + body
        frame = random_.choice((flip, cut, pad, noise))(frame, random_)
        try:
            header = decode_header(frame)
        except HandleError as error:
            answers[error.code] += 1
        else:
            answers["decoded"] += 1
            assert encode_header(header) == frame[:HEADER_NBYTES]
    assert {"short_frame", "magic", "version", "flags", "length", "decoded"} == set(answers)


def test_a_lying_count_or_length_costs_no_memory() -> None:
    head = encode_memory_handle(
        MemoryHandle("h", "u", bytes(16), 1, bytes(16), ExportedExtent(HandleKind.VMM_FD, (Chunk(1, 0, 1),)))
    )[: -(4 + 3 * 8 + 1 + 4)]
    lies = [
        head + struct.pack("<I", 65536),
        head + struct.pack("<I", 2**32 - 1),
        head + struct.pack("<IQQQBI", 1, 1, 0, 1, 0, 2**32 - 1),
        struct.pack("<I", 2**32 - 1),
        struct.pack("<I", 64) + b"short",
    ]
    tracemalloc.start()
    try:
        for data in lies * 100:
            with pytest.raises(HandleError):
                decode(data, 0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 256 * 1024


def test_descriptors_of_a_refused_handle_stay_the_callers() -> None:
    """Nothing in the decoder may close or keep them: who received them closes them."""
    data, _ = valid(random.Random(1))
    fds = [10**6, 10**6 + 1, 10**6 + 2, 10**6 + 3, 10**6 + 4, 10**6 + 5]
    with pytest.raises(HandleError):
        decode_memory_handle(Reader(data), fds)
    assert fds == [10**6 + n for n in range(6)]
