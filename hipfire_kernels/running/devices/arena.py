"""Memory that host kernels run in: one arena for each OS thread, for all kernels of the process.

A stack has a page in front of it that nobody may touch: a kernel that overflows it ends the process, where it would
otherwise write over another thread's stack. Such a page costs the process two of the mappings it may have
(`vm.max_map_count`, 65,530 by default), which is why kernels share them.
"""

from __future__ import annotations

import threading

from hipfire_kernels.running.devices.pages import PAGE, Pages, rounded

STACK_BYTES = 64 * 1024

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
        self.threads, self.workspace_bytes = threads, workspace_bytes
        self.stride = PAGE + STACK_BYTES
        ahead = rounded(workspace_bytes)
        self._pages = Pages(ahead + threads * self.stride)
        self.workspace = self._pages.address
        self.stacks = self.workspace + ahead + PAGE
        self._pages.allow(self.workspace, ahead)
        for thread in range(threads):
            self._pages.allow(self.stacks + thread * self.stride, STACK_BYTES)

    @property
    def span(self) -> range:
        """The addresses of the stacks, with the page in front of each."""
        return range(self.stacks - PAGE, self.stacks - PAGE + self.threads * self.stride)

    def above(self, address: int) -> range:
        """The addresses from one on a stack to where that stack begins; none where it is on none."""
        if address not in self.span:
            return range(0)
        thread, offset = divmod(address - self.stacks, self.stride)
        return range(address, self.stacks + thread * self.stride + STACK_BYTES) if offset < STACK_BYTES else range(0)


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
