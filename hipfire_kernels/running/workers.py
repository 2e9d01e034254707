"""Threads that run the blocks of a launch on the CPU."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
"""That this process may use."""


class Workers:
    """Threads that stay, and start when they are needed. A forked child has its own: the others stayed in the parent.

    Attributes:
        most: of them.
        threads: where work is submitted.
    """

    def __init__(self, most: int, name: str) -> None:
        self.most, self._name = most, name
        self._renew()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self.threads = ThreadPoolExecutor(max_workers=self.most, thread_name_prefix=self._name)
