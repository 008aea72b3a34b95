"""Cases: classic memory handles, in one process and across two."""

from __future__ import annotations

import ctypes

from cuda.bindings import driver as cu

from .world import MIB, World, case, from_raw, need, raw


@case
def handle_kinds(w: World) -> object:
    """What a classic handle can be taken of."""
    plain = ctypes.create_string_buffer(64)
    pointers = {
        "small": w.alloc(100), "big": w.alloc(4 * MIB), "interior": w.alloc(4 * MIB) + 4096, "managed": w.managed(4096),
        "pinned": w.pinned(4096), "registered": w.registered(4096), "plain": ctypes.addressof(plain), "null": 0,
        "physical": w.mapped(1), "pooled": w.pooled(4096, w.pool()), "last": w.alloc(4 * MIB) + 4 * MIB - 1,
        "freed": w.freed(),
    }  # fmt: skip
    return {name: cu.cuIpcGetMemHandle(pointer) for name, pointer in pointers.items()}


@case
def handle_bytes(w: World) -> object:
    big, small, other = w.alloc(4 * MIB), w.alloc(1000), w.alloc(1000)

    def of(pointer: int) -> bytes:
        return raw(need(cu.cuIpcGetMemHandle(pointer)))

    return {
        "repeated": of(big) == of(big),
        "interior": of(big) == of(big + 4096),
        "neighbours": of(small) == of(other),
    }


@case
def handle_open_edges(w: World) -> object:
    big = w.alloc(4 * MIB)
    own = need(cu.cuIpcGetMemHandle(big))
    return {
        "own": cu.cuIpcOpenMemHandle(own, 1),
        "own_flags_0": cu.cuIpcOpenMemHandle(own, 0),
        "zero": cu.cuIpcOpenMemHandle(cu.CUipcMemHandle(), 1),
        "junk": cu.cuIpcOpenMemHandle(from_raw(cu.CUipcMemHandle, bytes(range(64))), 1),
        "ones": cu.cuIpcOpenMemHandle(from_raw(cu.CUipcMemHandle, b"\xff" * 64), 1),
        "close_null": cu.cuIpcCloseMemHandle(0),
        "close_own": cu.cuIpcCloseMemHandle(big),
        "close_unknown": cu.cuIpcCloseMemHandle(0xDEAD0000),
    }


@case
def handle_peer_big(w: World) -> object:
    big = w.alloc(4 * MIB)
    need(cu.cuMemsetD8(big, 6, 4 * MIB))
    answer = w.peer("classic", raw(need(cu.cuIpcGetMemHandle(big))).hex())
    out = bytearray(2)
    need(cu.cuMemcpyDtoH(out, big, 2))
    return {"peer": answer, "seen": list(out)}


@case
def handle_peer_odd(w: World) -> object:
    odd = w.alloc(3 * MIB + 1)
    return w.peer("classic_range", raw(need(cu.cuIpcGetMemHandle(odd))).hex())


@case
def handle_peer_interior(w: World) -> object:
    """Where the handle of an interior pointer opens."""
    big = w.alloc(4 * MIB)
    need(cu.cuMemsetD8(big, 1, 2 * MIB))
    need(cu.cuMemsetD8(big + 2 * MIB, 2, 2 * MIB))
    return w.peer("classic_first", raw(need(cu.cuIpcGetMemHandle(big + 2 * MIB))).hex())


@case
def handle_peer_small(w: World) -> object:
    """Where the handle of a small allocation opens: its block or itself."""
    first, second = w.alloc(1000), w.alloc(1000)
    need(cu.cuMemsetD8(first, 1, 1000))
    need(cu.cuMemsetD8(second, 2, 1000))
    both = {}
    for name, pointer in {"first": first, "second": second}.items():
        offset_in_block = pointer % (2 * MIB)
        answer = w.peer("classic_small", raw(need(cu.cuIpcGetMemHandle(pointer))).hex(), str(offset_in_block))
        both[name] = answer
    return both


@case
def handle_peer_neighbours(w: World) -> object:
    """Two small allocations of one block, opened by one process."""
    first, second = w.alloc(1000), w.alloc(1000)
    need(cu.cuMemsetD8(first, 1, 1000))
    need(cu.cuMemsetD8(second, 2, 1000))
    return w.peer("neighbours", *(raw(need(cu.cuIpcGetMemHandle(pointer))).hex() for pointer in (first, second)))


@case
def handle_peer_freed_small(w: World) -> object:
    """The block lives on through a neighbour."""
    kept = w.alloc(1000)
    small = int(need(cu.cuMemAlloc(1000)))
    data = raw(need(cu.cuIpcGetMemHandle(small))).hex()
    need(cu.cuMemFree(small))
    return [w.peer("classic_open", data), kept // (2 * MIB) == small // (2 * MIB)]


@case
def handle_peer_freed(w: World) -> object:
    big = int(need(cu.cuMemAlloc(4 * MIB)))
    data = raw(need(cu.cuIpcGetMemHandle(big))).hex()
    need(cu.cuMemFree(big))
    return w.peer("classic_open", data)


@case
def handle_peer_dead(w: World) -> object:
    """A handle whose exporter has exited."""
    answer = w.peer("make_classic")
    return w.peer("classic_open", str(answer)) if isinstance(answer, str) and len(answer) == 128 else answer
