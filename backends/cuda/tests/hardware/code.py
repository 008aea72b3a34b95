"""Device code for the checks that need some, as text: kernels that do nothing, and one that faults.

The library itself launches no kernel.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["launch", "load", "load_module"]

_HEAD = ".version 7.0\n.target sm_50\n.address_size 64\n"
_NOTHING = ".visible .entry %s()\n{\n    ret;\n}\n"
_FAULT = """.visible .entry %s()
{
    .reg .b64 %%a;
    .reg .b32 %%v;
    mov.u64 %%a, 16;
    mov.u32 %%v, 1;
    st.global.u32 [%%a], %%v;
    ret;
}
"""


def load_module(name: str, *, faulting: bool = False) -> Any:
    """Load a module with the one kernel ``name``. The context is current."""
    driver = importlib.import_module("devipc_cuda.driver")
    text = _HEAD + (_FAULT if faulting else _NOTHING) % name
    return driver.call("cuModuleLoadData", text.encode() + b"\0")


def load(name: str, *, faulting: bool = False) -> Any:
    """Load a module with the one kernel ``name``; return the kernel. The context is current."""
    driver = importlib.import_module("devipc_cuda.driver")
    return driver.call("cuModuleGetFunction", load_module(name, faulting=faulting), name.encode())


def launch(kernel: Any, stream: Any) -> None:
    """Launch one thread of ``kernel``. The context is current."""
    driver = importlib.import_module("devipc_cuda.driver")
    driver.call("cuLaunchKernel", kernel, 1, 1, 1, 1, 1, 1, 0, stream.native, 0, 0)
