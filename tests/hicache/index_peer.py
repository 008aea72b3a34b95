"""A process that searches an index while its writer works at full speed, and counts what must not be.

Run with the descriptors of the index and of the progress memory. Shares the relation of key and value with the test.
"""

from __future__ import annotations

import hashlib
import sys
import time

import numpy as np
import numpy.typing as npt

from devipc.hicache.tier.index import IndexReader
from devipc.memfd import SharedMap

KEY_COUNT = 2048
STOP_AT = KEY_COUNT  # word behind the keys' own in the progress memory


def all_keys() -> npt.NDArray[np.uint8]:
    digests = (hashlib.blake2b(i.to_bytes(8, "little"), digest_size=16).digest() for i in range(KEY_COUNT))
    return np.frombuffer(b"".join(digests), np.uint8).reshape(KEY_COUNT, 16)


def main(index_fd: int, progress_fd: int, epoch: int) -> None:
    keys = all_keys()
    belongs = np.arange(KEY_COUNT, dtype=np.uint64)  # lower half of each value; the upper counts publications
    progress = SharedMap(progress_fd, 8 * (KEY_COUNT + 1), writable=False)
    words = np.frombuffer(progress.view, np.uint64)
    hits = torn = evicted = searches = 0
    rng = np.random.default_rng(1)
    with IndexReader(index_fd, epoch=epoch) as reader:
        print("ready", flush=True)
        deadline = time.monotonic() + 30
        while not words[STOP_AT] and time.monotonic() < deadline:
            chosen = rng.permutation(KEY_COUNT)[:256]
            gone = words[chosen]  # publications whose eviction had ended before the search began
            found = reader.find(keys[chosen])
            searches += 1
            hits += int(found.hit.sum())
            torn += int((found.hit & (found.value & np.uint64(0xFFFFFFFF) != belongs[chosen])).sum())
            evicted += int((found.hit & (found.value >> np.uint64(32) <= gone)).sum())
    print(searches, hits, torn, evicted, flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
