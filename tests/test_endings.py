"""How `hfk` ends: by Ctrl-C at once and with all that it started, and without a traceback where nobody takes its output.

Nothing here depends on the clock: a busy machine only makes it take longer.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from hipfire_kernels.building.processes import descendants

WORKING_S = 0.7
"""CPU seconds after which a command is at its work."""

PATIENCE_S = 120
"""Seconds after which something is wrong, however busy the machine is."""

TICK = os.sysconf("SC_CLK_TCK")


def cpu(pid: int) -> float:
    """CPU seconds of a process, and of the children that it has waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / TICK


def until(condition: Callable[[], bool]) -> None:
    """Wait."""
    limit = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)


def marked(mark: str) -> list[str]:
    """Command lines of the processes that have a text in their environment."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdecimal() and mark.encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


class Command:
    """A running `hfk`, with folders of its own."""

    def __init__(self, folder: Path, *arguments: str, env: dict[str, str] | None = None) -> None:
        self.mark, self.scratch = uuid.uuid4().hex, folder / "scratch"
        self.scratch.mkdir(parents=True)
        self.error = (folder / "stderr").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hipfire_kernels.cli", *arguments],
            cwd=folder,
            env={**os.environ, "TMPDIR": str(self.scratch), "HK_MARK": self.mark, **(env or {})},
            stdout=subprocess.DEVNULL,
            stderr=self.error,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell may have it ignored
        )

    def cpu(self) -> float:
        """CPU seconds of it and of all below it."""
        return cpu(self.process.pid) + sum(map(cpu, descendants(self.process.pid)))

    def said(self) -> str:
        """What it has said on stderr."""
        self.error.seek(0)
        return self.error.read()

    def end(self, number: int = signal.SIGINT) -> tuple[int, float]:
        """Once it is at work, send it a signal. Its exit code, and the CPU seconds that it had from then on."""
        until(lambda: self.cpu() > WORKING_S or self.process.poll() is not None)
        assert self.process.poll() is None, self.said()
        before = cpu(self.process.pid)
        self.process.send_signal(number)
        _, status, used = os.wait4(self.process.pid, 0)
        self.process.returncode = os.waitstatus_to_exitcode(status)
        return self.process.returncode, used.ru_utime + used.ru_stime - before


LONG: dict[str, str] = {
    "build": "--all --arch gfx1100,gfx1201",
    "lint": "",
    "parity": "--all",
    "fuzz": "--all --count 100000",
    "sanitize": "--all --count 100000",
    "replay": "cases.jsonl",
    "watch": "attention_flash_q8_0_tile_batched",
    "diff": "attention_verify_mma_q8_r16_g6_d8 attention_verify_mma_q8_r8_g6_d8",
    "demo": "--max-new-tokens 20000",
    "generate": "--prompt x --max-new-tokens 20000",
    "qualify": "--device host --head-dim 128 --out host.json",
    "tune": "--device host --out tuning.json",
    "ab": "--kernel tile_batched rows8 --ctx 8192",
}
"""Commands that work for longer than a second, and what makes them. `bench` needs a card."""


@pytest.mark.parametrize("name", LONG)
def test_ctrl_c_ends_it(name: str, tmp_path: Path) -> None:
    case = '{"variant": "attention_flash_q8_0_tile_batched_d8", "rows": 32, "ctx": 8192, "head_dim": 256, "group": 6}\n'
    (tmp_path / "cases.jsonl").write_text(1000 * case)
    command = Command(tmp_path, name, *LONG[name].split(), env={"HIPFIRE_CACHE_DIR": str(tmp_path / "cache")})
    t = time.time()
    code, spent = command.end()
    print(name, code, round(spent, 2), "wall", round(time.time() - t, 2), command.said()[-300:])
    assert code == 128 + signal.SIGINT
    assert "Traceback" not in command.said()
    assert command.said().endswith("interrupted\n")
    assert marked(command.mark) == []
    assert list(command.scratch.iterdir()) == []
    assert spent < 2 * (os.cpu_count() or 1)
