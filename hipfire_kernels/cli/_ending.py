"""How a command ends: by itself, by a signal, or because nobody takes its output. Never with a traceback."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from hipfire_kernels.building import scratch
from hipfire_kernels.building.processes import adopt_orphans, descendants, end_descendants, start_no_more
from hipfire_kernels.building.storage import remove_unfinished
from hipfire_kernels.cli import _errors

GRACE_S = 1.0
"""Seconds from a signal to the end, however deep the command sits in a computation."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_KILLED = 128
"""Exit code of a process that a signal ended, less its number, as shells have it."""
INTERRUPTED = _KILLED + signal.SIGINT


def run(command: Callable[[], Any]) -> None:
    """Run a command as a process of its own.

    A signal is `KeyboardInterrupt` in the main thread, so that what is open is closed. What runs in other threads is
    not waited for. Processes that it started end with it, and theirs.
    """
    _open_standard_files()
    adopt_orphans()
    asked = _Asked()
    sys.unraisablehook = _no_interrupt
    code: Any = 0
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # a parent may have kept them back until here
        command()
    except SystemExit as ended:
        code = ended.code
    except KeyboardInterrupt:  # before a command was at work, which says it itself
        say_interrupted()
        code = INTERRUPTED
    except OSError:  # what no command sees: a help that cannot be printed
        if untaken() is None:
            raise
    code = _flushed(code)
    if asked.number:
        asked.leave()
    sys.exit(code)


def _no_interrupt(unraisable: Any) -> None:
    """One that comes where Python can raise nothing, say while an object is freed, is no fault: `_Asked` ends all."""
    if unraisable.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(unraisable)


_said = threading.Event()


def say_interrupted() -> None:
    """Say it on standard error."""
    _said.set()
    print("interrupted", file=sys.stderr, flush=True)


class _Asked:
    """Listens for signals. `number` is the one that came; 0 before.

    Python calls a handler between two steps of the main thread. So a thread of its own reads the numbers too, which the
    system writes to a pipe at once, and ends the process where the main thread does not get to it.
    """

    def __init__(self) -> None:
        self.number = 0
        self._below: set[int] = set()
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
        self._below.update(descendants(os.getpid()))  # some end while the main thread closes what is open
        raise KeyboardInterrupt

    def _watch(self) -> None:
        number = os.read(self._pipe, 1)[0]
        time.sleep(GRACE_S)
        self.number = self.number or number
        self.leave()

    def leave(self) -> None:
        """End this process and all that it started."""
        start_no_more()
        if not _said.is_set():  # the main thread did not get to it, and may be in the middle of standard error
            with contextlib.suppress(OSError):
                os.write(2, b"interrupted\n")
        scratch.discard({os.getpid(), *self._below, *end_descendants(os.getpid())})
        remove_unfinished()
        os._exit(_KILLED + self.number)


class _Stdout(io.TextIOWrapper):
    """Standard output that remembers why it was not taken: what could not be written is not tried again."""

    untaken: OSError | None = None

    def write(self, text: str) -> int:
        with self._remembering():
            return super().write(text)

    def flush(self) -> None:
        with self._remembering():
            super().flush()

    @contextlib.contextmanager
    def _remembering(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.untaken = error
            raise


class _Stderr(io.TextIOWrapper):
    """Standard error that nobody needs to take."""

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            return super().write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            super().flush()


def _open_standard_files() -> None:
    """Where a standard file is closed, the next file that is opened would get its number, and what is printed."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for name, number, kind in (("stdout", 1, _Stdout), ("stderr", 2, _Stderr)):
        there: io.TextIOWrapper = getattr(sys, name) or os.fdopen(number, "w", closefd=False)
        encoding, errors, by_line = there.encoding, there.errors, there.line_buffering
        setattr(sys, name, kind(there.detach(), encoding=encoding, errors=errors, line_buffering=by_line))


def untaken() -> OSError | None:
    """Why standard output was not taken; None while it is."""
    return getattr(sys.stdout, "untaken", None)


def _flushed(code: Any) -> Any:
    """The exit code, after what was printed is out; another one where it is not."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    error = untaken()
    if error is not None:
        # What is still in the buffer would be tried again, and complained about, at the end of the interpreter.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if isinstance(error, BrokenPipeError):  # who reads it has enough
            return _KILLED + signal.SIGPIPE
        print(f"error: the output cannot be written ({error.strerror})", file=sys.stderr)
        return _errors.FAILED
    return code
