"""What the traced calls stand on: a device, a context, a stream, and results as text.

Owns set-up, clean-up and the registry of cases; it knows no case.  It uses the
driver bindings alone, so that it runs the same on hardware and on the simulator.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuda.bindings import driver as cu

SCRIPT = Path(__file__).resolve().parent.parent / "trace_calls.py"
MIB = 1 << 20
CHILD_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Case:
    """One named observation; ``isolated`` ones run in a process of their own."""

    name: str
    run: Callable[[World], object]
    isolated: bool


CASES: dict[str, Case] = {}


def case(function: Callable[[World], object]) -> Callable[[World], object]:
    """Registers a case under its function's name."""
    CASES[function.__name__] = Case(function.__name__, function, False)
    return function


def isolated(function: Callable[[World], object]) -> Callable[[World], object]:
    """Registers a case that may break its context or its process."""
    CASES[function.__name__] = Case(function.__name__, function, True)
    return function


def text(value: object) -> object:
    """A result as JSON: the code's name for a driver's answer, facts as they are."""
    if isinstance(value, tuple) and value and isinstance(value[0], cu.CUresult):
        return str(value[0].name)
    if isinstance(value, cu.CUresult):
        return str(value.name)
    if isinstance(value, dict):
        return {str(key): text(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [text(item) for item in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return repr(value)


class Unexpected(RuntimeError):
    """A preparing call failed."""


def need(answer: tuple[Any, ...]) -> Any:
    """The values of a call that has to succeed."""
    if answer[0] != cu.CUresult.CUDA_SUCCESS:
        raise Unexpected(str(answer[0].name))
    return answer[1] if len(answer) == 2 else answer[1:]


def raw(handle: Any) -> bytes:
    """The 64 bytes of a handle object."""
    return ctypes.string_at(handle.getPtr(), 64)


def from_raw(kind: Any, data: bytes) -> Any:
    """A handle object that holds ``data``."""
    handle = kind()
    ctypes.memmove(handle.getPtr(), data, 64)
    return handle


class World:
    """A device with its primary context current, and helpers that clean up after a case."""

    def __init__(self, ordinal: int = 0) -> None:
        need(cu.cuInit(0))
        self.device = need(cu.cuDeviceGet(ordinal))
        self.context = need(cu.cuDevicePrimaryCtxRetain(self.device))
        need(cu.cuCtxSetCurrent(self.context))
        self.stream = need(cu.cuStreamCreate(1))
        self.null = cu.CUstream(0)
        self.undo = contextlib.ExitStack()

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Everything acquired inside is given back at the end."""
        self.undo = contextlib.ExitStack()
        with self.undo:
            yield
            cu.cuStreamSynchronize(self.stream)

    def alloc(self, nbytes: int) -> int:
        pointer = int(need(cu.cuMemAlloc(nbytes)))
        self.undo.callback(lambda: cu.cuMemFree(pointer))
        return pointer

    def freed(self) -> int:
        """An address that was an allocation; take it last, or a later one may get the address."""
        pointer = int(need(cu.cuMemAlloc(8 * MIB)))
        need(cu.cuMemFree(pointer))
        return pointer

    def managed(self, nbytes: int) -> int:
        pointer = int(need(cu.cuMemAllocManaged(nbytes, 1)))
        self.undo.callback(lambda: cu.cuMemFree(pointer))
        return pointer

    def pinned(self, nbytes: int) -> int:
        pointer = int(need(cu.cuMemHostAlloc(nbytes, 0)))
        self.undo.callback(lambda: cu.cuMemFreeHost(pointer))
        return pointer

    def pages(self, nbytes: int) -> int:
        """Page-aligned plain host memory."""
        import mmap

        area = mmap.mmap(-1, nbytes)
        view = (ctypes.c_char * nbytes).from_buffer(area)
        self.undo.callback(lambda: (view, area))
        return ctypes.addressof(view)

    def registered(self, nbytes: int, flags: int = 3) -> int:
        pointer = self.pages(nbytes)
        need(cu.cuMemHostRegister(pointer, nbytes, flags))
        self.undo.callback(lambda: cu.cuMemHostUnregister(pointer))
        return pointer

    def event(self, flags: int = 2) -> Any:
        event = need(cu.cuEventCreate(flags))
        self.undo.callback(lambda: cu.cuEventDestroy(event))
        return event

    def properties(self, types: int = 1) -> Any:
        properties = cu.CUmemAllocationProp()
        properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = int(self.device)
        properties.requestedHandleTypes = cu.CUmemAllocationHandleType(types)
        return properties

    def physical(self, nbytes: int = 2 * MIB, types: int = 1) -> Any:
        handle = need(cu.cuMemCreate(nbytes, self.properties(types), 0))
        self.undo.callback(lambda: cu.cuMemRelease(handle))
        return handle

    def reserve(self, nbytes: int) -> int:
        start = int(need(cu.cuMemAddressReserve(nbytes, 0, 0, 0)))
        self.undo.callback(lambda: cu.cuMemAddressFree(start, nbytes))
        return start

    def access(self, flags: int = 3, device: int | None = None) -> Any:
        description = cu.CUmemAccessDesc()
        description.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        description.location.id = int(self.device) if device is None else device
        description.flags = cu.CUmemAccess_flags(flags)
        return description

    def mapped(self, chunks: int = 1, *, access: bool = True, types: int = 1) -> int:
        """Chunks of 2 MiB side by side."""
        start = self.reserve(chunks * 2 * MIB)
        for i in range(chunks):
            at = start + i * 2 * MIB
            need(cu.cuMemMap(at, 2 * MIB, 0, self.physical(types=types), 0))
            self.undo.callback(cu.cuMemUnmap, at, 2 * MIB)
        if access:
            need(cu.cuMemSetAccess(start, chunks * 2 * MIB, [self.access()], 1))
        return start

    def pool_properties(self, types: int = 1, max_bytes: int = 0) -> Any:
        properties = cu.CUmemPoolProps()
        properties.allocType = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.handleTypes = cu.CUmemAllocationHandleType(types)
        properties.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = int(self.device)
        properties.maxSize = max_bytes
        return properties

    def pool(self, types: int = 1) -> Any:
        pool = need(cu.cuMemPoolCreate(self.pool_properties(types)))
        self.undo.callback(lambda: cu.cuMemPoolDestroy(pool))
        return pool

    def pooled(self, nbytes: int, pool: Any) -> int:
        pointer = int(need(cu.cuMemAllocFromPoolAsync(nbytes, pool, self.stream)))
        self.undo.callback(lambda: (cu.cuMemFreeAsync(pointer, self.stream), cu.cuStreamSynchronize(self.stream)))
        need(cu.cuStreamSynchronize(self.stream))
        return pointer

    def fd(self, descriptor: int) -> int:
        """Closes ``descriptor`` at the end of the case."""
        self.undo.callback(lambda: os.close(descriptor))
        return descriptor

    def without_context(self, call: Callable[[], object]) -> object:
        """The answer on a thread that has no current context."""
        answers: list[object] = []

        def run() -> None:
            try:
                answers.append(call())
            except Exception as error:  # the binding's own refusal is an answer too
                answers.append(f"{type(error).__name__}")

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        return answers[0]

    def peer(self, name: str, *arguments: str, fds: tuple[int, ...] = ()) -> object:
        """The answer of peer case ``name`` in a second process."""
        return run_child(["--peer", name, *arguments], fds=fds)


def run_child(arguments: list[str], *, fds: tuple[int, ...] = ()) -> object:
    """What a child of the trace printed, or how it ended."""
    command = [sys.executable, str(SCRIPT), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CHILD_TIMEOUT_S, pass_fds=fds)
    except subprocess.TimeoutExpired:
        return "timeout"
    if done.returncode < 0:
        return f"signal {-done.returncode}"
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return f"exit {done.returncode}: {done.stderr.strip().splitlines()[-1:]}"
    return json.loads(lines[-1])
