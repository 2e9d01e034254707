"""Memory that host kernels run in: one arena for each OS thread, for all kernels of the process.

A stack has a page in front of it that nobody may touch: a kernel that overflows it ends the process, where it would
otherwise write over another thread's stack. Such a page costs the process two of the mappings it may have
(`vm.max_map_count`, 65,530 by default), which is why kernels share them.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import threading
from typing import Any

STACK_BYTES = 64 * 1024
_NO_ACCESS = 0  # PROT_NONE, for which mmap has no name

_own = threading.local()


class Arena:
    """A workspace, and stacks for the threads of one block; given back when nobody refers to it.

    Attributes:
        workspace: address of `workspace_bytes`, the start of a page.
        stacks: address of the first thread's `STACK_BYTES`.
        stride: bytes from there to the next thread's.

    Raises:
        OSError: the process may have no more memory or no more mappings.
    """

    def __init__(self, threads: int, workspace_bytes: int) -> None:
        page = mmap.PAGESIZE
        self.threads, self.workspace_bytes = threads, workspace_bytes
        self.stride = page + STACK_BYTES
        ahead = -(-workspace_bytes // page) * page
        self._memory = mmap.mmap(-1, ahead + threads * self.stride, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.workspace = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.stacks = self.workspace + ahead + page
        for guard in range(self.workspace + ahead, self.workspace + len(self._memory), self.stride):
            if _libc().mprotect(guard, page, _NO_ACCESS):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def arena(threads: int, workspace_bytes: int) -> Arena:
    """This OS thread's arena, with at least so much room. It keeps its size until the thread ends.

    Raises:
        OSError: see `Arena`.
    """
    own: Arena | None = getattr(_own, "arena", None)
    if own is not None and own.threads >= threads and own.workspace_bytes >= workspace_bytes:
        return own
    if own is not None:
        threads, workspace_bytes = max(threads, own.threads), max(workspace_bytes, own.workspace_bytes)
    own = _own.arena = None  # its memory goes before the new one's comes
    _own.arena = Arena(threads, workspace_bytes)
    made: Arena = _own.arena
    return made


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc
