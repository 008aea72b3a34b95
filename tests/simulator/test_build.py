"""The build: where it goes, what it exports, and that parallel builds are safe."""

from __future__ import annotations

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.simulator import build

pytestmark = pytest.mark.simulator

VENDOR_WORDS = re.compile(r"(?i:cuda|nvidia|\bhip\b|rocm|\bamd\b|intel|level.?zero)|\b(?:ze|cu|hip|CU_|ZE_)[A-Z]")


def test_a_build_is_reused(library: Path) -> None:
    before = (library / "libcuda.so.1").stat().st_mtime_ns
    assert build.build("cuda") == library
    assert (library / "libcuda.so.1").stat().st_mtime_ns == before


def test_parallel_builds_into_an_empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with ThreadPoolExecutor(2) as pool:
        folders = set(pool.map(lambda _: build.build("cuda"), range(2)))
    (folder,) = folders
    assert folder.is_relative_to(tmp_path)
    assert (folder / "libcuda.so.1").exists()
    assert [path.name for path in folder.parent.iterdir() if path.name.startswith(".building")] == []
    assert (folder.parent / ".gitignore").read_text() == "*\n"


def test_a_compiler_error_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-include", "absent-header.h"))
    with pytest.raises(build.BuildError, match="absent-header"):
        build.build("cuda")


def test_the_script_prints_the_folder(library: Path) -> None:
    done = subprocess.run([sys.executable, build.__file__], capture_output=True, text=True, timeout=60, check=True)
    assert Path(done.stdout.strip()) == library


def test_only_the_two_families_are_exported(library: Path) -> None:
    done = subprocess.run(
        ["nm", "-D", "--defined-only", str(library / "libcuda.so.1")],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    names = [line.split()[-1] for line in done.stdout.splitlines()]
    assert {"cuInit", "cuGetProcAddress_v2", "cuStreamWaitValue64_v2", "devsim_report"} <= set(names)
    assert [name for name in names if not name.startswith(("cu", "devsim_"))] == []


def test_the_soname(library: Path) -> None:
    done = subprocess.run(
        ["readelf", "-d", str(library / "libcuda.so.1")], capture_output=True, text=True, timeout=30, check=True
    )
    assert "[libcuda.so.1]" in done.stdout


def test_the_core_names_no_vendor() -> None:
    found = [
        f"{path.name}:{number}: {line}"
        for path in (build.HERE / "core").iterdir()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if VENDOR_WORDS.search(line)
    ]
    assert found == []
