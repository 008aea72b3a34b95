"""What is installed and loaded: versions, and the copies of the runtime in this process.

Makes no call of the runtime.
"""

from __future__ import annotations

from importlib import metadata

__all__ = ["OLDEST_RUNTIME", "bindings_version", "library_paths", "version_text"]

OLDEST_RUNTIME = 60_000_000
"""ROCm 6.0 as the runtime counts: major * 10**7 + minor * 10**5 + patch."""


def version_text(version: int) -> str:
    """Return a version as people write it, without the patch level, which is a build number."""
    return f"{version // 10_000_000}.{version % 10_000_000 // 100_000}"


def bindings_version() -> str:
    """Return the version of the bindings, empty when they are not installed."""
    try:
        return str(metadata.version("rocm-bindings-hip"))
    except metadata.PackageNotFoundError:
        return ""


def library_paths() -> list[str]:
    """Return the paths of all copies of the runtime mapped into this process; more than one is a mix."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        found = {line.split(maxsplit=5)[5].strip() for line in maps if "/libamdhip64.so" in line}
    return sorted(found)
