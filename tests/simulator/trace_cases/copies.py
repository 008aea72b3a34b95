"""Cases: copies and fills with edge sizes, pitches and addresses."""

from __future__ import annotations

import ctypes
from typing import Any

from cuda.bindings import driver as cu

from .world import MIB, World, case, isolated, need

HOST = cu.CUmemorytype.CU_MEMORYTYPE_HOST
DEVICE = cu.CUmemorytype.CU_MEMORYTYPE_DEVICE


@case
def copy_to_device(w: World) -> object:
    pointer, data = w.alloc(1000), bytes(5000)
    return {
        "whole": cu.cuMemcpyHtoD(pointer, data, 1000),
        "one_more": cu.cuMemcpyHtoD(pointer, data, 1001),
        "padding": cu.cuMemcpyHtoD(pointer, data, 1024),
        "beyond_padding": cu.cuMemcpyHtoD(pointer, data, 1025),
        "offset_end": cu.cuMemcpyHtoD(pointer + 999, data, 1),
        "offset_past": cu.cuMemcpyHtoD(pointer + 999, data, 2),
        "zero": cu.cuMemcpyHtoD(pointer, data, 0),
        "zero_null": cu.cuMemcpyHtoD(0, data, 0),
        "null": cu.cuMemcpyHtoD(0, data, 10),
        "freed": cu.cuMemcpyHtoD(w.freed(), data, 10),
    }


@case
def copy_big_past_end(w: World) -> object:
    pointer, data = w.alloc(4 * MIB), bytes(64)
    odd = w.alloc(3 * MIB + 1)
    return {
        "last": cu.cuMemcpyHtoD(pointer + 4 * MIB - 64, data, 64),
        "past": cu.cuMemcpyHtoD(pointer + 4 * MIB - 63, data, 64),
        "odd_last": cu.cuMemcpyHtoD(odd + 3 * MIB, data, 1),
        "odd_past": cu.cuMemcpyHtoD(odd + 3 * MIB, data, 2),
    }


@case
def copy_to_host(w: World) -> object:
    pointer, out = w.alloc(1000), bytearray(5000)
    return {
        "whole": cu.cuMemcpyDtoH(out, pointer, 1000),
        "past": cu.cuMemcpyDtoH(out, pointer, 1001),
        "null": cu.cuMemcpyDtoH(out, 0, 10),
        "zero": cu.cuMemcpyDtoH(out, pointer, 0),
    }


@case
def copy_unified(w: World) -> object:
    pointer, other, pinned = w.alloc(1000), w.alloc(1000), w.pinned(4096)
    a, b = ctypes.create_string_buffer(64), ctypes.create_string_buffer(64)
    return {
        "device_device": cu.cuMemcpyAsync(other, pointer, 1000, w.stream),
        "past": cu.cuMemcpyAsync(other, pointer, 1001, w.stream),
        "device_host": cu.cuMemcpyAsync(ctypes.addressof(a), pointer, 64, w.stream),
        "host_host": cu.cuMemcpyAsync(ctypes.addressof(a), ctypes.addressof(b), 64, w.stream),
        "pinned": cu.cuMemcpyAsync(pinned, pointer, 1000, w.stream),
        "pinned_past": cu.cuMemcpyAsync(pinned, w.alloc(8192), 4097, w.stream),
        "zero": cu.cuMemcpyAsync(other, pointer, 0, w.stream),
        "null": cu.cuMemcpyAsync(0, pointer, 10, w.stream),
        "host_as_device": cu.cuMemcpyDtoDAsync(pointer, ctypes.addressof(a), 64, w.stream),
        "sync": cu.cuStreamSynchronize(w.stream),
    }


@case
def copy_over_two_registrations(w: World) -> object:
    area, device = w.pages(32768), w.alloc(32768)
    need(cu.cuMemHostRegister(area, 8192, 3))
    need(cu.cuMemHostRegister(area + 8192, 8192, 3))
    answers = {
        "inside": cu.cuMemcpyHtoDAsync(device, area, 8192, w.stream),
        "over": cu.cuMemcpyHtoDAsync(device, area + 4096, 8192, w.stream),
        "into_unregistered": cu.cuMemcpyHtoDAsync(device, area + 8192, 16384, w.stream),
        "from_unregistered": cu.cuMemcpyHtoDAsync(device, area + 16384, 8192, w.stream),
        "sync": cu.cuStreamSynchronize(w.stream),
    }
    cu.cuMemHostUnregister(area)
    cu.cuMemHostUnregister(area + 8192)
    return answers


@case
def copy_over_two_allocations(w: World) -> object:
    """Two classic allocations that lie side by side, and two mapped chunks."""
    first, second = sorted((w.alloc(512), w.alloc(512)))
    chunks, out = w.mapped(2), bytearray(4096)
    return {
        "chunks": cu.cuMemcpyDtoH(out, chunks + 2 * MIB - 2048, 4096),
        "adjacent": second - first == 512,
        "classic": cu.cuMemcpyDtoH(out, first, 1024) if second - first == 512 else "apart",
    }


def plane(w: World, **fields: Any) -> Any:
    """A valid 2D copy of 4 rows of 256 bytes from device to device, with fields replaced."""
    p = cu.CUDA_MEMCPY2D()
    p.srcMemoryType = p.dstMemoryType = DEVICE
    p.WidthInBytes, p.Height, p.srcPitch, p.dstPitch = 256, 4, 512, 1024
    for name, value in fields.items():
        setattr(p, name, value)
    return p


@case
def copy_2d(w: World) -> object:
    src, dst, pinned = w.alloc(2048), w.alloc(4096), w.pinned(4096)
    base = {"srcDevice": src, "dstDevice": dst}
    changes: dict[str, dict[str, Any]] = {
        "good": {}, "width_0": {"WidthInBytes": 0}, "height_0": {"Height": 0}, "pitch_small": {"srcPitch": 255},
        "dst_pitch_small": {"dstPitch": 255}, "pitch_0": {"srcPitch": 0}, "rows_past": {"Height": 5},
        "x_in_pitch": {"srcXInBytes": 256}, "x_past_pitch": {"srcXInBytes": 257}, "y": {"srcY": 0, "dstY": 1},
        "y_in": {"Height": 3, "dstY": 1}, "width_wide": {"WidthInBytes": 513, "Height": 1},
        "one_row_small_pitch": {"Height": 1, "srcPitch": 100}, "null": {"srcDevice": 0},
        "last_row_exact": {"Height": 4, "srcXInBytes": 256},
    }  # fmt: skip
    found = {name: cu.cuMemcpy2DAsync(plane(w, **{**base, **change}), w.stream) for name, change in changes.items()}
    host = {"srcDevice": src, "dstMemoryType": HOST, "dstHost": pinned}
    found["to_pinned"] = cu.cuMemcpy2DAsync(plane(w, **host), w.stream)
    found["to_pinned_past"] = cu.cuMemcpy2DAsync(plane(w, **host, dstPitch=2048), w.stream)
    unified = {"srcDevice": src, "dstMemoryType": cu.CUmemorytype.CU_MEMORYTYPE_UNIFIED, "dstDevice": pinned}
    found["unified"] = cu.cuMemcpy2DAsync(plane(w, **unified), w.stream)
    found["sync"] = cu.cuStreamSynchronize(w.stream)
    return found


@case
def copy_2d_chunks(w: World) -> object:
    """A strided copy over mapped chunks, and over the border of a classic allocation."""
    chunks, dst = w.mapped(3), w.alloc(4096)
    over = plane(w, srcDevice=chunks + MIB, dstDevice=dst, Height=2, srcPitch=2 * MIB + 512)
    past = plane(w, srcDevice=chunks + MIB, dstDevice=dst, Height=4, srcPitch=2 * MIB)
    return [cu.cuMemcpy2DAsync(over, w.stream), cu.cuMemcpy2DAsync(past, w.stream), cu.cuStreamSynchronize(w.stream)]


def box(**fields: Any) -> Any:
    p = cu.CUDA_MEMCPY3D()
    p.srcMemoryType = p.dstMemoryType = DEVICE
    p.WidthInBytes, p.Height, p.Depth = 64, 2, 2
    p.srcPitch, p.srcHeight, p.dstPitch, p.dstHeight = 128, 4, 64, 2
    for name, value in fields.items():
        setattr(p, name, value)
    return p


@case
def copy_3d(w: World) -> object:
    src, dst = w.alloc(1024), w.alloc(256)
    base = {"srcDevice": src, "dstDevice": dst}
    changes: dict[str, dict[str, Any]] = {
        "good": {}, "depth_0": {"Depth": 0}, "layers_past": {"Depth": 3}, "height_small": {"srcHeight": 1},
        "pitch_small": {"srcPitch": 63}, "height_0": {"srcHeight": 0}, "lod": {"srcLOD": 1}, "z": {"srcZ": 1},
        "z_one": {"srcZ": 1, "Depth": 1},
    }  # fmt: skip
    found = {name: cu.cuMemcpy3DAsync(box(**{**base, **change}), w.stream) for name, change in changes.items()}
    found["sync"] = cu.cuStreamSynchronize(w.stream)
    return found


def attributes(order: int = 1, flags: int = 0) -> Any:
    found = cu.CUmemcpyAttributes()
    found.srcAccessOrder = cu.CUmemcpySrcAccessOrder(order)
    found.flags = flags
    return found


@case
def copy_batch(w: World) -> object:
    if not hasattr(cu, "cuMemcpyBatchAsync"):
        return "absent"
    src, dst = w.alloc(4096), w.alloc(4096)
    one = attributes()

    def batch(
        dsts: list[int], srcs: list[int], sizes: list[int], *, attrs: Any = None, starts: Any = None, stream: Any = None
    ) -> object:
        attrs = [one] if attrs is None else attrs
        starts = [0] if starts is None else starts
        to = [cu.CUdeviceptr(p) for p in dsts]
        source = [cu.CUdeviceptr(p) for p in srcs]
        return cu.cuMemcpyBatchAsync(to, source, sizes, len(sizes), attrs, starts, len(attrs), stream or w.stream)

    return {
        "good": batch([dst, dst + 100], [src, src + 200], [100, 50]),
        "empty": batch([], [], []),
        "null_stream": batch([dst], [src], [10], stream=w.null),
        "size_0": batch([dst, dst + 100], [src, src + 200], [100, 0]),
        "past": batch([dst + 4000], [src], [100]),
        "no_attributes": batch([dst], [src], [10], attrs=[], starts=[]),
        "start_1": batch([dst, dst + 10], [src, src + 10], [10, 10], starts=[1]),
        "two_rules": batch([dst, dst + 10], [src, src + 10], [10, 10], attrs=[one, attributes(3)], starts=[0, 1]),
        "two_rules_equal": batch([dst, dst + 10], [src, src + 10], [10, 10], attrs=[one, one], starts=[0, 0]),
        "overlap_flag": batch([dst], [src], [10], attrs=[attributes(1, 1)]),
        "sync": cu.cuStreamSynchronize(w.stream),
    }


@case
def fill(w: World) -> object:
    pointer = w.alloc(1000)
    pinned = w.pinned(4096)
    plain = ctypes.create_string_buffer(64)
    return {
        "good": cu.cuMemsetD8Async(pointer, 1, 1000, w.stream),
        "past": cu.cuMemsetD8Async(pointer, 1, 1001, w.stream),
        "zero": cu.cuMemsetD8Async(pointer, 1, 0, w.stream),
        "null": cu.cuMemsetD8Async(0, 1, 1, w.stream),
        "d32": cu.cuMemsetD32Async(pointer, 1, 250, w.stream),
        "d32_misaligned": cu.cuMemsetD32Async(pointer + 2, 1, 10, w.stream),
        "d32_past": cu.cuMemsetD32Async(pointer, 1, 251, w.stream),
        "pinned": cu.cuMemsetD8Async(pinned, 1, 10, w.stream),
        "plain": cu.cuMemsetD8Async(ctypes.addressof(plain), 1, 10, w.stream),
        "2d": cu.cuMemsetD2D8Async(pointer, 100, 1, 50, 10, w.stream),
        "2d_pitch_small": cu.cuMemsetD2D8Async(pointer, 40, 1, 50, 10, w.stream),
        "sync": cu.cuStreamSynchronize(w.stream),
    }


@isolated
def copy_without_access(w: World) -> object:
    """Mapped memory whose access was never granted."""
    start, out = w.mapped(1, access=False), bytearray(64)
    return [cu.cuMemcpyDtoH(out, start, 64), cu.cuMemsetD8(start, 0, 64), cu.cuCtxSynchronize()]


@isolated
def copy_unmapped_reservation(w: World) -> object:
    start, out = w.reserve(2 * MIB), bytearray(64)
    return [cu.cuMemcpyDtoH(out, start, 64), cu.cuMemcpyHtoD(start, bytes(64), 64), cu.cuCtxSynchronize()]


@isolated
def copy_with_bogus_stream(w: World) -> object:
    pointer, other = w.alloc(100), w.alloc(100)
    return cu.cuMemcpyDtoDAsync(pointer, other, 100, cu.CUstream(0x1234560))
