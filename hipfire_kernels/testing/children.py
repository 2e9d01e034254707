"""Cases in child processes: a crash or a hang of a kernel is an answer, not the end."""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import signal
import subprocess
import sys
from typing import Any

from hipfire_kernels.building import scratch
from hipfire_kernels.building.processes import end_descendants, starting
from hipfire_kernels.checking.result import Finding
from hipfire_kernels.errors import DeviceError, ToolchainUnavailable
from hipfire_kernels.testing.case import variant_of

PATIENCE = 10
"""Seconds for each CPU second that a case may take, on a machine with much else to do. Only what sleeps needs them."""

BUILD_S = 2400.0
"""Seconds for what comes before a case runs. Compilers have limits of their own."""


class Child:
    """One process that runs cases on a device, started when it is needed and replaced when it was lost.

    Args:
        core: where it runs; None leaves it to the system.
        limit_s: CPU seconds a case may take, its compilation not counted, before it counts as hanging; one that waits
            for something, `PATIENCE` times as many seconds.

    Attributes:
        device: what it runs on, once `arch` has been asked for: name, arch, and for a GPU its model and driver.
    """

    def __init__(self, device: str, core: int | None, limit_s: float) -> None:
        self._command = [sys.executable, "-m", "hipfire_kernels.testing.worker", device]
        self._command += [str(-1 if core is None else core), str(limit_s)]
        self._limit_s = limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._read_ahead, self._abandoned = b"", False
        self._arch = ""
        self.device: dict[str, Any] = {}

    def arch(self) -> str:
        """The arch of the device.

        Raises:
            DeviceError: the device cannot be used here.
        """
        if self._process is None:
            self._start()
        return self._arch

    def run(self, case: Any) -> Finding:
        """Run one case.

        Raises:
            DeviceError: the device cannot be used here.
            ToolchainUnavailable: nothing here builds for it.
        """
        process = self._process or self._start()
        limit = variant_of(case).tolerance.worst_row
        with contextlib.suppress(BrokenPipeError):
            assert process.stdin is not None
            process.stdin.write(case.to_json().encode() + b"\n")
            process.stdin.flush()
        found = self._answer(process)
        if isinstance(found, str):
            self.close()
            return Finding(case, math.inf, limit, found)
        if "refused" in found:
            raise ToolchainUnavailable(found["refused"])
        if found["broken"]:
            self.close()
        error = math.inf if found["error"] is None else float(found["error"])
        return Finding(case, error, found.get("limit", limit), found["fault"])

    def _start(self) -> subprocess.Popen[bytes]:
        if self._abandoned:
            raise DeviceError("no process for cases is started any more: the campaign was interrupted")
        self._read_ahead, self._log = b"", os.fdopen(os.memfd_create("hipfire-log"), "w+b")
        with starting():
            process = self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, bufsize=0,
                start_new_session=True,  # Ctrl-C is for the parent
            )  # fmt: skip
        said = self._read(process, BUILD_S)
        if isinstance(said, str):
            self.close()
            raise DeviceError(f"a process for cases {said}")
        if "refused" in said:
            self.close()
            raise DeviceError(said["refused"])
        self._arch, self.device = said["arch"], said["device"]
        return process

    def _answer(self, process: subprocess.Popen[bytes]) -> dict[str, Any] | str:
        """What a case gave, or what became of the process."""
        found = self._read(process, BUILD_S)
        if isinstance(found, str) or "running" not in found:
            return found
        return self._read(process, PATIENCE * self._limit_s)

    def _read(self, process: subprocess.Popen[bytes], limit_s: float) -> dict[str, Any] | str:
        """What the process says next; a text about the process where it says nothing."""
        line = self._line(process, limit_s)
        if line is None:
            return f"hangs: no answer within {limit_s:g} s"
        if not line:
            return self._death(process)
        found: dict[str, Any] = json.loads(line)
        return found

    def _line(self, process: subprocess.Popen[bytes], limit_s: float) -> bytes | None:
        """One line; nothing at the end of the stream; None when the time is up."""
        assert process.stdout is not None
        with selectors.DefaultSelector() as ready:
            ready.register(process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._read_ahead:
                if not ready.select(limit_s):
                    return None
                part = os.read(process.stdout.fileno(), 1 << 16)
                if not part:
                    return b""
                self._read_ahead += part
        line, _, self._read_ahead = self._read_ahead.partition(b"\n")
        return line

    def _death(self, process: subprocess.Popen[bytes]) -> str:
        code = process.wait()
        if code == -signal.SIGXCPU:
            return f"hangs: no answer within {self._limit_s:g} s of CPU time"
        self._log.seek(0)
        said = self._log.read().decode(errors="replace").strip().splitlines()
        if code < 0:
            summary = next((f", {line.removeprefix('SUMMARY: ')}" for line in said if line.startswith("SUMMARY: ")), "")
            with contextlib.suppress(ValueError):
                return f"crashes: {signal.Signals(-code).name}{summary}"
        return f"crashes: exit code {code}, {said[-1] if said else 'without a word'}"

    def abandon(self) -> None:
        """End the process from another thread than the one that runs cases; none is started any more."""
        self._abandoned = True
        if (process := self._process) is not None:
            process.kill()

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is None:
            return
        # The number of one that has ended may be somebody else's by now.
        below = end_descendants(process.pid) if process.poll() is None else set()
        process.kill()
        process.wait()
        scratch.discard({process.pid, *below})
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self._log.close()
