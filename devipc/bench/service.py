"""Who serves the cache that is measured: this process, a daemon that runs already, or one that is started for it.

Owns starting and ending that daemon. It measures nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from devipc.errors import DevIPCError, PeerGone
from devipc.hicache.api import HiCacheClient, connect
from devipc.hicache.engine import EngineConfig
from devipc.interfaces.backend import Backend, Device

__all__ = ["SPAWN", "client_of", "daemon"]

SPAWN = "daemon"
"""As a URL: a daemon for this measurement alone."""
_START_S = 120.0
_END_S = 30.0


@contextlib.contextmanager
def client_of(
    url: str, backend: Backend, device: Device, *, tier_nbytes: int, extent_pages: int = 16
) -> Iterator[HiCacheClient]:
    """Give a client of the cache behind ``url``: ``inproc:``, ``unix:/path`` or :data:`SPAWN`."""
    if url == "inproc:":
        config = EngineConfig(tier_nbytes=tier_nbytes, extent_pages=extent_pages)
        with connect(url, device=device, config=config) as client:
            yield client
        return
    with contextlib.ExitStack() as stack:
        if url == SPAWN:
            flags = ["--tier-nbytes", str(tier_nbytes), "--extent-pages", str(extent_pages)]
            url = stack.enter_context(daemon(backend.name, device.info.uuid, flags))[0]
        yield stack.enter_context(connect(url, device=device, wait_s=_START_S))


@contextlib.contextmanager
def daemon(backend: str, device: str, flags: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run a daemon of its own; give its URL and what it said when it was ready."""
    with tempfile.TemporaryDirectory(prefix="devipc-bench-") as folder:
        os.chmod(folder, 0o700)
        path = os.path.join(folder, "hicache.sock")
        log = os.path.join(folder, "log")
        command = [sys.executable, "-m", "devipc", "hicache", "serve", "--json", "--socket", path]
        with open(log, "wb") as errors:
            process = subprocess.Popen(
                [*command, "--backend", backend, "--device", device, *flags], stdout=subprocess.PIPE, stderr=errors
            )
        try:
            yield f"unix:{path}", _ready(process, log)
        finally:
            process.terminate()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()


def _ready(process: subprocess.Popen[bytes], log: str) -> dict[str, Any]:
    assert process.stdout is not None
    deadline, line = time.monotonic() + _START_S, b""
    os.set_blocking(process.stdout.fileno(), False)
    while not line.endswith(b"\n"):
        if time.monotonic() > deadline or process.poll() is not None:
            with open(log, encoding="utf-8", errors="replace") as said:
                raise PeerGone("the daemon did not become ready: " + said.read()[-2000:], remedy="start it by hand")
        if select.select([process.stdout], [], [], 0.1)[0]:
            line += process.stdout.read() or b""
    found: dict[str, Any] = json.loads(line)
    if not isinstance(found, dict):
        raise DevIPCError("the daemon's first line is no JSON object", code="ready")
    return found
