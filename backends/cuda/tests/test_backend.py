"""Devices by identity, contexts left alone, failures by layer, forks refused, ends without a crash."""

from __future__ import annotations

import ctypes
import importlib
import os
import subprocess
import sys
import threading
from typing import Any

import pytest

from devipc.spi import CapabilityError, DeviceLostError, DriverError, ForkError

from .peers import Channel, environment, peer, python_path, simulated


def backend() -> Any:
    from devipc_cuda.backend import CudaBackend

    return CudaBackend()


def current_context() -> int:
    cu = importlib.import_module("cuda.bindings.driver")
    return int(cu.cuCtxGetCurrent()[1])


@simulated(bare=True)
def test_listing_makes_no_context(sim: Any) -> None:
    first, second = backend().devices()
    assert first.uuid.startswith("GPU-")
    assert len(first.uuid) == 40
    assert first.uuid != second.uuid
    assert (first.ordinal, second.ordinal) == (0, 1)
    assert first.pci.count(":") == 2
    assert first.total_nbytes == 8 * 2**30
    assert not first.parent_uuid
    backend().facts()
    assert sim.counter("live_contexts") == 0
    assert sim.calls("cuDevicePrimaryCtxRetain") == 0


@simulated(bare=True, CUDA_VISIBLE_DEVICES="1,0")
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
    with pytest.raises(CapabilityError, match=f"visible: {first.uuid}, {second.uuid}"):
        made.open_device("GPU-elsewhere")


@simulated(bare=True, slices=2, devices=1)
def test_slices_have_their_own_identity(sim: Any) -> None:
    first, second = backend().devices()
    assert first.uuid.startswith("MIG-")
    assert first.uuid != second.uuid
    assert first.parent_uuid == second.parent_uuid
    assert first.parent_uuid.startswith("GPU-")
    assert first.parent_uuid[4:] not in (first.uuid[4:], second.uuid[4:])


@simulated()
def test_the_callers_context_stays(device: Any, sim: Any) -> None:
    other = backend().open_device(backend().devices()[1].uuid)
    assert current_context() == 0
    device.transfer.memory_info()
    assert current_context() == 0
    with other.context:
        theirs = current_context()
        assert theirs
        device.transfer.memory_info()
        assert current_context() == theirs
        with pytest.raises(DriverError):
            device.transfer.unregister_host(device.transfer.register_host(4096, 4096))
        assert current_context() == theirs
    assert current_context() == 0
    other.close()


@simulated()
def test_any_thread_may_call(device: Any, sim: Any) -> None:
    seen: list[object] = []

    def work() -> None:
        seen.append(device.transfer.memory_info().total_nbytes)
        seen.append(current_context())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [8 * 2**30, 0]


@simulated()
def test_a_closed_device_says_so(device: Any, sim: Any) -> None:
    from devipc.spi import ClosedError

    device.close()
    device.close()
    with pytest.raises(ClosedError, match="open_device"):
        device.transfer.memory_info()
    assert sim.counter("live_contexts") == 0


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


@simulated(bare=True)
def test_a_fork_before_first_use_is_fine(sim: Any) -> None:
    made = backend()
    pid = os.fork()
    if pid == 0:
        os._exit(0 if len(made.devices()) == 2 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@simulated()
def test_an_unknown_status_keeps_its_number(device: Any, sim: Any) -> None:
    sim.inject("cuMemGetInfo_v2@1=12345")
    with pytest.raises(DriverError) as caught:
        device.transfer.memory_info()
    assert caught.value.status is not None
    assert caught.value.status.value == 12345
    assert caught.value.device == device.info.uuid
    device.transfer.memory_info()


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


@pytest.mark.parametrize(
    ("status", "layer", "words"),
    [
        (34, "initialisation", "stub"),
        (46, "initialisation", "compute mode"),
        (100, "device", "CUDA_VISIBLE_DEVICES"),
        (802, "initialisation", "fabricmanager"),
        (803, "initialisation", "does not fit the kernel driver"),
        (804, "initialisation", "libcuda.so.1"),
    ],
)
@simulated(bare=True)
def test_failures_name_their_layer(status: int, layer: str, words: str, sim: Any) -> None:
    sim.inject(f"cuInit@*={status}")
    with pytest.raises(CapabilityError) as caught:
        backend().devices()
    assert f"layer '{layer}'" in str(caught.value)
    assert words in str(caught.value)
    assert caught.value.status is not None
    assert caught.value.status.value == status
    facts = backend().facts()
    assert str(status) in facts["error"]
    assert "libcuda" in facts["libcuda"]


@simulated(bare=True, CUDA_VISIBLE_DEVICES="")
def test_no_visible_device_names_the_setting(sim: Any) -> None:
    with pytest.raises(CapabilityError, match=r"layer 'device'.*CUDA_VISIBLE_DEVICES"):
        backend().devices()
    assert backend().facts()["CUDA_VISIBLE_DEVICES"] == ""


def hold_device(device: Any, sim: Any, channel: Channel) -> None:
    channel.send("held")
    channel.receive()


@simulated(bare=True, compute_mode=3)
def test_exclusive_mode_names_the_setting(sim: Any) -> None:
    with peer(hold_device) as other:
        other.channel.receive()
        with pytest.raises(CapabilityError, match="compute mode") as caught:
            backend().open_device()
        assert caught.value.retryable
        assert caught.value.device.startswith("GPU-")
        other.channel.send()
    assert backend().facts()[f"compute_mode.{backend().devices()[0].uuid}"] == "exclusive process"


def run(code: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=40)


LIST_DEVICES = """
from devipc_cuda.plugin import devipc_backend
from devipc.spi import CapabilityError
backend = devipc_backend()
assert backend.facts()["libcuda"] == "not loaded"
try:
    backend.devices()
except CapabilityError as error:
    print(error)
"""


def test_without_a_library_the_layer_is_named() -> None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        pass
    else:
        pytest.skip("this machine has a driver")
    env = python_path({name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"})
    done = run(LIST_DEVICES, env)
    assert "layer 'library'" in done.stdout, done.stderr
    assert "no_library" not in done.stderr


def test_without_bindings_the_layer_is_named() -> None:
    code = "import sys; sys.modules['cuda.bindings'] = None\n" + LIST_DEVICES
    done = run(code, python_path(dict(os.environ)))
    assert "layer 'bindings'" in done.stdout, done.stderr
    assert "pip install" in done.stdout


END_WITHOUT_CLOSING = """
from devipc_cuda.backend import CudaBackend
device = CudaBackend().open_device()
kept = device.memory.allocate(4096, zero=True)
stream = device.transfer.create_stream()
marker = device.transfer.create_marker()
import atexit
atexit.register(device.close)
"""


def test_a_process_may_end_without_closing() -> None:
    done = run(END_WITHOUT_CLOSING, environment({}))
    assert (done.returncode, done.stderr) == (0, "")


def test_importing_the_plugin_loads_nothing() -> None:
    code = "import sys, devipc_cuda.plugin; print({'cuda', 'numpy', 'torch'} & {m.split('.')[0] for m in sys.modules})"
    assert run(code, environment({})).stdout.strip() == "set()"
