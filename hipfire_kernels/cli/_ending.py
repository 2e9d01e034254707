"""How a command ends: by itself, by a signal, or because nobody takes its output. Never with a traceback."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from hipfire_kernels.building.processes import adopt_orphans, end_descendants
from hipfire_kernels.building.storage import remove_unfinished
from hipfire_kernels.cli import _errors, _out

GRACE_S = 1.0
"""Seconds from a signal to the end, however deep the command sits in a computation."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_KILLED = 128
"""Exit code of a process that a signal ended, less its number, as shells have it."""
INTERRUPTED = _KILLED + signal.SIGINT


def run(command: Callable[[], Any]) -> None:
    """Run a command as a process of its own.

    A signal is `KeyboardInterrupt` in the main thread, so that what is open is closed. What runs in other threads is not
    waited for. Processes that it started end with it, and theirs.
    """
    _open_standard_files()
    adopt_orphans()
    asked = _Asked()
    code: Any = 0
    try:
        command()
    except SystemExit as ended:
        code = ended.code
    except KeyboardInterrupt:
        code = INTERRUPTED
    except OSError as error:  # what a command does not see: a word about its usage that cannot be printed
        code = unwritten(error)
    code = _flushed(code)
    if asked.number:
        asked.leave()
    sys.exit(code)


class _Asked:
    """Listens for signals. `number` is the one that came; 0 before.

    Python calls a handler between two steps of the main thread. So a thread of its own reads the numbers too, which the
    system writes to a pipe at once, and ends the process where the main thread does not get to it.
    """

    def __init__(self) -> None:
        self.number = 0
        self._pipe, theirs = os.pipe()
        os.set_blocking(theirs, False)
        signal.set_wakeup_fd(theirs, warn_on_full_buffer=False)
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
                signal.signal(number, self._handle)
        threading.Thread(target=self._watch, name="hfk-signals", daemon=True).start()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.number:  # for the second time
            self.leave()
        self.number = number
        raise KeyboardInterrupt

    def _watch(self) -> None:
        number = os.read(self._pipe, 1)[0]
        time.sleep(GRACE_S)
        self.number = self.number or number
        self.leave()

    def leave(self) -> None:
        """End this process and all that it started."""
        end_descendants()
        remove_unfinished()
        os._exit(_KILLED + self.number)


def _open_standard_files() -> None:
    """Where a standard file is closed, the next file that is opened would get its number, and what is printed."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def untaken() -> OSError | None:
    """Why what was printed does not go out; None when it does."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        return error
    return None


def _flushed(code: Any) -> Any:
    """The exit code, after what was printed is out; another one where it is not."""
    error = untaken()
    if error is not None:
        # What is still in the buffer would be tried again, and complained about, at the end of the interpreter.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = unwritten(error)
    with contextlib.suppress(OSError):
        if sys.stderr is not None:
            sys.stderr.flush()
    return code


def unwritten(error: OSError) -> int:
    """The exit code where output could not be written, after a word about it."""
    if isinstance(error, BrokenPipeError):  # who reads it has enough
        return _KILLED + signal.SIGPIPE
    _out.note(f"error: the output cannot be written ({error.strerror})")
    return _errors.FAILED
