"""The HIP backend: devices by identity, and one opened object for each.

Owns listing, identity, the facts that explain a failure, and the life of opened devices. Knows nothing of how memory,
completion or copies work.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from devipc.spi import Capability, CapabilityError, DeviceInfo, DevIPCError
from devipc_hip import driver
from devipc_hip.context import Context
from devipc_hip.memory import HipMemory
from devipc_hip.sync import HipSync
from devipc_hip.transfer import HipTransfer

__all__ = ["HipBackend", "HipDevice"]

_SETTINGS = (
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "CUDA_VISIBLE_DEVICES",
    "HSA_ENABLE_IPC_MODE_LEGACY",
    "HSA_OVERRIDE_GFX_VERSION",
    "GPU_STREAMOPS_CP_WAIT",
    "GPU_MAX_HW_QUEUES",
    "HIP_LAUNCH_BLOCKING",
    "AMD_SERIALIZE_COPY",
    "ROCM_PATH",
    "PYTORCH_HIP_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
)
_VISIBLE = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
_DLPACK_ROCM = 10
_HEX = frozenset("0123456789abcdef")


class HipDevice:
    """One opened device: memory, sync and transfer.

    Made by :meth:`HipBackend.open_device` only. All parts may be used from any thread.
    """

    def __init__(self, info: DeviceInfo) -> None:
        self._info = info
        self.context = Context(info.ordinal, info.uuid)
        self._memory = HipMemory(self.context)
        self._sync = HipSync(self.context)
        self._transfer = HipTransfer(self.context)

    @property
    def info(self) -> DeviceInfo:
        """Identity of the device."""
        return self._info

    @property
    def memory(self) -> HipMemory:
        """Memory IPC."""
        return self._memory

    @property
    def sync(self) -> HipSync:
        """Sync IPC."""
        return self._sync

    @property
    def transfer(self) -> HipTransfer:
        """Streams and copies."""
        return self._transfer

    def capabilities(self) -> Mapping[str, Capability]:
        """Return the answers for ``memory``, ``sync`` and ``transfer``: offered, to be proven by live checks."""
        offered = Capability.untested("offered by the runtime; a live check decides")
        return {"memory": offered, "sync": offered, "transfer": offered}

    def close(self) -> None:
        """Give back what this package made on the device. Idempotent. Mappings must be closed before."""
        if not self.context.closed:
            driver.quietly(self._sync.close)
            self.context.close()

    @property
    def closed(self) -> bool:
        """True after :meth:`close`."""
        return self.context.closed


class HipBackend:
    """AMD devices through the HIP runtime."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._opened: dict[str, HipDevice] = {}

    @property
    def name(self) -> str:
        """``hip``."""
        return "hip"

    def facts(self) -> Mapping[str, str]:
        """Return versions of runtime, kernel module and bindings, loaded libraries and settings; never raises."""
        facts = {"bindings": driver.bindings_version() or "not installed"}
        facts.update({name: os.environ[name] for name in _SETTINGS if name in os.environ})
        facts["kernel_driver"] = _kernel_driver()
        try:
            driver.initialize()
            facts["runtime"] = driver.version_text(driver.runtime_version())
            facts["driver"] = f"HIP runtime {facts['runtime']}"
        except DevIPCError as error:
            facts["error"] = str(error)
        paths = driver.library_paths()
        facts["libamdhip64"] = ", ".join(paths) or "not loaded"
        if len(paths) > 1:
            facts["mix"] = "more than one copy of the runtime is loaded; they do not know of each other"
        if sum(name in os.environ for name in _VISIBLE) > 1:
            facts["visibility"] = "several variables that hide devices are set; each counts what the one before it left"
        return facts

    def devices(self) -> list[DeviceInfo]:
        """List the devices that this process can see.

        Raises
        ------
        CapabilityError
            Names the layer that failed: bindings, library, runtime, initialisation or device.
        """
        try:
            driver.initialize()
            count = int(driver.call("hipGetDeviceCount"))
        except CapabilityError as error:
            if error.status is None:
                raise
            raise _layered(error) from error
        if count == 0:
            raise CapabilityError(
                "layer 'device': the runtime is initialised and shows no device",
                code="no_device",
                remedy="check " + " and ".join(_VISIBLE[:2]) + _set_variables(),
                backend=self.name,
            )
        return _unambiguous([_device_info(ordinal) for ordinal in range(count)])

    def open_device(self, uuid: str | None = None) -> HipDevice:
        """Open the device with this ``uuid`` (the first one when None).

        The same device again gives the same object, until it is closed.

        Raises
        ------
        CapabilityError
            When no such device is visible; lists those that are.
        """
        found = self.devices()
        info = next((info for info in found if uuid in (None, info.uuid)), None)
        if info is None:
            raise CapabilityError(
                f"no device {uuid} is visible to this process; visible: {', '.join(i.uuid for i in found)}",
                code="no_such_device",
                remedy="make it visible with HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES" + _set_variables(),
                backend=self.name,
            )
        with self._lock:
            device = self._opened.get(info.uuid)
            if device is None or device.closed:
                device = self._opened[info.uuid] = HipDevice(info)
            return device


def _set_variables() -> str:
    found = [f"{name}={os.environ[name]!r}" for name in _VISIBLE if name in os.environ]
    return f" (now {', '.join(found)})" if found else ""


def _kernel_driver() -> str:
    """Return the version of the kernel module; mainline's has none of its own."""
    try:
        return Path("/sys/module/amdgpu/version").read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        kernel = f"Linux {os.uname().release}"
        return f"amdgpu of {kernel}" if Path("/sys/module/amdgpu").exists() else "not loaded"


def _layered(error: CapabilityError) -> CapabilityError:
    layer = "device" if error.code == "no_device" else "initialisation"
    paths = ", ".join(driver.library_paths()) or "libamdhip64.so"
    return CapabilityError(
        f"layer '{layer}': {error.message}; library {paths}, kernel driver: {_kernel_driver()}",
        code=error.code,
        remedy=error.remedy,
        retryable=error.retryable,
        backend="hip",
        status=error.status,
    )


def _device_info(ordinal: int) -> DeviceInfo:
    pci = driver.text("hipDeviceGetPCIBusId", 32, ordinal).lower()
    return DeviceInfo(
        uuid=_uuid_text(driver.uuid_bytes(ordinal)) or f"PCI-{pci}",
        ordinal=ordinal,
        name=driver.text("hipDeviceGetName", 256, ordinal),
        pci=pci,
        total_nbytes=int(driver.call("hipDeviceTotalMem", ordinal)),
        dlpack_type=_DLPACK_ROCM,
    )


def _uuid_text(raw: bytes) -> str:
    """Return ``GPU-`` and hexadecimal digits, empty for a device without a number.

    The runtime gives 16 digits as text, and a text without digits for devices that have no number.
    """
    text = raw.split(b"\0", 1)[0].decode("latin-1").lower()
    if text and set(text) <= _HEX and len(text) == len(raw):
        return f"GPU-{text}" if text.strip("0") else ""
    if not any(raw) or (raw.isascii() and raw.rstrip(b"\0").isalnum()):
        return ""
    return f"GPU-{raw.hex()}"


def _unambiguous(found: list[DeviceInfo]) -> list[DeviceInfo]:
    """Tell devices with one number apart, as the parts of a partitioned one may be, by their bus address."""
    times = Counter(info.uuid for info in found)
    return [
        info
        if times[info.uuid] == 1
        else DeviceInfo(
            f"{info.uuid}/{info.pci}", info.ordinal, info.name, info.pci, "", info.total_nbytes, info.dlpack_type
        )
        for info in found
    ]
