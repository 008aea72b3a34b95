"""The CUDA backend: devices by identity, without a context, and one opened object for each.

Owns listing, identity, the facts that explain a failure, and the life of opened devices. Knows nothing of how memory,
completion or copies work.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from devipc.spi import Capability, CapabilityError, DeviceInfo, DevIPCError
from devipc_cuda import driver
from devipc_cuda.context import Context
from devipc_cuda.memory import CudaMemory
from devipc_cuda.sync import CudaSync
from devipc_cuda.transfer import CudaTransfer

__all__ = ["CudaBackend", "CudaDevice"]

_SETTINGS = (
    "CUDA_VISIBLE_DEVICES",
    "NVIDIA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "CUDA_MODULE_LOADING",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MPS_PIPE_DIRECTORY",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
)
_DLPACK_CUDA = 2
_COMPUTE_MODES = {0: "default", 2: "prohibited", 3: "exclusive process"}


class CudaDevice:
    """One opened device: memory, sync and transfer over the device's primary context.

    Made by :meth:`CudaBackend.open_device` only. All parts may be used from any thread.
    """

    def __init__(self, info: DeviceInfo) -> None:
        self._info = info
        self.context = Context(info.ordinal, info.uuid)
        self._memory = CudaMemory(self.context, wsl=is_wsl())
        self._sync = CudaSync(self.context)
        self._transfer = CudaTransfer(self.context)

    @property
    def info(self) -> DeviceInfo:
        """Identity of the device."""
        return self._info

    @property
    def memory(self) -> CudaMemory:
        """Memory IPC."""
        return self._memory

    @property
    def sync(self) -> CudaSync:
        """Sync IPC."""
        return self._sync

    @property
    def transfer(self) -> CudaTransfer:
        """Streams and copies."""
        return self._transfer

    def capabilities(self) -> Mapping[str, Capability]:
        """Return the answers for ``memory``, ``sync`` and ``transfer``: offered, to be proven by live checks."""
        offered = Capability.untested("offered by the driver; a live check decides")
        return {"memory": offered, "sync": offered, "transfer": offered}

    def close(self) -> None:
        """Give the context back. Idempotent. Mappings must be closed before."""
        self.context.close()

    @property
    def closed(self) -> bool:
        """True after :meth:`close`."""
        return self.context.closed


class CudaBackend:
    """NVIDIA devices through the CUDA driver API."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._opened: dict[str, CudaDevice] = {}

    @property
    def name(self) -> str:
        """``cuda``."""
        return "cuda"

    def facts(self) -> Mapping[str, str]:
        """Return versions of driver, kernel module and bindings, loaded libraries and settings; never raises."""
        facts = {"bindings": driver.bindings_version() or "not installed", "wsl": str(is_wsl()).lower()}
        facts.update({name: os.environ[name] for name in _SETTINGS if name in os.environ})
        facts["kernel_driver"] = _first_line("/proc/driver/nvidia/version")
        try:
            driver.initialize()
            version = int(driver.call("cuDriverGetVersion"))
            facts["driver"] = f"{version // 1000}.{version % 1000 // 10}"
            for info in self.devices():
                mode = driver.device_attribute("COMPUTE_MODE", driver.call("cuDeviceGet", info.ordinal))
                facts[f"compute_mode.{info.uuid}"] = _COMPUTE_MODES.get(-1 if mode is None else mode, "unknown")
        except DevIPCError as error:
            facts["error"] = str(error)
        facts["libcuda"] = ", ".join(driver.library_paths()) or "not loaded"
        return facts

    def devices(self) -> list[DeviceInfo]:
        """List the devices that this process can see; creates no context.

        Raises
        ------
        CapabilityError
            Names the layer that failed: bindings, library, initialisation or device.
        """
        try:
            driver.initialize()
            count = int(driver.call("cuDeviceGetCount"))
        except CapabilityError as error:
            if error.status is None:
                raise
            raise _layered(error) from error
        if count == 0:
            raise CapabilityError(
                "layer 'device': the driver is initialised and shows no device",
                code="no_device",
                remedy="check CUDA_VISIBLE_DEVICES"
                + (f" (now {visible!r})" if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None else ""),
                backend=self.name,
            )
        return [_device_info(ordinal) for ordinal in range(count)]

    def open_device(self, uuid: str | None = None) -> CudaDevice:
        """Open the device with this ``uuid`` (the first one when None); takes its primary context.

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
                remedy="make it visible with CUDA_VISIBLE_DEVICES",
                backend=self.name,
            )
        with self._lock:
            device = self._opened.get(info.uuid)
            if device is None or device.closed:
                device = self._opened[info.uuid] = CudaDevice(info)
            return device


def is_wsl() -> bool:
    """Return True on WSL, where the driver lacks parts of IPC whatever its attributes say."""
    return "microsoft" in _first_line("/proc/sys/kernel/osrelease").lower()


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()[0].strip()
    except (OSError, IndexError):
        return ""


def _layered(error: CapabilityError) -> CapabilityError:
    layer = "device" if error.code == "no_device" else "initialisation"
    paths = ", ".join(driver.library_paths()) or "libcuda.so.1"
    module = _first_line("/proc/driver/nvidia/version") or "not loaded"
    return CapabilityError(
        f"layer '{layer}': {error.message}; library {paths}, kernel driver: {module}",
        code=error.code,
        remedy=error.remedy,
        retryable=error.retryable,
        backend="cuda",
        status=error.status,
    )


def _device_info(ordinal: int) -> DeviceInfo:
    device = driver.call("cuDeviceGet", ordinal)
    name = _text(driver.call("cuDeviceGetName", 256, device))
    mig = " MIG " in f"{name} "
    raw = bytes(driver.call("cuDeviceGetUuid", device).bytes)
    return DeviceInfo(
        uuid=_uuid_text(raw, mig=mig),
        ordinal=ordinal,
        name=name,
        pci=_text(driver.call("cuDeviceGetPCIBusId", 32, device)).lower(),
        parent_uuid=_uuid_text(parent, mig=False) if mig and (parent := driver.parent_uuid(device)) else "",
        total_nbytes=int(driver.call("cuDeviceTotalMem", device)),
        dlpack_type=_DLPACK_CUDA,
    )


def _text(padded: Any) -> str:
    """Names come as bytes, padded after a NUL."""
    return bytes(padded).split(b"\0", 1)[0].decode("utf-8", "replace").strip()


def _uuid_text(raw: bytes, *, mig: bool) -> str:
    text = raw.hex()
    parts = (text[:8], text[8:12], text[12:16], text[16:20], text[20:])
    return ("MIG-" if mig else "GPU-") + "-".join(parts)
