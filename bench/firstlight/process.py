"""The process of a step, from outside: started, listened to, ended."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hipfire_kernels.building import scratch
from hipfire_kernels.building.processes import end_descendants, unheard
from hipfire_kernels.dispatch.runfolder import CRASHED, HUNG

START_S = 300.0
"""Seconds that a process may take to load, on a machine with much else to do."""

LEAVE_S = 15.0
"""Seconds in which a process that is ended must be gone."""


@dataclass(frozen=True)
class Ended:
    """How a process ended.

    Attributes:
        state: "" by itself, else `HUNG` or `CRASHED`.
        why: words for a state.
        gone: False where it could not even be ended.
        code: its exit code.
    """

    state: str
    why: str
    last_words: str
    gone: bool = True
    code: int = 0


def run(folder: Path, step: str, silent_s: float, interrupted: Callable[[], None] = lambda: None) -> Ended:
    """Run a step to its end.

    Args:
        silent_s: seconds without a word, once it has begun, that are a hang.
        interrupted: called at Ctrl-C before all else: it takes a while to end a process, and this one may not have it.
    """
    command = [sys.executable, "-m", "hipfire_kernels.bench.firstlight.child", str(folder), step]
    with os.fdopen(os.memfd_create("firstlight-log"), "w+b") as log:
        with unheard():  # Ctrl-C is for the parent, which ends it
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, start_new_session=True
            )
        try:
            silent, last = _listen(process, silent_s)
            if silent is not None:
                gone = _end(process)
                return Ended(HUNG, f"no sign of life for {silent:g} s", last, gone)
            code = process.wait()
            log.seek(0)
            return _by_itself(code, last, log.read().decode(errors="replace").strip().splitlines())
        except KeyboardInterrupt:
            interrupted()
            raise
        finally:
            _end(process)


def _listen(process: subprocess.Popen[bytes], silent_s: float) -> tuple[float | None, str]:
    """Until the process says nothing more: the seconds that it was silent for, None where it has ended, and what it
    said last."""
    assert process.stdout is not None
    last, unread = "", b""
    with selectors.DefaultSelector() as ready:
        ready.register(process.stdout, selectors.EVENT_READ)
        while True:
            limit = silent_s if last else START_S
            if not ready.select(limit):
                return limit, last
            part = os.read(process.stdout.fileno(), 1 << 16)
            if not part:
                return None, last
            *lines, unread = (unread + part).split(b"\n")
            for line in lines:
                with contextlib.suppress(ValueError):
                    last = str(json.loads(line))


def _by_itself(code: int, last: str, said: list[str]) -> Ended:
    if code < 0:
        with contextlib.suppress(ValueError):
            return Ended(CRASHED, f"{signal.Signals(-code).name}, {_tail(said)}", last, code=code)
    if code not in (0, 1):
        return Ended(CRASHED, f"exit code {code}, {_tail(said)}", last, code=code)
    return Ended("", _tail(said), last, code=code)


def _tail(said: list[str]) -> str:
    return said[-1] if said else "without a word"


def _end(process: subprocess.Popen[bytes]) -> bool:
    """End a process with all that it started; whether it is gone."""
    if process.poll() is None:
        below = end_descendants(process.pid)
        process.kill()
        try:
            process.wait(LEAVE_S)
        except subprocess.TimeoutExpired:
            return False
        scratch.discard({process.pid, *below})
    if process.stdout is not None:
        process.stdout.close()
    return True
