"""Everything that can be done wrong, each in a process of its own: it ends in a typed error, and the process goes on.

A process that died of a signal would have a negative exit status.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devipc.errors import UsageError
from devipc.integrations import BufferView, describe

NEEDS_TORCH = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")

PRELUDE = """
import gc, os, sys
import numpy as np
from devipc.errors import DevIPCError
from devipc.integrations import ForeignBuffer, ViewKeeper, describe
from devipc.memfd import SharedMap, create_memfd
from devipc.types import DeviceInfo

fd = create_memfd("test", 1 << 16)
map_ = SharedMap(fd, 1 << 16)
ended = []
keeper = ViewKeeper(lambda: (ended.append(1), map_.close()))
HOST, CARD = DeviceInfo("h", 0, "host", dlpack_type=1), DeviceInfo("c", 0, "card", dlpack_type=2)

def buffer(device=HOST, **options):
    return ForeignBuffer(ptr=map_.address, dtype="float32", shape=(4, 4), device=device, keeper=keeper, **options)

def refused(call, *args, **options):
    try:
        call(*args, **options)
    except DevIPCError as error:
        assert error.remedy, error
        return type(error).__name__
    raise SystemExit("not refused")

def in_fork(check):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if check() else 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""

CASES = {
    "closed_map": ("keeper.release(); print(refused(lambda: map_.view), ended)", "ClosedError [1]"),
    "closed_keeper": ("keeper.release(); print(refused(buffer))", "ClosedError"),
    "released_twice": ("keeper.release(); print(refused(keeper.release))", "UsageError"),
    "closed_under_a_view": (
        "view = buffer().to_numpy(); keeper.release(); view[:] = 3; print(view.sum(), ended); del view; print(ended)",
        "48.0 []\n[1]",
    ),
    "closed_mmap": (
        "import mmap; m = mmap.mmap(-1, 4096); m.close(); print(refused(describe, m))",
        "UsageError",
    ),
    "released_memoryview": ("m = memoryview(b'xy'); m.release(); print(refused(describe, m))", "UsageError"),
    "a_class": ("print(refused(describe, np.ndarray), refused(describe, ForeignBuffer))", "UsageError UsageError"),
    "a_module": ("print(refused(describe, sys))", "UsageError"),
    "device_memory_on_the_host": (
        "print(refused(buffer(CARD).to_numpy)); r = []\n"
        "for take in (np.asarray, np.from_dlpack):\n"
        "    try: r.append(np.asarray(take(buffer(CARD))).dtype.kind)\n"
        "    except (RuntimeError, BufferError): r.append('refused')\n"  # which of the two depends on numpy
        "print(r)",
        "CapabilityError\n['O', 'refused']",
    ),
    "written_though_read_only": (
        "view = buffer(readonly=True).to_numpy()\ntry: view[0] = 1\nexcept ValueError: print('ValueError')",
        "ValueError",
    ),
    "forked_buffer": (
        "b = buffer()\n"
        "print(in_fork(lambda: [refused(call) for call in (b.to_numpy, b.__dlpack__, buffer, keeper.acquire,"
        " lambda: b.__array_interface__)] == ['ForkError'] * 5))\n"
        "print(b.to_numpy().shape)",
        "0\n(4, 4)",
    ),
    "forked_views_die_in_the_child": (
        "views = [buffer().to_numpy(), np.from_dlpack(buffer())]; keeper.release()\n"
        "print(in_fork(lambda: (views.clear(), gc.collect(), not ended)[-1]))\n"
        "views[0][0, 0] = 5; print(views[1][0, 0], keeper.count, ended)",
        "0\n5.0 2 []",
    ),
    "forked_child_sees_the_registry": (
        "from devipc.registry import backend_names, load_backend\nbackend_names()\n"
        "print(in_fork(lambda: refused(load_backend, 'absent') == 'PluginError'))",
        "0",
    ),
    "views_at_exit": (
        "import builtins; builtins.kept = [buffer().to_numpy(), buffer().__dlpack__(), np.from_dlpack(buffer())]\n"
        "keeper.release(); print('end')",
        "end",
    ),
    "no_numpy": (
        "b = buffer(); sys.modules['numpy'] = None; print(refused(b.to_numpy), refused(b.__dlpack__))",
        "CapabilityError CapabilityError",
    ),
    "no_torch": ("sys.modules['torch'] = None; print(refused(buffer().to_torch))", "CapabilityError"),
    "no_descriptor_left": (
        "import resource; buffer().to_numpy(); resource.setrlimit(resource.RLIMIT_NOFILE, (4, 4))\n"
        "print(refused(create_memfd, 'test', 1), buffer().to_numpy().shape)",
        "ResourceExhausted (4, 4)",
    ),
}

TORCH_CASES = {
    "device_memory_that_this_build_lacks": (
        "import torch\nassert not torch.cuda.is_available(); print(refused(buffer(CARD).to_torch))",
        "CapabilityError",
    ),
    "tensors_at_exit": (
        "import builtins, torch\n"
        "builtins.kept = [buffer().to_torch(), torch.from_dlpack(buffer())]; keeper.release(); print('end')",
        "end",
    ),
    "tensors_die_on_a_thread_of_torch": (
        "import torch\n"
        "leaf = torch.ones(4, 4, requires_grad=True); held = torch.from_dlpack(buffer()); held[:] = 2\n"
        "product = (leaf * held).sum(); del held; keeper.release(); print(ended)\n"
        "product.backward(); print(leaf.grad.sum().item()); del product; gc.collect(); print(ended)",
        "[]\n32.0\n[1]",
    ),
    "forked_tensor": (
        "import torch\nviews = [buffer().to_torch(), torch.from_dlpack(buffer())]; b = buffer()\n"
        "print(in_fork(lambda: (views.clear(), gc.collect(), refused(b.to_torch) == 'ForkError')[-1]))\n"
        "print(keeper.count)",
        "0\n4",
    ),
    "torch_is_not_imported_for_others": (
        "describe(np.zeros(3)); describe(b'x'); buffer().to_numpy(); print('torch' in sys.modules)",
        "False",
    ),
}


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", PRELUDE + code], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    assert done.stderr == ""
    return done.stdout.strip()


@pytest.mark.parametrize("case", CASES)
def test_misuse_ends_in_a_typed_error(case: str) -> None:
    code, printed = CASES[case]
    assert run(code) == printed


@NEEDS_TORCH
@pytest.mark.parametrize("case", TORCH_CASES)
def test_misuse_of_tensors_ends_in_a_typed_error(case: str) -> None:
    code, printed = TORCH_CASES[case]
    assert run(code) == printed


def test_describing_imports_no_array_library() -> None:
    code = (
        "import sys; from devipc.integrations import describe; describe(b'x'); describe((4096, 1))\n"
        "print(sorted({'numpy', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout == "[]\n"


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=4)
    | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=6,
)
FIELDS = {
    "data": st.tuples(st.integers(-1, 2**64), st.booleans()) | JUNK,
    "shape": st.lists(st.integers(-1, 2**40), max_size=4).map(tuple) | JUNK,
    "strides": st.none() | st.lists(st.integers(-(2**40), 2**40).map(lambda n: 4 * n), max_size=4) | JUNK,
    "typestr": st.sampled_from(["<f4", "<f2", "|u1", ">i8", "|V2"]) | JUNK,
    "version": st.just(3) | JUNK,
    "mask": st.none() | JUNK,
    "stream": st.none() | JUNK,
}


@pytest.mark.once
@given(
    st.fixed_dictionaries({}, optional=FIELDS) | JUNK,
    st.sampled_from(["__cuda_array_interface__", "__array_interface__"]),
)
def test_any_nonsense_in_an_interface_is_described_or_refused(interface: Any, name: str) -> None:
    class Liar:
        pass

    liar = Liar()
    setattr(liar, name, interface)
    try:
        view = describe(liar)
    except UsageError:
        return
    assert isinstance(view, BufferView)
    assert 0 < view.span_ptr <= view.ptr < view.span_ptr + view.span_nbytes <= 2**64


@pytest.mark.parametrize("name", ["__dlpack__", "__cuda_array_interface__", "__array_interface__", "__dlpack_device__"])
def test_an_object_that_raises_when_asked_is_refused(name: str) -> None:
    def fail(self: object, *args: object, **options: object) -> Any:
        raise RuntimeError("ask me later")

    members = {name: property(fail)}
    if "dlpack" in name:
        members = {"__dlpack__": property(lambda self: fail), "__dlpack_device__": property(fail)}
    with pytest.raises(UsageError, match="ask me later"):
        describe(type("Moody", (), members)())
