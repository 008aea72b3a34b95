"""The two futex calls that processes need to wake each other through a shared 32-bit word.

Owns the system call and nothing else. Waits release the GIL. A wake-up may be spurious: callers re-read their word.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform

from devipc.errors import CapabilityError, UsageError

__all__ = ["OWNER_DIED", "TID_MASK", "WAITERS", "futex_wait", "futex_wake"]

WAITERS = 0x80000000
"""Bit of a robust mutex's word: somebody sleeps on it."""

OWNER_DIED = 0x40000000
"""Bit that the kernel sets when the thread that held the mutex ended."""

TID_MASK = 0x3FFFFFFF
"""Bits that hold the thread id of the mutex's owner; 0 when it is free."""

_FUTEX_WAIT = 0
_FUTEX_WAKE = 1
_YEAR_S = 365 * 86400.0
_SYSCALL = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
# A wake-up returns at once; letting go of the interpreter lock for it would cost a turn of every busy thread.
_libc_keeping_lock = ctypes.PyDLL(None, use_errno=True)
_libc_keeping_lock.syscall.restype = ctypes.c_long


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_int64), ("tv_nsec", ctypes.c_int64))


def _number() -> int:
    if _SYSCALL is None:
        raise CapabilityError(f"no futex call known for {platform.machine()}", remedy="use x86-64 or aarch64")
    return _SYSCALL


def futex_wait(address: int, expected: int, *, timeout_s: float) -> bool:
    """Sleep while the 32-bit word at ``address`` equals ``expected``, at most ``timeout_s`` seconds (a year at most).

    Returns False on timeout, True otherwise (woken, word already different, interrupted): the caller re-reads the word.

    Raises
    ------
    UsageError
        For an address that is not mapped or no multiple of 4, and for a timeout that is no number.
    """
    if timeout_s != timeout_s:
        raise UsageError("a timeout that is not a number", remedy="pass seconds")
    bounded_s = min(max(timeout_s, 0.0), _YEAR_S)
    seconds = int(bounded_s)
    timeout = _Timespec(seconds, int((bounded_s - seconds) * 1e9))
    result = _libc.syscall(
        ctypes.c_long(_number()),
        ctypes.c_void_p(address),
        ctypes.c_int(_FUTEX_WAIT),
        ctypes.c_uint32(expected),
        ctypes.byref(timeout),
        ctypes.c_void_p(None),
        ctypes.c_int(0),
    )
    code = ctypes.get_errno() if result == -1 else 0
    if code not in (0, errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
        raise _misuse(code)
    return code != errno.ETIMEDOUT


def futex_wake(address: int, *, count: int = 2**31 - 1) -> int:
    """Wake up to ``count`` waiters of the word at ``address``, in all processes; return how many were woken.

    Raises
    ------
    UsageError
        For an address that is not mapped or no multiple of 4.
    """
    woken = _libc_keeping_lock.syscall(
        ctypes.c_long(_number()),
        ctypes.c_void_p(address),
        ctypes.c_int(_FUTEX_WAKE),
        ctypes.c_int(count),
        ctypes.c_void_p(None),
        ctypes.c_void_p(None),
        ctypes.c_int(0),
    )
    if woken < 0:
        raise _misuse(ctypes.get_errno())
    return int(woken)


def _misuse(code: int) -> UsageError:
    return UsageError(
        f"no word to wait on at this address ({os.strerror(code)})", remedy="keep the memory mapped while it is used"
    )
