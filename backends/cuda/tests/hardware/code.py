"""Device code for the checks that need some: kernels that do nothing, and one that faults. Text, made ready by the driver.

The library itself launches no kernel.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["launch", "load"]

_HEAD = ".version 7.0\n.target sm_50\n.address_size 64\n"
_NOTHING = ".visible .entry %s()\n{\n    ret;\n}\n"
_FAULT = ".visible .entry %s()\n{\n    .reg .b64 %%a;\n    .reg .b32 %%v;\n    mov.u64 %%a, 16;\n    mov.u32 %%v, 1;\n    st.global.u32 [%%a], %%v;\n    ret;\n}\n"


def load(name: str, *, faulting: bool = False) -> Any:
    """Load a module with the one kernel ``name``; return the kernel. The context is current."""
    driver = importlib.import_module("devipc_cuda.driver")
    text = _HEAD + (_FAULT if faulting else _NOTHING) % name
    module = driver.call("cuModuleLoadData", text.encode() + b"\0")
    return driver.call("cuModuleGetFunction", module, name.encode())


def launch(kernel: Any, stream: Any) -> None:
    """Launch one thread of ``kernel``. The context is current."""
    driver = importlib.import_module("devipc_cuda.driver")
    driver.call("cuLaunchKernel", kernel, 1, 1, 1, 1, 1, 1, 0, stream.native, 0, 0)
