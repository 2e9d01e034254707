"""How much memory the host has, and how much of it is left."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

WORTH_ASKING = 64 << 20
"""Bytes below which nobody asks whether they are there: it takes longer than to have them."""

REMEDY = "Free arrays, plan for a shorter context, or hold fewer rows at once (HIPFIRE_FLASH_PARTIALS_BATCH)"

_MEMINFO, _GROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def total() -> int:
    """Bytes of memory that this process can have at most: the machine's, or the container's limit."""
    machine = _machine()
    return min(machine, _limit() or machine)


def available() -> int:
    """Bytes that can be had now without swapping, caches given up; all of them where the system does not say."""
    left = total()
    with contextlib.suppress(OSError, ValueError, LookupError):
        left = min(left, 1024 * int(_field(_MEMINFO, "MemAvailable:")))
    limit = _limit()
    with contextlib.suppress(OSError, ValueError, LookupError):
        if limit:
            used = int((_GROUP / "memory.current").read_text(encoding="ascii"))
            left = min(left, limit - used + int(_field(_GROUP / "memory.stat", "inactive_file")))
    return max(0, left)


def _machine() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _limit() -> int | None:
    """Of the container, by version 2 of control groups; None without one."""
    with contextlib.suppress(OSError, ValueError):
        return int((_GROUP / "memory.max").read_text(encoding="ascii"))
    return None


def _field(file: Path, name: str) -> str:
    """The first word behind a name at the start of a line."""
    lines = (line.split() for line in file.read_text(encoding="ascii").splitlines())
    return {words[0]: words[1] for words in lines if len(words) > 1}[name]
