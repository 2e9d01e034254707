"""Run a compiler: bounded in time, never left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hipfire_kernels.building.processes import limit_cpu, starting
from hipfire_kernels.building.toolchains import diagnostics
from hipfire_kernels.errors import CompileError

LIMIT_S = 120.0
"""CPU seconds of a compiler. The longest honest run (ziglang building its runtime) takes ten."""

WALL_S = 600.0
"""Seconds of one that waits for something, or of a machine that has hardly any time for it."""


@dataclass(frozen=True)
class Finished:
    """How a program ended.

    Attributes:
        failure: None for exit status 0, else what happened, in words.
        out: its standard output.
        err: its standard error.
    """

    failure: str | None
    out: str
    err: str


def run(argv: Sequence[str], *, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> Finished:
    """Run a program to its end, for `LIMIT_S` or for `WALL_S`. Failure is an answer, not an exception.

    Args:
        cwd: its working folder, where it also keeps its temporary files.
        env: its environment; by default that of this process.
    """
    if cwd is not None:
        env = {**(os.environ if env is None else env), "TMPDIR": str(cwd)}
    try:
        # A session of its own, so that a driver's children can be ended with it.
        with starting():
            process = subprocess.Popen(
                argv, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                text=True, errors="replace", start_new_session=True,
            )  # fmt: skip
    except OSError as error:
        return Finished(f"it could not be started ({error})", "", "")
    with process:
        try:
            limit_cpu(LIMIT_S, process.pid)
            out, err = process.communicate(timeout=WALL_S)
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):  # it has ended by itself
                os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            out, err = process.communicate()
            return Finished(f"it was ended after {WALL_S:.0f} s", out, err)
    return Finished(_failure(process.returncode), out, err)


def refusal(who: str, arch: str, finished: Finished, source: str) -> CompileError:
    """The error for a compiler that failed: every error it found, at the line of its template."""
    found = [str(one) for one in diagnostics.read(finished.err, source) if one.kind == "error"]
    lines = [line for line in finished.err.splitlines() if line.strip()]
    said = found or [lines[-1] if lines else f"{finished.failure}, without a word"]
    return CompileError(
        "\n  ".join([f"{who} did not compile the source for {arch} ({finished.failure}):", *said]),
        log=finished.err,
        source=source,
    )


def _failure(status: int) -> str | None:
    if status == 0:
        return None
    if status == -signal.SIGXCPU:
        return f"it was ended after {LIMIT_S:.0f} s of CPU time"
    if status > 0:
        return f"exit status {status}"
    try:
        return f"ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"ended by signal {-status}"
