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
import tempfile
from typing import Any

from hipfire_kernels.checking.result import Finding
from hipfire_kernels.errors import DeviceError, ToolchainUnavailable
from hipfire_kernels.testing.case import variant_of


class Child:
    """One process that runs cases on a device, started when it is needed and replaced when it was lost.

    Args:
        core: where it runs; None leaves it to the system.
        limit_s: seconds a case may take, its compilation included, before it counts as hanging.

    Attributes:
        device: what it runs on, once `arch` has been asked for: name, arch, and for a GPU its model and driver.
    """

    def __init__(self, device: str, core: int | None, limit_s: float) -> None:
        self._command = [sys.executable, "-m", "hipfire_kernels.testing.worker", device]
        self._command.append(str(-1 if core is None else core))
        self._limit_s = limit_s
        self._process: subprocess.Popen[bytes] | None = None
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
        line = self._read(process)
        if not line:
            fault = f"hangs: no answer within {self._limit_s:g} s" if line is None else self._death(process)
            self.close()
            return Finding(case, math.inf, limit, fault)
        found: dict[str, Any] = json.loads(line)
        if "refused" in found:
            raise ToolchainUnavailable(found["refused"])
        if found["broken"]:
            self.close()
        error = math.inf if found["error"] is None else float(found["error"])
        return Finding(case, error, found.get("limit", limit), found["fault"])

    def _start(self) -> subprocess.Popen[bytes]:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        process = self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, bufsize=0
        )
        greeting = self._read(process)
        if not greeting:
            why = "does not answer" if greeting is None else self._death(process)
            self.close()
            raise DeviceError(f"a process for cases {why}")
        said: dict[str, Any] = json.loads(greeting)
        if "refused" in said:
            self.close()
            raise DeviceError(said["refused"])
        self._arch, self.device = said["arch"], said["device"]
        return process

    def _read(self, process: subprocess.Popen[bytes]) -> bytes | None:
        """One line; nothing at the end of the stream; None when the time is up."""
        assert process.stdout is not None
        line = b""
        with selectors.DefaultSelector() as ready:
            ready.register(process.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not ready.select(self._limit_s):
                    return None
                part = os.read(process.stdout.fileno(), 1 << 16)
                if not part:
                    return b""
                line += part
        return line

    def _death(self, process: subprocess.Popen[bytes]) -> str:
        code = process.wait()
        self._log.seek(0)
        said = self._log.read().decode(errors="replace").strip().splitlines()
        if code < 0:
            summary = next((f", {line.removeprefix('SUMMARY: ')}" for line in said if line.startswith("SUMMARY: ")), "")
            with contextlib.suppress(ValueError):
                return f"crashes: {signal.Signals(-code).name}{summary}"
        return f"crashes: exit code {code}, {said[-1] if said else 'without a word'}"

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self._log.close()
