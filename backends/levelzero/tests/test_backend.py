"""Devices by identity, one copy of the loader, failures by layer, forks refused, and what may be absent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from devipc.spi import CapabilityError, ForkError
from tests.simulator.needs import need

from .peers import ROOT, environment, python_path, simulated, simulator_folder


def backend() -> Any:
    from devipc_levelzero.backend import LevelZeroBackend

    return LevelZeroBackend()


@simulated(bare=True, quick=True)
def test_listing_makes_no_context(sim: Any) -> None:
    first, second = backend().devices()
    assert first.uuid.startswith("GPU-")
    assert len(first.uuid) == 40
    assert first.uuid != second.uuid
    assert (first.ordinal, second.ordinal) == (0, 1)
    assert (first.pci, second.pci) == ("0000:40:00.0", "0000:41:00.0")
    assert first.total_nbytes == 8 * 2**30
    assert not first.parent_uuid
    assert first.dlpack_type == 0  # an address is valid in our context only
    facts = backend().facts()
    assert facts["driver"] == "0x01030000 with interface 1.17"
    assert facts["loader"].startswith("/")
    assert facts["bindings"].startswith("pyzes ")
    assert facts["ZE_ENABLE_PARAMETER_VALIDATION"] == "1"
    assert "error" not in facts
    assert sim.counter("live_contexts") == 0


@simulated(bare=True, ZE_AFFINITY_MASK="1")
def test_identity_does_not_follow_the_order(sim: Any) -> None:
    made = backend()
    (only,) = made.devices()
    assert only.uuid.endswith("2")
    assert only.ordinal == 0
    device = made.open_device(only.uuid)
    assert made.open_device() is device
    device.close()
    again = made.open_device(only.uuid)
    assert again is not device
    again.close()
    with pytest.raises(CapabilityError, match=f"visible: {only.uuid}") as caught:
        made.open_device("GPU-elsewhere")
    assert "ZE_AFFINITY_MASK" in caught.value.remedy


@simulated(bare=True)
def test_a_device_without_engines_is_refused(sim: Any) -> None:
    from devipc_levelzero import context

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context, "_COPY", 0)
        patch.setattr(context, "_COMPUTE", 0)
        with pytest.raises(CapabilityError) as caught:
            backend().open_device()
    assert caught.value.code == "no_engine"
    assert sim.counter("live_contexts") == 0
    backend().open_device().close()


@simulated(bare=True, slices=2, devices=1)
def test_parts_have_their_own_identity(sim: Any) -> None:
    from devipc_levelzero import driver

    first, second = backend().devices()
    assert first.uuid != second.uuid
    assert first.parent_uuid == second.parent_uuid
    assert bool(first.parent_uuid) is driver.has("zeDeviceGetRootDevice")
    assert first.parent_uuid not in (first.uuid, second.uuid)


@simulated()
def test_a_forked_child_is_refused(device: Any, sim: Any) -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            device.memory.allocate(1)
        except ForkError as error:
            os.write(writer, str(error).encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    assert b"before this process was forked" in os.read(reader, 4096)
    os.close(reader)


# --- what may be absent: a clean answer with a remedy, never a traceback ----------------------------------------------


def answer(code: str, env: dict[str, str]) -> str:
    """Return what a process prints that imports the backend as ``b`` and runs ``code``."""
    program = f"""
from devipc.spi import DevIPCError
from devipc_levelzero.backend import LevelZeroBackend
b = LevelZeroBackend()
def tell(call):
    try:
        print("answer", call())
    except DevIPCError as error:
        print(type(error).__name__, error.code, error.message, "REMEDY", error.remedy)
{code}
"""
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, cwd=ROOT, capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def without(*names: str) -> str:
    """Python that makes imports and loads of these names fail, as they do where nothing is installed."""
    return f"""
import ctypes, importlib.abc, sys
gone = {names!r}
class Gone(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name in gone:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Gone())
real = ctypes.CDLL
class CDLL(real):
    def __init__(self, name, *args, **kwargs):
        if name and any(each in str(name) for each in gone):
            raise OSError(f"{{name}}: cannot open shared object file: No such file or directory")
        super().__init__(name, *args, **kwargs)
ctypes.CDLL = CDLL
"""


def bare_environment() -> dict[str, str]:
    values = {name: value for name, value in os.environ.items() if not name.startswith(("DEVSIM_", "ZE_", "ZES_"))}
    return python_path(values)


def test_no_loader() -> None:
    """Neither the loader nor pyzes, which raises while it is imported then."""
    text = answer(without("libze_loader.so") + "tell(b.devices)\nprint(b.facts()['error'])", bare_environment())
    assert text.startswith("CapabilityError no_library layer 'loader': libze_loader.so.1 cannot be loaded")
    assert "apt-get install libze1" in text.splitlines()[0]
    assert "layer 'loader'" in text.splitlines()[1]


def test_no_driver() -> None:
    """The real loader, and nothing behind it."""
    simulator_folder()
    text = answer("tell(b.devices)", {**bare_environment(), "ZE_ENABLE_ALT_DRIVERS": "/absent/libze_none.so"})
    assert text.startswith("CapabilityError no_device layer 'driver': the loader finds no driver with a device")
    assert "libze_loader.so" in text
    assert "/dev/dri/renderD*" in text


@pytest.mark.simulator
def test_no_device() -> None:
    text = answer("tell(b.devices)", environment({"devices": 0}))
    assert text.startswith("CapabilityError no_device layer 'driver'")


@pytest.mark.simulator
def test_no_pyzes() -> None:
    """Everything works but the question how much memory is free."""
    code = (
        without("pyzes")
        + """
d = b.open_device()
a = d.memory.allocate(100, zero=True)
e = d.memory.export(a.ptr, 100)
print(len(e.fds), b.facts()["management"])
tell(d.transfer.memory_info)
d.memory.release(e); d.memory.free(a); d.close()
"""
    )
    lines = answer(code, environment({})).splitlines()
    assert lines[0] == "1 pyzes cannot be imported (No module named 'pyzes')"
    assert lines[1].startswith("CapabilityError no_bindings free memory is not known")
    assert "pip install pyzes" in lines[1]


@pytest.mark.long
@pytest.mark.simulator
def test_a_copy_of_the_loader_that_was_there_first_is_used(tmp_path: Path) -> None:
    """A framework brought its own; pyzes would load a second one, whose devices are none of the first one's."""
    need("levelzero")  # it is mapped here from then on
    with open("/proc/self/maps", encoding="utf-8") as maps:
        path = next(line.split(maxsplit=5)[5].strip() for line in maps if "/libze_loader.so" in line)
    copy = tmp_path / "libze_loader.so.1"
    copy.write_bytes(Path(path).read_bytes())
    code = f"""
import ctypes
ctypes.CDLL({str(copy)!r})
d = b.open_device()
a = d.memory.allocate(100, zero=True); d.memory.free(a)
tell(d.transfer.memory_info)
d.close()
"""
    text = answer(code, environment({}))
    assert "pyzes uses another copy of the loader" in text
    assert str(copy) in text


def test_the_package_is_not_installed() -> None:
    """Asked for by name it says what to install."""
    program = """
from importlib import metadata
real = metadata.distributions
metadata.distributions = lambda **wanted: (d for d in real(**wanted) if d.name != "devipc-levelzero")
from devipc.errors import PluginError
from devipc.registry import load_backend
try:
    load_backend("levelzero")
except PluginError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    assert "levelzero" in done.stdout
    assert "remedy: install the package that brings it" in done.stdout
