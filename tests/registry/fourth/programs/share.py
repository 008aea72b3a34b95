"""Two processes share Acorn memory and hand it over, by each strategy that the device has; the fourth is refused."""

from __future__ import annotations

import ctypes
import subprocess
import sys

from devipc import Exporter, Importer
from devipc.errors import CapabilityError

NBYTES = 1 << 20


def produce(session: Exporter, strategy: str) -> None:
    transfer = session.device.transfer
    assert transfer is not None
    stream, source, block = transfer.create_stream(), session.allocate(NBYTES), session.allocate(NBYTES)
    ctypes.memset(source.ptr, 7, NBYTES)
    session.share("block", block)
    other = subprocess.Popen([sys.executable, __file__, session.path, strategy])
    full = session.wait_peer().create_fence("full")
    transfer.copy(stream, block.ptr, source.ptr, NBYTES)
    full.signal(stream, 1)
    assert other.wait(30) == 0


def consume(session: Importer) -> None:
    transfer = session.device.transfer
    assert transfer is not None
    stream, mine = transfer.create_stream(), session.allocate(NBYTES)
    full = session.open_fence("full", wait_s=30)
    with session.open("block") as block:
        full.wait(stream, 1, timeout_s=10)
        transfer.copy(stream, mine.ptr, block.ptr, NBYTES)
        transfer.synchronize_stream(stream)
    assert ctypes.string_at(mine.ptr, NBYTES) == b"\x07" * NBYTES
    print("shared by", full.strategy)


if len(sys.argv) > 1:
    with Importer(sys.argv[1], backend="acorn", strategy=sys.argv[2]) as importer:
        consume(importer)
    sys.exit()

for name in ("stream_memop", "host_flag", "polling"):
    with Exporter(backend="acorn", strategy=name) as exporter:
        produce(exporter, name)
with Exporter(backend="acorn") as exporter:
    try:
        exporter.create_fence("never", strategy="event")
    except CapabilityError as error:
        print("event:", error.message)
