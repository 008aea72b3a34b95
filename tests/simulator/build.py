"""Builds the simulated driver libraries with the system compiler.

Owns the cache folder and the compiler's command line.  It knows nothing of what
the libraries do.  Run as a script it prints the folder to put on the library path.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent

FLAGS = (
    "-std=gnu11",
    "-D_GNU_SOURCE",
    "-O2",
    "-g",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-fPIC",
    "-fvisibility=hidden",
    "-pthread",
)

# Folder of a front -> the file that programs load, below the folder of the build.
LIBRARIES = {
    "cuda": "libcuda.so.1",
    "hip": "lib/libamdhip64.so",
    "hip_on_cuda": "lib/libamdhip64.so",
    "levelzero": "libze_intel_gpu.so.1",
}

# What a library is made of besides its own folder, instead of the core: this one simulates nothing, it passes calls on.
PARTS = {"hip_on_cuda": ("hip/abi.h",)}


class BuildError(RuntimeError):
    """The compiler is missing or refused the sources; the text holds its output."""


def cache_root() -> Path:
    """Folder that holds every build: the user's cache, else ``.cache`` in the repository."""
    base = os.environ.get("XDG_CACHE_HOME")
    return Path(base) / "devipc" / "simulator" if base else REPOSITORY / ".cache" / "simulator"


def sources(front: str) -> list[Path]:
    """Every file that decides what the library of ``front`` is, in a fixed order."""
    folders = (front,) if front in PARTS else ("core", front)
    own = [path for folder in folders for path in (HERE / folder).iterdir()]
    return sorted([*own, *(HERE / part for part in PARTS.get(front, ()))])


def digest(front: str, compiler: str) -> str:
    """Name of a build: sources, flags and compiler version."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=30)
    seen = hashlib.sha256(repr((FLAGS, version.stdout)).encode())
    for path in sources(front):
        seen.update(path.relative_to(HERE).as_posix().encode() + b"\0" + path.read_bytes())
    return seen.hexdigest()[:20]


def compile_into(folder: Path, front: str, compiler: str) -> None:
    """Compiles one library into an existing folder.

    Raises
    ------
    BuildError
        With the compiler's words when it fails; warnings count as failures.
    """
    name = LIBRARIES[front]
    objects = []
    running = []
    for path in sources(front):
        if path.suffix == ".c":
            target = folder / f"{path.parent.name}-{path.stem}.o"
            objects.append(target)
            command = [compiler, *FLAGS, f"-I{HERE / front}", "-c", str(path), "-o", str(target)]
            running.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
            if len(running) >= (os.cpu_count() or 1):
                _finish(running)
    _finish(running)
    (folder / name).parent.mkdir(exist_ok=True)
    link = [
        compiler,
        "-shared",
        "-pthread",
        f"-Wl,-soname,{Path(name).name}",
        f"-Wl,--version-script={HERE / front / 'exports.map'}",
        "-Wl,-Bsymbolic",
        "-Wl,-z,defs",
        "-o",
        str(folder / name),
        *map(str, objects),
    ]
    done = subprocess.run(link, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise BuildError(done.stderr)
    for path in objects:
        path.unlink()


def _finish(running: list[subprocess.Popen[str]]) -> None:
    """Waits for the compilers that run and empties the list."""
    failures = []
    for process in running:
        output, _ = process.communicate(timeout=120)
        if process.returncode:
            failures.append(output)
    running.clear()
    if failures:
        raise BuildError("\n".join(failures))


def build(front: str = "cuda") -> Path:
    """Folder that holds the library of ``front``, built if it is not there yet.

    Blocking for some seconds at the first call.  Safe to run in parallel: each
    caller compiles into its own folder and the first rename wins.

    Raises
    ------
    BuildError
        No compiler, or it refused the sources.
    """
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if compiler is None:
        raise BuildError("no C compiler: install gcc or set CC")
    root = cache_root()
    target = root / f"{front}-{digest(front, compiler)}"
    if (target / LIBRARIES[front]).exists():
        return target
    root.mkdir(parents=True, exist_ok=True)
    (root / ".gitignore").write_text("*\n")
    work = Path(tempfile.mkdtemp(prefix=".building-", dir=root))
    try:
        compile_into(work, front, compiler)
        work.rename(target)
    except OSError:
        if not (target / LIBRARIES[front]).exists():
            raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def without(front: str, missing: Sequence[str]) -> Path:
    """Folder of a library of ``front`` that lacks entry points, for bindings that look them up by name.

    Their names are changed in a copy of the library, so that no lookup finds them.

    Raises
    ------
    BuildError
        As :func:`build`, and for a name that the library does not have.
    """
    whole = build(front)
    target = whole.with_name(f"{whole.name}-without-{'-'.join(missing)}")
    path = target / LIBRARIES[front]
    if not path.exists():
        data = (whole / LIBRARIES[front]).read_bytes()
        for name in missing:
            if b"\0%s\0" % name.encode() not in data:
                raise BuildError(f"{front} has no entry point {name}")
            data = data.replace(b"\0%s\0" % name.encode(), b"\0%s\0" % ("_" + name[1:]).encode())
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as made:
            made.write(data)
        Path(made.name).rename(path)
    return target


if __name__ == "__main__":
    print(without(sys.argv[1], sys.argv[2:]) if sys.argv[2:] else build(*sys.argv[1:2]))
