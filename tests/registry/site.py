"""Tiny distributions, installed by writing what an installer writes, and a process that sees them.

Owns their sources. Nothing of them is ever imported into the process that runs the tests, and that process sees no
backend that happens to be installed here: only devipc's own and those of the site.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pluggy

import devipc

GOOD = """
from devipc.spi import CapabilityError, DeviceInfo, hookimpl
DEVIPC_CONTRACT = 1

class Backend:
    def __init__(self, name, devices):
        self.name, self._devices = name, devices
    def facts(self):
        return {{}}
    def devices(self):
        return self._devices
    def open_device(self, uuid=None):
        raise CapabilityError("no device can be opened here")

@hookimpl
def devipc_backend():
    return Backend({name!r}, [DeviceInfo(f"{name}-{{n}}", n, "Tiny") for n in range({count})])
"""


class Site:
    """A folder of ``sys.path``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)

    @classmethod
    def with_devipc(cls, folder: Path) -> Site:
        """Return a site where devipc is installed, with the one package that it needs."""
        site = cls(folder)
        site.install("devipc", "host = devipc.host.plugin")
        for package in (pluggy, devipc):
            (folder / package.__name__).symlink_to(Path(str(package.__file__)).parent)
        return site

    def install(self, project: str, entry_points: str, *, version: str = "1.0", **modules: str) -> None:
        """Install a distribution with the entry points of group ``devipc.backends`` and the named modules."""
        info = self.folder / f"{project.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[devipc.backends]\n{entry_points}\n")
        for name, source in modules.items():
            (self.folder / f"{name}.py").write_text(source)

    def plugin(self, name: str, source: str, *, project: str = "", count: int = 1) -> None:
        """Install one backend ``name`` whose module is ``source``; the good one, with ``count`` devices, when empty."""
        module = f"plugin_{name}"
        source = source or GOOD.format(name=name, count=count)
        self.install(project or f"devipc-{name}", f"{name} = {module}", **{module: source})

    def run(self, code: str, *, timeout_s: float = 30, **env: str) -> Any:
        """Run ``code`` in a fresh process; return what it left in ``answer``. Its exit status must be 0."""
        program = f"import json\nfrom devipc.registry import *\n{code}\nprint('\\n' + json.dumps(answer))"
        done = subprocess.run(
            [sys.executable, "-S", "-c", program],  # -S: without the packages of this environment
            env={"PYTHONPATH": str(self.folder), "PATH": "/usr/bin:/bin", **env},
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
        return json.loads(done.stdout.splitlines()[-1])
