"""Processes and threads that this process starts: the time they may take, and that none of them is left behind."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import resource
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # prctl(2)


def limit_cpu(seconds: float, pid: int = 0, *, used: float = 0.0) -> None:
    """Let a process take so many more seconds of CPU time, all its threads together, its children not: then SIGXCPU.

    A machine that is busy with other work makes nobody's CPU time longer. The system counts in whole seconds. A lower
    limit that somebody has set stays.

    Args:
        pid: 0 for this process.
        used: CPU seconds that it has taken already.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        soft, hard = resource.prlimit(pid, resource.RLIMIT_CPU)
        wanted = max(1, math.ceil(used + seconds))
        legal = [wanted, *(limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY)]
        resource.prlimit(pid, resource.RLIMIT_CPU, (min(legal), hard))


@contextlib.contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Let what is done in the block take so much CPU time of this process, or have it ended by SIGXCPU."""
    before = resource.getrlimit(resource.RLIMIT_CPU)
    limit_cpu(seconds, used=time.process_time())
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_CPU, before)


def descendants(pid: int) -> list[int]:
    """The processes below one that have not ended, children before theirs."""
    children: dict[int, list[int]] = defaultdict(list)
    ended: set[int] = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and (found := state_and_parent(int(folder.name))) is not None:
            children[found[1]].append(int(folder.name))
            if found[0] in "ZX":  # its first thread has; others may not have, nor what they started
                ended.add(int(folder.name))
    below = [pid]
    for one in below:
        below += children[one]
    return [one for one in below[1:] if one not in ended]


def state_and_parent(pid: int) -> tuple[str, int] | None:
    """The state of a process, a letter of proc(5), and the process above it; None where there is none."""
    try:
        # The name in parentheses may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[1])


def end_descendants(pid: int) -> set[int]:
    """End every process below one at once. Gives their ids."""
    ended: set[int] = set()
    deadline = time.monotonic() + 5.0  # what cannot be ended sits in the kernel
    seen_none = 0
    # Twice none: one that changes its parent while they are looked at is overlooked.
    while seen_none < 2 and time.monotonic() < deadline:
        left = descendants(pid)
        seen_none = 0 if left else seen_none + 1
        for one in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(one, signal.SIGKILL)
        ended.update(left)
        time.sleep(0.005)
    return ended


def adopt_orphans() -> None:
    """Become the parent of every process below this one whose own parent ends: `end_descendants` then finds it."""
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_with_parent() -> None:
    """Have the system end this process once the thread that started it is gone, however that ended."""
    ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


_starting = threading.Lock()


def _forked() -> None:
    """Another thread may have been starting a process; the child has no such thread."""
    global _starting
    _starting = threading.Lock()


os.register_at_fork(after_in_child=_forked)


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Processes that threads start are started in such a block: once `start_no_more` was called, the thread stops here.
    One started behind the back of `end_descendants` would stay when this process ends."""
    with _starting:
        yield


def start_no_more() -> None:
    """What starts a process from here on waits for the end of this one. Not for long for one that is being started."""
    _starting.acquire(timeout=1.0)


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """Processes started in the block by this thread do not hear Ctrl-C until they ask for it: Python would end one that
    is still loading with a traceback."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def pool() -> Iterator[ThreadPoolExecutor]:
    """Threads for work that waits for processes, as many as cores. Left by an error or by Ctrl-C, what has not begun
    never does, and what runs is not waited for."""
    threads = ThreadPoolExecutor(os.cpu_count())
    try:
        yield threads
    except BaseException:
        threads.shutdown(wait=False, cancel_futures=True)
        raise
    threads.shutdown()
