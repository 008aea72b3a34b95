"""What an engine process holds, beside a process that does nothing but register and open the same memory.

Owns that control process, which is ``python -m devipc.bench.footprint OPTIONS``, and the reading of both. Device memory
is what the device reports as taken meanwhile, so that nothing else may run on it.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from devipc.bench.pools import GEOMETRIES, Pool
from devipc.bench.service import daemon
from devipc.calltrace import observe
from devipc.hicache.api import connect
from devipc.hicache.engine import EngineConfig
from devipc.hicache.keys import Namespace
from devipc.hicache.moving.arena import HostArena, Pinned
from devipc.interfaces.backend import Backend, Device
from devipc.registry import load_backend
from devipc.session import Exporter, Importer

__all__ = ["measure_footprint"]

_TIMEOUT_S = 120.0
_SETTLE_S = 0.5
_FIELDS = ("VmRSS", "RssAnon", "RssFile", "RssShmem")


def measure_footprint(
    backend: Backend, device: Device, *, tier_nbytes: int, rows: int, allocation: str = "one", clients: int = 3
) -> list[dict[str, Any]]:
    """Return a row for the control process, one for an engine process by number of clients, and one for its calls."""
    assert device.transfer is not None
    pool = Pool(device, GEOMETRIES["llama"], allocation, rows=rows, page_tokens=16)
    found: list[dict[str, Any]] = []
    try:
        before = _free(device)
        with _control(backend.name, device, pool, tier_nbytes) as pid:
            found.append({"process": "control", **_resident(pid), "device_nbytes": before - _free(device)})
        before = _free(device)
        flags = ["--tier-nbytes", str(tier_nbytes)]
        with daemon(backend.name, device.info.uuid, flags) as (url, _), contextlib.ExitStack() as stack:
            namespace = Namespace.of(pool.built.layout, model="bench", revision="1", dtype="u8")
            for count in range(1, clients + 1):
                client = stack.enter_context(connect(url, device=device, wait_s=_TIMEOUT_S))
                client.register_pool(pool.built, namespace=namespace)
                time.sleep(_SETTLE_S)
                engine: Any = client.status()["engine"]
                row = {"process": f"engine, {count} client(s)", **_resident(engine["pid"])}
                found.append({**row, "device_nbytes": before - _free(device)})
        for row in found[1:]:
            row["rss_over_control_nbytes"] = row["VmRSS_nbytes"] - found[0]["VmRSS_nbytes"]
            shared = row["RssShmem_nbytes"] - found[0]["RssShmem_nbytes"]
            row["own_rss_over_control_nbytes"] = row["rss_over_control_nbytes"] - shared
            row["device_over_control_nbytes"] = row["device_nbytes"] - found[0]["device_nbytes"]
        found.append(_calls(device, pool))
    finally:
        pool.close()
    return found


def _free(device: Device) -> int:
    assert device.transfer is not None
    return device.transfer.memory_info().free_nbytes


def _resident(pid: int) -> dict[str, int]:
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    loaded = {line.split()[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if ".so" in line}
    found = {f"{name}_nbytes": int(lines[name].split()[0]) * 1024 for name in _FIELDS}
    return {**found, "torch_loaded": int(any("torch" in os.path.basename(path) for path in loaded))}


def _calls(device: Device, pool: Pool) -> dict[str, Any]:
    """Return which driver calls an engine of this process makes to move pages: none of them may launch a kernel."""
    import numpy as np

    from devipc.hicache.api import UNFENCED

    calls: set[str] = set()
    with observe(calls.add), connect("inproc:", device=device, config=EngineConfig(tier_nbytes=2**28)) as client:
        namespace = Namespace.of(pool.built.layout, model="calls", revision="1", dtype="u8")
        handle = client.register_pool(pool.built, namespace=namespace)
        keys = np.arange(32 * 16, dtype=np.uint8).reshape(32, 16)
        client.backup(handle, np.arange(1, 33), keys, ready=UNFENCED).result(_TIMEOUT_S)
        client.restore(handle, keys, np.arange(33, 65), ready=UNFENCED).result(_TIMEOUT_S)
    return {"process": "calls of an engine in this process", "calls": sorted(calls)}


@contextlib.contextmanager
def _control(backend: str, device: Device, pool: Pool, tier_nbytes: int) -> Iterator[int]:
    with Exporter(backend=backend, device=device.info.uuid) as exporter:
        names = [f"pool/{number}" for number in range(len(pool.built.exports))]
        for name, export in zip(names, pool.built.exports, strict=True):
            exporter.share(name, export)
        options = {"backend": backend, "device": device.info.uuid, "path": exporter.path, "names": names}
        command = [sys.executable, "-m", "devipc.bench.footprint", json.dumps({**options, "tier_nbytes": tier_nbytes})]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdout.readline()
            time.sleep(_SETTLE_S)
            yield process.pid
        finally:
            process.stdin.close()
            try:
                process.wait(_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()


def main() -> None:
    """Be the control process: hold the memory until standard input ends."""
    options = json.loads(sys.argv[1])
    device = load_backend(options["backend"]).open_device(options["device"])
    assert device.transfer is not None
    arena = HostArena(options["tier_nbytes"])
    pinned = Pinned(arena, device.transfer)
    streams = [device.transfer.create_stream() for _ in range(2)]
    with Importer(options["path"], backend=options["backend"], device=options["device"]) as session:
        memories = session.open_all(options["names"])
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        sys.stdin.read()
        for memory in memories:
            memory.close()
    for stream in streams:
        device.transfer.destroy_stream(stream)
    pinned.close()
    arena.close()


if __name__ == "__main__":
    main()
