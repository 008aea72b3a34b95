"""Facts about this machine that decide what works, in a form that can be pasted where others read it.

Owns which facts there are and what is private about them: names of user and host, home paths, serial numbers and
identities. It opens no device; what a backend says comes from a child.
"""

from __future__ import annotations

import getpass
import os
import platform
import re
import resource
import socket
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from devipc._version import __version__
from devipc.probe.pair import Pair, Target
from devipc.registry import backend_names

__all__ = ["backend_facts", "collect", "redact", "redact_paths"]

_MOST = 4000
"""Characters of one text; of a longer one both ends stay: what was said, and where a stack says what was raised."""

_VISIBLE = re.compile(
    r"(?:\w+_)?(?:VISIBLE_DEVICES|DEVICE_ORDINAL|AFFINITY_MASK|DEVICE_SELECTOR|DEVICE_ORDER|DEVICE_HIERARCHY|ALLOC_CONF|"
    r"MODULE_LOADING|LAUNCH_BLOCKING|SYSMAN\w*)|DEVIPC_\w+"
)
"""Environment variables by which drivers are told what they may show, whoever's they are."""
_NAMESPACES = ("ipc", "mnt", "net", "pid", "user")
_NAME = re.compile(r"[\w.-]+")
_CONTAINER_MARKS = ("/.dockerenv", "/run/.containerenv")
_CAPABILITIES = {"IPC_LOCK": 14, "SYS_PTRACE": 19, "SYS_ADMIN": 21}  # linux/capability.h
_COMMON = {"root", "user", "host", "localhost", "nobody", "admin", "device", "memory", "python", "linux"}
_UUID = re.compile(r"\b([0-9a-f]{8})-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", re.IGNORECASE)
_LONG_HEX = re.compile(r"\b(?=[0-9a-f]*\d)([0-9a-f]{6})[0-9a-f]{10,}\b", re.IGNORECASE)
_DIGITS = re.compile(r"\b(\d{4})\d{9,}\b")
_HOMES = re.compile(r"/(?:home|Users)/[^/\s:'\"]+")


def collect(*, backends: bool = True, timeout_s: float = 20.0) -> dict[str, dict[str, str]]:
    """Return facts by section, private data already taken out. Never raises for what is not there.

    Each backend is asked in a child of its own, at most ``timeout_s`` seconds; ``backends=False`` asks none.
    """
    sections = {
        "devipc": {
            "version": __version__,
            "python": f"{platform.python_version()} ({platform.python_implementation()})",
        },
        "packages": _packages(),
        "machine": _machine(),
        "namespaces": _namespaces(),
        "limits": _limits(),
        "variables": {name: value for name, value in sorted(os.environ.items()) if _VISIBLE.fullmatch(name)},
    }
    for name in backend_names() if backends else ():
        sections[f"backend {name}"] = backend_facts(name, timeout_s=timeout_s)
    return {title: {redact(name): redact(value) for name, value in facts.items()} for title, facts in sections.items()}


def backend_facts(name: str, *, timeout_s: float) -> dict[str, str]:
    """Return what backend ``name`` says of itself; a crash, hang or refusal is the fact ``error``."""
    try:
        with Pair(Target(name, ""), None) as pair:
            answer = pair.order("facts", limit_s=timeout_s)
    except OSError as error:
        return {"error": f"no process could be started ({error.strerror})"}
    if "facts" in answer:
        return {str(key): str(value) for key, value in answer["facts"].items()}
    return {"error": str(answer["capability"]["reason"])}


def redact(text: str) -> str:
    """Return ``text`` without user name, host name and home paths, and with identities shortened."""
    text = _UUID.sub(r"\1-...", redact_paths(text))
    return _DIGITS.sub(r"\1...", _LONG_HEX.sub(r"\1...", text))


def redact_paths(text: str) -> str:
    """Return ``text`` without user name, host name and home paths; identities stay, since devices go by them.

    Whoever wrote it, the result is of bounded length and does nothing to a terminal.
    """
    text = text if len(text) <= _MOST else f"{text[: _MOST // 2]} ... {text[-_MOST // 2 :]}"
    text = "".join(one if one.isprintable() or one in "\n\t" else ascii(one)[1:-1] for one in text)
    home = os.path.expanduser("~")
    if len(home) > 1:
        text = re.sub(rf"{re.escape(home)}(?=[/\s:'\"]|$)", "~", text)
    text = _HOMES.sub("~", text)
    for name, stands_for in ((_user(), "<user>"), (socket.gethostname(), "<host>")):
        if len(name) > 2 and name.lower() not in _COMMON:
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", stands_for, text)
    return text


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a number without a name, as containers have
        return ""


def _packages() -> dict[str, str]:
    """Return the versions of devipc's distributions, and of what they may use."""
    found: dict[str, str] = {}
    wanted: set[str] = set()
    for distribution in metadata.distributions():
        try:
            name = _normal(distribution.metadata["Name"])
            found[name] = distribution.version
            if name.split("-")[0] == "devipc":
                uses = [text for text in distribution.requires or () if "'dev'" not in text and '"dev"' not in text]
                wanted.update((name, *(_normal(_NAME.match(text)[0]) for text in uses)))  # type: ignore[index]
        except Exception:  # metadata can be broken in as many ways as a file can
            continue
    return {name: version for name, version in sorted(found.items()) if name in wanted}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _machine() -> dict[str, str]:
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "distribution": _release(),
        "libc": " ".join(platform.libc_ver()),
        "processors": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}",
        "memory": _first(lambda: _text("/proc/meminfo").splitlines()[0].split(":", 1)[1].strip()),
        "memory limit (cgroup)": _text("/sys/fs/cgroup/memory.max") or "not readable",
        "container": "yes"
        if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists()
        else "not marked as one",
        "root": "yes" if os.geteuid() == 0 else "no",
        "interpreter isolated": str(bool(sys.flags.isolated)).lower(),
    }


def _release() -> str:
    return _first(lambda: platform.freedesktop_os_release().get("PRETTY_NAME", ""))


def _namespaces() -> dict[str, str]:
    """Inode numbers: two processes share what has equal numbers."""
    return {name: _first(lambda name=name: os.readlink(f"/proc/self/ns/{name}").split(":")[-1]) for name in _NAMESPACES}  # type: ignore[misc]


def _limits() -> dict[str, str]:
    def pair(which: int) -> str:
        return " / ".join("unlimited" if n == resource.RLIM_INFINITY else str(n) for n in resource.getrlimit(which))

    def shm() -> str:
        found = os.statvfs("/dev/shm")
        return f"{found.f_bavail * found.f_frsize >> 20} of {found.f_blocks * found.f_frsize >> 20} MiB free"

    return {
        "/dev/shm": _first(shm),
        "memlock (soft / hard)": pair(resource.RLIMIT_MEMLOCK),
        "descriptors (soft / hard)": pair(resource.RLIMIT_NOFILE),
        "processes (soft / hard)": pair(resource.RLIMIT_NPROC),
        "ptrace scope": _text("/proc/sys/kernel/yama/ptrace_scope") or "not limited by Yama",
        "seccomp": _status("Seccomp"),
        "capabilities": _capabilities(),
        "max map count": _text("/proc/sys/vm/max_map_count") or "not readable",
    }


def _capabilities() -> str:
    try:
        held = int(_status("CapEff"), 16)
    except ValueError:
        return "not readable"
    return ", ".join(f"{name} {'yes' if held >> bit & 1 else 'no'}" for name, bit in _CAPABILITIES.items())


def _status(key: str) -> str:
    lines = dict(line.split(":", 1) for line in _text("/proc/self/status").splitlines() if ":" in line)
    return lines.get(key, "not readable").strip()


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return ""


def _first(read: Callable[[], str]) -> str:
    try:
        return read()
    except (OSError, IndexError):
        return "not readable"
