"""Address space of a process of which some pages may be touched and the rest may not."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import weakref
from typing import Any

PAGE = mmap.PAGESIZE
_NONE, _READ, _WRITE = 0, 1, 2  # PROT_NONE has no name in mmap


class Pages:
    """So many bytes from `address` on, the start of a page. Nobody may touch any; given back with this object.

    Raises:
        OSError: the process may have no more of them.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = rounded(nbytes)
        found = _libc().mmap(None, self.nbytes, _NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        if found == ctypes.c_void_p(-1).value:
            raise _error()
        self.address: int = found
        self.close = weakref.finalize(self, _libc().munmap, self.address, self.nbytes)
        self.close.atexit = False  # the process's end gives it back, and nobody may run on it then

    def __contains__(self, address: int) -> bool:
        return self.address <= address < self.address + self.nbytes

    def allow(self, address: int, nbytes: int, *, write: bool = True) -> None:
        """Let whole pages be read, and written."""
        if nbytes and _libc().mprotect(address, rounded(nbytes), _READ | (_WRITE if write else 0)):
            raise _error()


def rounded(nbytes: int) -> int:
    """Bytes of the pages that hold so many."""
    return -(-nbytes // PAGE) * PAGE


def _error() -> OSError:
    return OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    libc.mmap.restype = ctypes.c_void_p
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc
