"""The address behind Python's buffer protocol, and the protocol for an address.

Owns the two calls that the interpreter offers to C only. It knows no array.
"""

from __future__ import annotations

import ctypes

__all__ = ["address_of", "buffer_at"]

_PYBUF_FULL_RO = 0x011C


class _PyBuffer(ctypes.Structure):
    """``Py_buffer`` of the stable ABI."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_get_buffer = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int)(
    ("PyObject_GetBuffer", ctypes.pythonapi)
)
_release_buffer = ctypes.PYFUNCTYPE(None, ctypes.POINTER(_PyBuffer))(("PyBuffer_Release", ctypes.pythonapi))


def address_of(memory: memoryview) -> int:
    """Return the address of element zero; valid as long as ``memory`` is not released."""
    buffer = _PyBuffer()
    _get_buffer(memory, ctypes.byref(buffer), _PYBUF_FULL_RO)
    try:
        return buffer.buf or 0
    finally:
        _release_buffer(ctypes.byref(buffer))


def buffer_at(address: int, nbytes: int, *, owner: object) -> ctypes.Array[ctypes.c_char]:
    """Return a writable buffer object over host memory that keeps ``owner`` alive."""
    buffer = (ctypes.c_char * nbytes).from_address(address)
    buffer.owner = owner  # type: ignore[attr-defined]
    return buffer
