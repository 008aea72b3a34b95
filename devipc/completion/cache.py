"""Results of child trials, kept on disk, because two processes that open a device take seconds.

Owns the key (everything that could change the answer), the file, and the distrust of it. Nothing here is ever fatal:
without the cache a trial is run again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import stat
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from devipc._version import __version__
from devipc.capabilities import Capability, Verdict
from devipc.types import Strategy

__all__ = ["DIRECTORY_VARIABLE", "TrialCache"]

DIRECTORY_VARIABLE = "DEVIPC_TRIAL_CACHE"
"""Environment variable that names the folder; an empty value turns the cache off."""
_MAX_NBYTES = 64 * 1024
_FAILURE_LIFE_S = 3600.0
"""A failure may have been a busy moment: it is tried again. A success lasts until something of the key changes."""
_log = logging.getLogger("devipc.completion")


class TrialCache:
    """Verdicts of child trials of one device under one driver.

    Parameters
    ----------
    backend : str
        Name of the backend.
    device_uuid : str
        Identity of the device.
    facts : Mapping
        What :meth:`devipc.interfaces.backend.Backend.facts` says: versions and settings that matter.
    """

    def __init__(self, *, backend: str, device_uuid: str, facts: Mapping[str, str]) -> None:
        self._about = {
            "backend": backend,
            "device": device_uuid,
            "facts": {str(key): str(value) for key, value in sorted(facts.items())},
            "boot": _first_line("/proc/sys/kernel/random/boot_id"),
            "namespaces": [_link(f"/proc/self/ns/{name}") for name in ("ipc", "mnt", "pid", "user")],
            "uid": os.getuid(),
            "machine": platform.machine(),
            "devipc": __version__,
        }

    def load(self, strategy: Strategy) -> Capability | None:
        """Return the verdict that is known, or None."""
        folder = _folder(make=False)
        if folder is None:
            return None
        key = self._key(strategy)
        try:
            content = json.loads(_read_private(folder / _name(key)))
            if content["key"] != key:
                return None
            fields = content["capability"]
            if not all(isinstance(fields[name], str) for name in ("evidence", "reason", "remedy")):
                return None
            capability = Capability(Verdict(fields["verdict"]), fields["evidence"], fields["reason"], fields["remedy"])
            age_s = time.time() - float(content["at"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            _log.debug("a cached trial is ignored: %s", error)
            return None
        if not capability and not 0 <= age_s < _FAILURE_LIFE_S:
            return None
        return capability

    def store(self, strategy: Strategy, capability: Capability) -> None:
        """Keep a verdict; a trial that could not be run is none."""
        folder = _folder(make=True) if capability.verdict is not Verdict.UNTESTED else None
        if folder is None:
            return
        key = self._key(strategy)
        content = {"key": key, "capability": capability.to_json(), "at": time.time()}
        try:
            # mkstemp makes it 0600; the rename makes it whole or absent for readers.
            fd, temporary = tempfile.mkstemp(dir=folder, prefix=".trial-")
            try:
                with os.fdopen(fd, "w") as file:
                    json.dump(content, file)
                os.replace(temporary, folder / _name(key))
            except BaseException:
                os.unlink(temporary)
                raise
        except OSError as error:
            _log.debug("a trial cannot be cached: %s", error)

    def _key(self, strategy: Strategy) -> dict[str, object]:
        return {**self._about, "strategy": strategy.value}


def _name(key: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32] + ".json"


def _folder(*, make: bool) -> Path | None:
    """Return the folder when it is ours and nobody else's, else None."""
    configured = os.environ.get(DIRECTORY_VARIABLE)
    if configured == "":
        return None
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(configured) if configured else Path(base) / "devipc" / "trials"
        if make:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = folder.stat()
    except FileNotFoundError:
        return None
    except (OSError, RuntimeError) as error:
        _log.debug("no folder for trials: %s", error)
        return None
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o022:
        _log.debug("%s is not a folder that only this user may write; trials are not cached", folder)
        return None
    return folder


def _read_private(path: Path) -> bytes:
    """Read a small regular file that belongs to us and that nobody else may write."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as file:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
            raise ValueError("it is not a private file of this user")
        content = file.read(_MAX_NBYTES + 1)
    if len(content) > _MAX_NBYTES:
        raise ValueError("it is too large")
    return content


def _first_line(path: str) -> str:
    try:
        with open(path) as file:
            return file.readline().strip()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
