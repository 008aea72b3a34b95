"""Cases: start-up, contexts, classic and host memory, pointers."""

from __future__ import annotations

import ctypes
from typing import Any

from cuda.bindings import driver as cu

from .world import MIB, World, case, isolated, need

A = cu.CUpointer_attribute


@case
def init_bad_flags(w: World) -> object:
    return cu.cuInit(1)


@case
def device_get_range(w: World) -> object:
    count = need(cu.cuDeviceGetCount())
    return [cu.cuDeviceGet(-1), cu.cuDeviceGet(count), cu.cuDeviceGetName(64, cu.CUdevice(count))]


@case
def device_peer_self(w: World) -> object:
    return {
        "code": cu.cuDeviceCanAccessPeer(w.device, w.device),
        "can": cu.cuDeviceCanAccessPeer(w.device, w.device)[1],
    }


@case
def fact_attributes(w: World) -> object:
    wanted: tuple[int, ...] = (
        20,
        41,
        83,
        86,
        88,
        89,
        91,
        92,
        93,
        94,
        98,
        99,
        100,
        101,
        102,
        103,
        113,
        115,
        119,
        122,
        123,
        124,
        125,
    )
    wanted += (128, 145)  # fmt: skip
    found = {}
    for number in wanted:
        try:
            attribute = cu.CUdevice_attribute(number)
        except ValueError:
            continue
        found[attribute.name] = need(cu.cuDeviceGetAttribute(attribute, w.device))
    return found


@case
def fact_memory(w: World) -> object:
    free, total = need(cu.cuMemGetInfo())
    return {"free_mib": free // MIB, "total_mib": total // MIB}


@case
def no_context(w: World) -> object:
    """Which calls need a current context on their thread."""
    small, event, pinned = w.alloc(100), w.event(), w.pinned(4096)
    shared = w.event(6)
    out = bytearray(100)
    fd_properties, pool_properties = w.properties(), w.pool_properties()
    start = w.reserve(2 * MIB)
    calls: dict[str, Any] = {
        "cuCtxGetCurrent": cu.cuCtxGetCurrent,
        "cuCtxGetDevice": cu.cuCtxGetDevice,
        "cuCtxSynchronize": cu.cuCtxSynchronize,
        "cuCtxPopCurrent": cu.cuCtxPopCurrent,
        "cuCtxSetCurrent_0": lambda: cu.cuCtxSetCurrent(cu.CUcontext(0)),
        "cuMemAlloc": lambda: cu.cuMemAlloc(100),
        "cuMemFree": lambda: cu.cuMemFree(small + 1),
        "cuMemGetInfo": cu.cuMemGetInfo,
        "cuMemGetAddressRange": lambda: cu.cuMemGetAddressRange(small),
        "cuPointerGetAttribute": lambda: cu.cuPointerGetAttribute(A.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, small),
        "cuPointerGetAttributes": lambda: cu.cuPointerGetAttributes(1, [A.CU_POINTER_ATTRIBUTE_MEMORY_TYPE], small),
        "cuMemcpyDtoH": lambda: cu.cuMemcpyDtoH(out, small, 100),
        "cuMemcpyDtoHAsync": lambda: cu.cuMemcpyDtoHAsync(pinned, small, 100, w.stream),
        "cuMemsetD8Async": lambda: cu.cuMemsetD8Async(small, 0, 100, w.stream),
        "cuMemHostAlloc": lambda: cu.cuMemHostAlloc(100, 0),
        "cuMemHostRegister": lambda: cu.cuMemHostRegister(pinned, 4096, 0),
        "cuMemHostUnregister": lambda: cu.cuMemHostUnregister(pinned),
        "cuMemHostGetDevicePointer": lambda: cu.cuMemHostGetDevicePointer(pinned, 0),
        "cuStreamCreate": lambda: cu.cuStreamCreate(1),
        "cuStreamSynchronize": lambda: cu.cuStreamSynchronize(w.stream),
        "cuStreamSynchronize_0": lambda: cu.cuStreamSynchronize(w.null),
        "cuStreamQuery": lambda: cu.cuStreamQuery(w.stream),
        "cuStreamQuery_0": lambda: cu.cuStreamQuery(w.null),
        "cuStreamIsCapturing": lambda: cu.cuStreamIsCapturing(w.stream),
        "cuStreamGetPriority": lambda: cu.cuStreamGetPriority(w.stream),
        "cuStreamWaitEvent": lambda: cu.cuStreamWaitEvent(w.stream, event, 0),
        "cuStreamWriteValue32": lambda: cu.cuStreamWriteValue32(w.stream, small, 1, 0),
        "cuEventCreate": lambda: cu.cuEventCreate(2),
        "cuEventQuery": lambda: cu.cuEventQuery(event),
        "cuEventSynchronize": lambda: cu.cuEventSynchronize(event),
        "cuEventRecord": lambda: cu.cuEventRecord(event, w.stream),
        "cuEventRecord_0": lambda: cu.cuEventRecord(event, w.null),
        "cuIpcGetMemHandle": lambda: cu.cuIpcGetMemHandle(small),
        "cuIpcGetEventHandle": lambda: cu.cuIpcGetEventHandle(shared),
        "cuIpcOpenMemHandle": lambda: cu.cuIpcOpenMemHandle(cu.CUipcMemHandle(), 1),
        "cuIpcOpenEventHandle": lambda: cu.cuIpcOpenEventHandle(cu.CUipcEventHandle()),
        "cuIpcCloseMemHandle": lambda: cu.cuIpcCloseMemHandle(small),
        "cuMemGetAllocationGranularity": lambda: cu.cuMemGetAllocationGranularity(
            fd_properties, cu.CUmemAllocationGranularity_flags(0)
        ),
        "cuMemCreate_bad_size": lambda: cu.cuMemCreate(1, fd_properties, 0),
        "cuMemAddressReserve_0": lambda: cu.cuMemAddressReserve(0, 0, 0, 0),
        "cuMemUnmap": lambda: cu.cuMemUnmap(start, 2 * MIB),
        "cuMemSetAccess": lambda: cu.cuMemSetAccess(start, 2 * MIB, [w.access()], 1),
        "cuMemRetainAllocationHandle": lambda: cu.cuMemRetainAllocationHandle(small),
        "cuDeviceGetDefaultMemPool": lambda: cu.cuDeviceGetDefaultMemPool(w.device),
        "cuMemAllocAsync": lambda: cu.cuMemAllocAsync(0, w.stream),
        "cuModuleLoadData": lambda: cu.cuModuleLoadData(b"junk\0"),
        "cuDevicePrimaryCtxGetState": lambda: cu.cuDevicePrimaryCtxGetState(w.device),
        "cuMemPoolCreate": lambda: pool_round(pool_properties),
    }
    return {name: w.without_context(call) for name, call in calls.items()}


def pool_round(properties: Any) -> object:
    answer = cu.cuMemPoolCreate(properties)
    if answer[0] == cu.CUresult.CUDA_SUCCESS:
        cu.cuMemPoolDestroy(answer[1])
    return answer


@case
def context_stack(w: World) -> object:
    answers = [cu.cuCtxPushCurrent(w.context), cu.cuCtxPopCurrent(), cu.cuCtxPushCurrent(cu.CUcontext(0))]
    return [*answers, need(cu.cuCtxGetCurrent()) is not None]


@isolated
def primary_released(w: World) -> object:
    small = int(need(cu.cuMemAlloc(100)))
    answers: list[object] = [cu.cuDevicePrimaryCtxRelease(w.device)]
    answers += [cu.cuMemAlloc(100), cu.cuCtxSynchronize(), cu.cuMemFree(small), cu.cuCtxGetDevice()]
    answers += [cu.cuDevicePrimaryCtxRelease(w.device), cu.cuStreamQuery(w.stream)]
    return answers


@isolated
def primary_again(w: World) -> object:
    need(cu.cuDevicePrimaryCtxRelease(w.device))
    again = cu.cuDevicePrimaryCtxRetain(w.device)
    return [again, int(again[1]) == int(w.context), cu.cuMemAlloc(100), cu.cuStreamQuery(w.stream)]


@case
def alloc_sizes(w: World) -> object:
    answers = [cu.cuMemAlloc(0), cu.cuMemAlloc(1 << 60), cu.cuMemAlloc(1 << 45)]
    return [
        *answers,
        cu.cuMemAllocManaged(0, 1),
        cu.cuMemAllocManaged(100, 7),
        cu.cuMemHostAlloc(0, 0),
        cu.cuMemHostAlloc(64, 99),
    ]


@case
def alloc_placement(w: World) -> object:
    """Which sizes begin on a 2 MiB border, and how far apart two small ones lie."""
    found: dict[str, object] = {}
    for nbytes in (1, 1000, 65536, 524288, MIB - 1, MIB, MIB + 1, 2 * MIB, 2 * MIB + 1, 3 * MIB):
        first, second = w.alloc(nbytes), w.alloc(nbytes)
        base, size = need(cu.cuMemGetAddressRange(second))
        found[str(nbytes)] = {
            "aligned_512": second % 512 == 0,
            "own_base": int(base) == second,
            "range": int(size),
            "same_2mib_block": first // (2 * MIB) == second // (2 * MIB),
        }
    return found


@case
def free_edges(w: World) -> object:
    small, big = w.alloc(1000), w.alloc(4 * MIB)
    plain = ctypes.create_string_buffer(64)
    pointers = (0, small + 8, big + 512, ctypes.addressof(plain), 0xDEAD0000, w.freed())
    return [cu.cuMemFree(pointer) for pointer in pointers]


@case
def host_free_edges(w: World) -> object:
    pinned, device = w.pinned(8192), w.alloc(100)
    plain = ctypes.create_string_buffer(64)
    registered = w.registered(4096)
    pointers = (0, pinned + 4096, device, ctypes.addressof(plain), registered)
    return [cu.cuMemFreeHost(pointer) for pointer in pointers]


@case
def address_range(w: World) -> object:
    big = w.alloc(4 * MIB)
    plain = ctypes.create_string_buffer(64)
    pinned, managed, registered = w.pinned(8192), w.managed(8192), w.registered(8192)
    pointers = {
        "base": big, "interior": big + 4097, "last": big + 4 * MIB - 1, "null": 0, "plain": ctypes.addressof(plain),
        "pinned": pinned + 1, "managed": managed + 1, "registered": registered + 1, "freed": w.freed(),
    }  # fmt: skip
    found = {}
    for name, pointer in pointers.items():
        answer = cu.cuMemGetAddressRange(pointer)
        good = answer[0] == cu.CUresult.CUDA_SUCCESS
        found[name] = {"code": answer, "back": pointer - int(answer[1]), "size": int(answer[2])} if good else answer
    return found


# By number and through the library itself: each binding knows another part of them.
DRIVER = ctypes.CDLL("libcuda.so.1")
QUESTIONS = {
    "CONTEXT": 1, "MEMORY_TYPE": 2, "DEVICE_POINTER": 3, "HOST_POINTER": 4, "SYNC_MEMOPS": 6, "BUFFER_ID": 7,
    "IS_MANAGED": 8, "DEVICE_ORDINAL": 9, "IS_LEGACY_CUDA_IPC_CAPABLE": 10, "RANGE_START_ADDR": 11, "RANGE_SIZE": 12,
    "MAPPED": 13, "ALLOWED_HANDLE_TYPES": 14, "IS_GPU_DIRECT_RDMA_CAPABLE": 15, "ACCESS_FLAGS": 16,
    "MEMPOOL_HANDLE": 17, "MAPPING_SIZE": 18, "MAPPING_BASE_ADDR": 19, "MEMORY_BLOCK_ID": 20, "21": 21, "22": 22,
}  # fmt: skip


def questions(pointer: int) -> dict[str, object]:
    """Every attribute of a pointer, addresses as distances so that two runs compare."""
    found: dict[str, object] = {}
    for name, number in QUESTIONS.items():
        out = ctypes.c_uint64(0)
        code = DRIVER.cuPointerGetAttribute(ctypes.byref(out), number, ctypes.c_uint64(pointer))
        value: object = out.value
        if code:
            value = str(cu.CUresult(code).name)
        elif name in ("BUFFER_ID", "CONTEXT", "MEMPOOL_HANDLE", "MEMORY_BLOCK_ID"):
            value = "set" if out.value else "none"
        elif name.endswith(("POINTER", "ADDR")):
            value = pointer - out.value
        found[name] = value
    return found


@case
def pointer_classic(w: World) -> object:
    return questions(w.alloc(4 * MIB) + 4096)


@case
def pointer_small(w: World) -> object:
    first, second = w.alloc(1000), w.alloc(1000)
    apart = {key: value for key, value in questions(second).items() if key != "MAPPING_BASE_ADDR"}
    return {**apart, "same_block_id": block_id(first) == block_id(second)}


def block_id(pointer: int) -> int:
    out = ctypes.c_uint64(0)
    DRIVER.cuPointerGetAttribute(ctypes.byref(out), QUESTIONS["MEMORY_BLOCK_ID"], ctypes.c_uint64(pointer))
    return out.value


@case
def pointer_managed(w: World) -> object:
    return questions(w.managed(4 * MIB))


@case
def pointer_pinned(w: World) -> object:
    return questions(w.pinned(8192) + 64)


@case
def pointer_registered(w: World) -> object:
    return questions(w.registered(8192) + 64)


@case
def pointer_physical(w: World) -> object:
    return questions(w.mapped(2) + 2 * MIB + 4096)


@case
def pointer_physical_private(w: World) -> object:
    return questions(w.mapped(1, types=0))


@case
def pointer_pooled(w: World) -> object:
    return questions(w.pooled(4 * MIB, w.pool()))


@case
def pointer_unknown(w: World) -> object:
    plain = ctypes.create_string_buffer(64)
    return {"plain": questions(ctypes.addressof(plain)), "freed": questions(w.freed())}


@case
def pointer_unmapped_reservation(w: World) -> object:
    return questions(w.reserve(2 * MIB))


@case
def pointer_null(w: World) -> object:
    return [cu.cuPointerGetAttribute(A.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, 0), cu.cuPointerGetAttributes(1, [A(2)], 0)]


@case
def pointer_list_unknown(w: World) -> object:
    plain = ctypes.create_string_buffer(64)
    kinds = [A(2), A(8), A(9), A(10), A(14)]
    answer = cu.cuPointerGetAttributes(len(kinds), kinds, ctypes.addressof(plain))
    return {"code": answer, "values": [int(value or 0) for value in answer[1]]}


@case
def register_edges(w: World) -> object:
    area, device, pinned = w.pages(64 * 1024), w.alloc(4096), w.pinned(4096)
    answers: dict[str, object] = {
        "null": cu.cuMemHostRegister(0, 4096, 0),
        "zero": cu.cuMemHostRegister(area, 0, 0),
        "flags": cu.cuMemHostRegister(area, 4096, 16),
        "device": cu.cuMemHostRegister(device, 4096, 0),
        "pinned": cu.cuMemHostRegister(pinned, 4096, 0),
        "unaligned": cu.cuMemHostRegister(area + 100, 5000, 3),
        "unaligned_again": cu.cuMemHostRegister(area + 100, 5000, 3),
        "overlap": cu.cuMemHostRegister(area, 4096, 3),
        "same_page": cu.cuMemHostRegister(area + 5200, 100, 3),
        "next": cu.cuMemHostRegister(area + 8192, 8192, 3),
        "pointer_interior": cu.cuMemHostGetDevicePointer(area + 200, 0),
        "pointer_flags": cu.cuMemHostGetDevicePointer(area + 100, 1),
        "pointer_unregistered": cu.cuMemHostGetDevicePointer(area + 32768, 0),
        "pointer_same": int(need(cu.cuMemHostGetDevicePointer(area + 8192, 0))) == area + 8192,
        "unregister_interior": cu.cuMemHostUnregister(area + 8192 + 4096),
        "unregister_null": cu.cuMemHostUnregister(0),
        "unregister_pinned": cu.cuMemHostUnregister(pinned),
        "unregister_device": cu.cuMemHostUnregister(device),
        "unregister": cu.cuMemHostUnregister(area + 100),
        "unregister_again": cu.cuMemHostUnregister(area + 100),
        "unregister_same_page": cu.cuMemHostUnregister(area + 5200),
        "unregister_next": cu.cuMemHostUnregister(area + 8192),
    }
    return answers


@isolated
def register_unmapped(w: World) -> object:
    area = w.reserve(2 * MIB)
    return [cu.cuMemHostRegister(0x10000, 4096, 0), cu.cuMemHostRegister(area, 4096, 0)]


@case
def module_edges(w: World) -> object:
    ptx = b".version 7.0\n.target sm_50\n.address_size 64\n.visible .entry nothing()\n{\n ret;\n}\n\0"
    module = need(cu.cuModuleLoadData(ptx))
    function = need(cu.cuModuleGetFunction(module, b"nothing"))
    launch = (function, 1, 1, 1, 1, 1, 1, 0, w.stream, 0, 0)
    return [
        cu.cuModuleLoadData(b"junk that is no code\0"),
        cu.cuModuleGetFunction(module, b"absent"),
        cu.cuLaunchKernel(*launch),
        cu.cuLaunchKernel(function, 0, 1, 1, 1, 1, 1, 0, w.stream, 0, 0),
        cu.cuLaunchKernel(function, 1, 1, 1, 2048, 1, 1, 0, w.stream, 0, 0),
        cu.cuStreamSynchronize(w.stream),
        cu.cuModuleUnload(module),
    ]
