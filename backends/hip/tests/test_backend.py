"""Devices by identity, the current device left alone, failures by layer, forks refused, ends without a crash."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from devipc.spi import CapabilityError, ClosedError, DeviceLostError, DriverError, ForkError
from tests.simulator.needs import is_missing

from .peers import ROOT, environment, python_path, simulated


def backend() -> Any:
    from devipc_hip.backend import HipBackend

    return HipBackend()


def hip() -> Any:
    return importlib.import_module("rocm.bindings.hip")


def current() -> int:
    return int(hip().hipGetDevice()[1])


@simulated()
def test_a_stream_that_is_gone_is_no_lost_device(device: Any, sim: Any) -> None:
    """The runtime has one status for both; this package's own stream goes with the device alone."""
    block = device.memory.allocate(4096)
    stream = device.transfer.create_stream()
    borrowed = device.transfer.wrap_stream(stream.handle)
    sim.inject("hipStreamIsCapturing@1=709")
    with pytest.raises(DriverError, match="none of this process") as caught:
        device.transfer.is_capturing(borrowed)
    assert (type(caught.value), caught.value.code) == (DriverError, "invalid_stream")
    sim.inject("hipStreamIsCapturing@1=709")
    with pytest.raises(DeviceLostError, match="was reset"):
        device.memory.describe(block.ptr)
    device.transfer.destroy_stream(stream)
    device.memory.free(block)


@simulated(bare=True)
def test_the_bindings_are_used_when_they_know_which_library(sim: Any) -> None:
    """A call of another thread in between would load the copy that the bindings choose by themselves."""
    driver: Any = importlib.import_module("devipc_hip.driver")
    known, prefer = threading.Event(), driver._prefer_loaded_library

    def slowly() -> None:
        known.wait(20.0)
        prefer()

    driver._module, driver._prefer_loaded_library = None, slowly
    first, second = (threading.Thread(target=driver.has, args=("hipInit",)) for _ in range(2))
    first.start()
    second.start()
    second.join(0.5)
    assert second.is_alive()
    known.set()
    for thread in (first, second):
        thread.join(20.0)
        assert not thread.is_alive()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "_module", None)
        patch.setattr(driver, "_prefer_loaded_library", lambda: importlib.import_module("no_such_module"))
        for _ in range(2):
            with pytest.raises(CapabilityError, match="cannot be imported"):
                driver.has("hipInit")


def test_every_switch_of_the_front_is_set_in_a_test_of_this_backend() -> None:
    definitions = (ROOT / "tests/simulator/hip/own_switches.def").read_text()
    switches = set(re.findall(r"^SWITCH\((\w+),", definitions, re.MULTILINE))
    tests = "\n".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert len(switches) > 5
    assert {name for name in switches if not re.search(rf'\b{name}=|"{name}"|DEVSIM_{name.upper()}', tests)} == set()


@simulated(bare=True)
def test_devices_have_an_identity(sim: Any) -> None:
    first, second = backend().devices()
    assert first.uuid == "GPU-d0e151700a5c0001"
    assert first.uuid != second.uuid
    assert (first.ordinal, second.ordinal) == (0, 1)
    assert first.pci == "0000:40:00.0"
    assert first.total_nbytes == 8 * 2**30
    assert "7.15" in backend().facts()["runtime"]


@pytest.mark.long
@simulated(bare=True, HIP_VISIBLE_DEVICES="1,0")
def test_identity_does_not_follow_the_order(sim: Any) -> None:
    made = backend()
    first, second = made.devices()
    assert first.uuid > second.uuid
    device = made.open_device(second.uuid)
    assert device.info.ordinal == 1
    assert made.open_device(second.uuid) is device
    device.close()
    again = made.open_device(second.uuid)
    assert again is not device
    again.close()
    with pytest.raises(CapabilityError, match=f"visible: {first.uuid}, {second.uuid}") as caught:
        made.open_device("GPU-elsewhere")
    assert "HIP_VISIBLE_DEVICES='1,0'" in caught.value.remedy


@pytest.mark.long
@simulated(bare=True, no_uuid=1)
def test_without_a_number_the_bus_address_is_the_identity(sim: Any) -> None:
    assert [info.uuid for info in backend().devices()] == ["PCI-0000:40:00.0", "PCI-0000:41:00.0"]


def test_numbers_of_every_form() -> None:
    text = importlib.import_module("devipc_hip.backend")._uuid_text
    assert text(b"d0e151700a5c0001") == "GPU-d0e151700a5c0001"
    assert text(bytes(range(200, 216))) == f"GPU-{bytes(range(200, 216)).hex()}"
    for none in (bytes(16), b"0" * 16, b"XX" + bytes(14)):
        assert text(none) == ""


def test_devices_with_one_number_are_told_apart() -> None:
    module = importlib.import_module("devipc_hip.backend")
    info = importlib.import_module("devipc.spi").DeviceInfo
    found = module._unambiguous([info("GPU-1", 0, "a", "0:1"), info("GPU-1", 1, "a", "0:2"), info("GPU-2", 2, "a")])
    assert [each.uuid for each in found] == ["GPU-1/0:1", "GPU-1/0:2", "GPU-2"]


@pytest.mark.long
@simulated()
def test_the_callers_device_stays(device: Any, sim: Any) -> None:
    hip().hipSetDevice(1)
    device.transfer.memory_info()
    assert current() == 1
    with device.context:
        assert current() == 0
        with device.context:
            assert current() == 0
        assert current() == 0
    with pytest.raises(DriverError):
        device.transfer.unregister_host(device.transfer.register_host(4096, 4096))
    assert current() == 1
    seen: list[int] = []

    def work() -> None:
        device.transfer.memory_info()
        seen.append(current())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [0]


@pytest.mark.long
@simulated()
def test_a_failure_is_not_left_to_the_framework(device: Any, sim: Any) -> None:
    """torch asks for the thread's last error behind each kernel, and would take ours for its own."""
    sim.inject("hipMemGetInfo@1=999")
    with pytest.raises(DriverError):
        device.transfer.memory_info()
    assert int(hip().hipPeekAtLastError()[0]) == 0
    marker = device.transfer.create_marker()
    stream = device.transfer.create_stream()
    sim.stall()
    device.transfer.record(marker, stream)
    assert not device.transfer.query_marker(marker)
    assert int(hip().hipPeekAtLastError()[0]) == 0
    sim.stall(False)
    device.transfer.destroy_marker(marker)
    device.transfer.destroy_stream(stream)


@pytest.mark.long
@simulated()
def test_a_closed_device_says_so(device: Any, sim: Any) -> None:
    device.close()
    device.close()
    with pytest.raises(ClosedError, match="open_device"):
        device.transfer.memory_info()


@pytest.mark.long
@simulated()
def test_after_a_fork_everything_is_refused(device: Any, sim: Any) -> None:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            device.transfer.memory_info()
        except ForkError as error:
            code = 0 if "spawn" in str(error) else 2
        except BaseException:
            code = 3
        try:
            backend().devices()
        except ForkError:
            device.close()  # may run as a finaliser: silent
        else:
            code = 4
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.long
@simulated()
def test_an_unknown_status_keeps_its_number(device: Any, sim: Any) -> None:
    sim.inject("hipMemGetInfo@1=12345")
    with pytest.raises(DriverError) as caught:
        device.transfer.memory_info()
    assert caught.value.status is not None
    assert caught.value.status.value == 12345
    assert caught.value.device == device.info.uuid
    device.transfer.memory_info()


@pytest.mark.long
@simulated(bare=True)
def test_a_lost_device_is_a_device_lost_error(sim: Any) -> None:
    device = backend().open_device()
    stream = device.transfer.create_stream()
    sim.lose(0, 719)
    for _ in range(2):
        with pytest.raises(DeviceLostError) as caught:
            device.transfer.synchronize_stream(stream)
        assert caught.value.status is not None
        assert caught.value.status.value == 719
    device.close()


@pytest.mark.long
@pytest.mark.parametrize("status", [35, 100])
@simulated(bare=True)
def test_failures_name_their_layer(status: int, sim: Any) -> None:
    sim.inject(f"hipInit@*={status}")
    with pytest.raises(CapabilityError) as caught:
        backend().devices()
    assert f"layer '{'device' if status == 100 else 'initialisation'}'" in str(caught.value)
    assert "libamdhip64" in str(caught.value)
    assert caught.value.remedy
    assert str(status) in backend().facts()["error"]


@pytest.mark.long
@simulated(bare=True, devices=0)
def test_a_runtime_without_devices(sim: Any) -> None:
    with pytest.raises(CapabilityError, match="layer 'device'") as caught:
        backend().devices()
    assert "/dev/kfd" in caught.value.remedy


@simulated(bare=True, DEVSIM_DRIVER_VERSION=50_221_153)
def test_runtimes_below_6_are_refused(sim: Any) -> None:
    with pytest.raises(CapabilityError, match=r"HIP runtime 5.2 is older than 6.0, and the bindings") as caught:
        backend().devices()
    assert caught.value.code == "old_runtime"
    assert "6.0 or newer" in caught.value.remedy
    assert "5.2" in backend().facts()["error"]
    assert sim.calls("hipInit") == 0


def run(code: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=40)


LIST_DEVICES = """
from devipc_hip.plugin import devipc_backend
from devipc.spi import CapabilityError
backend = devipc_backend()
try:
    backend.devices()
except CapabilityError as error:
    print(error)
"""


def nowhere() -> dict[str, str]:
    """A process that finds no runtime, unless the machine has one where the loader looks."""
    if any(os.path.exists(path) for path in ("/lib/libamdhip64.so", "/usr/lib/libamdhip64.so", "/opt/rocm/lib")):
        pytest.skip("this machine has a HIP runtime")
    kept = {name: value for name, value in os.environ.items() if name not in ("LD_LIBRARY_PATH", "ROCM_PATH")}
    return python_path({**kept, "ROCM_PATH": "/nonexistent"})


def test_without_a_library_the_layer_is_named() -> None:
    done = run(LIST_DEVICES + 'assert backend.facts()["libamdhip64"] == "not loaded"', nowhere())
    assert done.returncode == 0, done.stderr
    assert "layer 'library'" in done.stdout
    assert "ROCM_PATH" in done.stdout
    assert done.stderr == ""


@pytest.mark.long
def test_a_real_runtime_without_a_device_is_told_apart(tmp_path: Path) -> None:
    """Debian's, which is 5.2.3 in Debian 12: too old; a newer one finds no device."""
    library = next(Path("/usr/lib").glob("*/libamdhip64.so.[0-9]"), None)
    if library is None:
        is_missing("no libamdhip64 of the distribution", "libamdhip64-5")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libamdhip64.so").symlink_to(library)
    done = run(LIST_DEVICES, python_path({**os.environ, "ROCM_PATH": str(tmp_path)}))
    assert done.returncode == 0, done.stderr
    assert "layer 'runtime'" in done.stdout or "layer 'device'" in done.stdout, done.stdout
    assert "remedy" in done.stdout


def test_without_bindings_the_layer_is_named() -> None:
    done = run("import sys; sys.modules['rocm.bindings'] = None\n" + LIST_DEVICES, nowhere())
    assert "layer 'bindings'" in done.stdout, done.stderr
    assert "pip install 'hip-python" in done.stdout


@pytest.mark.long
def test_the_command_line_survives_a_missing_library() -> None:
    command = [sys.executable, "-m", "devipc", "backends", "--json"]
    done = subprocess.run(command, env=nowhere(), capture_output=True, text=True, timeout=50)
    assert "hip" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


PREFER_LOADED = """
import ctypes, os
loaded = ctypes.CDLL(os.environ.pop("ROCM_PATH") + "/lib/libamdhip64.so")
os.environ["ROCM_PATH"] = os.environ["OTHER"]
from devipc_hip.backend import HipBackend
backend = HipBackend()
print(len(backend.devices()), backend.facts()["libamdhip64"].count("/lib/"), "mix" in backend.facts())
"""


@pytest.mark.long
@pytest.mark.simulator
def test_the_copy_that_is_loaded_already_is_used() -> None:
    other = environment({"missing": ["hipMemcpyBatchAsync"]})["ROCM_PATH"]
    done = run(PREFER_LOADED, {**environment({}), "OTHER": other})
    assert done.stdout.split() == ["2", "1", "False"], done.stderr


END_WITHOUT_CLOSING = """
from devipc_hip.backend import HipBackend
device = HipBackend().open_device()
kept = device.memory.allocate(4096, zero=True)
stream = device.transfer.create_stream()
marker = device.transfer.create_marker()
import atexit
atexit.register(device.close)
"""


@pytest.mark.long
@pytest.mark.simulator
def test_a_process_may_end_without_closing() -> None:
    done = run(END_WITHOUT_CLOSING, environment({}))
    assert (done.returncode, done.stderr) == (0, "")


def test_importing_the_plugin_loads_nothing() -> None:
    code = "import sys, devipc_hip.plugin; print({'rocm', 'numpy', 'torch'} & {m.split('.')[0] for m in sys.modules})"
    assert run(code, nowhere()).stdout.strip() == "set()"
