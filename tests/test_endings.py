"""How `hfk` ends: by Ctrl-C at once, with all that it started; without a traceback where nobody takes its output.

Nothing here depends on the clock: a busy machine only makes it take longer.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from budget import some

from hipfire_kernels.authoring.family import Variant
from hipfire_kernels.building.processes import descendants, unheard
from hipfire_kernels.cli import _ending, app

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


def listening() -> None:
    """A shell that starts something in the background has it ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


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
            start_new_session=True,
            preexec_fn=listening,
        )

    def cpu(self) -> float:
        """CPU seconds of it and of all below it."""
        return cpu(self.process.pid) + sum(map(cpu, descendants(self.process.pid)))

    def said(self) -> str:
        """What it has said on stderr."""
        self.error.seek(0)
        return self.error.read()

    def end(self, number: int = signal.SIGINT, *, alone: bool = False) -> tuple[int, float]:
        """Once it is at work, send it a signal, and as a terminal does what it has started too, but for processes with
        a session of their own. Its exit code, and the CPU seconds that it had from then on."""
        until(lambda: self.cpu() > WORKING_S or self.process.poll() is not None)
        assert self.process.poll() is None, self.said()
        before = cpu(self.process.pid)
        (os.kill if alone else os.killpg)(self.process.pid, number)
        _, status, used = os.wait4(self.process.pid, 0)
        self.process.returncode = os.waitstatus_to_exitcode(status)
        return self.process.returncode, used.ru_utime + used.ru_stime - before


LONG: dict[str, str] = {
    "build": "--all --arch gfx1100,gfx1201",
    "bundle": "--all --arch gfx1100,gfx1201 --out bundle",
    "lint": "",
    "parity": "--all",
    "fuzz": "--all --count 100000",
    "sanitize": "--all --count 100000",
    "replay": "cases.jsonl",
    "watch": "attention_flash_q8_0_tile_batched",
    "diff": "attention_verify_mma_q8_r16_g6_d8 attention_verify_mma_q8_r8_g6_d8",
    "demo": "--max-new-tokens 20000",
    "generate": "--prompt x --max-new-tokens 20000",
    "firstlight": "--device isa:gfx1201 --full",
    "qualify": "--device host --head-dim 128 --out host.json",
    "tune": "--device host --out tuning.json",
    "ab": "--kernel tile_batched rows8 --ctx 8192",
}
"""Commands that work for longer than a second, and what makes them. `bench` needs a card."""


@pytest.mark.parametrize("name", some(LONG, 8))
def test_ctrl_c_ends_it(name: str, tmp_path: Path) -> None:
    case = '{"variant": "attention_flash_q8_0_tile_batched_d8", "rows": 32, "ctx": 8192, "head_dim": 256, "group": 6}\n'
    (tmp_path / "cases.jsonl").write_text(1000 * case)
    command = Command(tmp_path, name, *LONG[name].split(), env={"HIPFIRE_CACHE_DIR": str(tmp_path / "cache")})
    code, spent = command.end()
    assert code == 128 + signal.SIGINT, command.said()
    assert "Traceback" not in command.said()
    assert command.said().endswith("interrupted\n")
    assert marked(command.mark) == []
    assert list(command.scratch.iterdir()) == []
    assert spent < 2 * (os.cpu_count() or 1)


@pytest.mark.parametrize("name", ["fuzz", "sanitize", "ab"])
def test_a_signal_to_it_alone_ends_what_it_started(name: str, tmp_path: Path) -> None:
    """Which the system does not send it to, as it does with Ctrl-C."""
    command = Command(tmp_path, name, *LONG[name].split(), env={"HIPFIRE_CACHE_DIR": str(tmp_path / "cache")})
    code, _ = command.end(signal.SIGTERM, alone=True)
    assert code == 128 + signal.SIGTERM
    assert "Traceback" not in command.said()
    assert marked(command.mark) == []
    assert list(command.scratch.iterdir()) == []


LOADING = """
import time
from hipfire_kernels.cli import _ending

time.sleep(0.3)  # as if more were imported
_ending.run(lambda: time.sleep(3600))
"""


def test_ctrl_c_while_what_it_started_still_loads() -> None:
    with unheard():
        started = subprocess.Popen([sys.executable, "-c", LOADING], stderr=subprocess.PIPE, text=True)
    started.send_signal(signal.SIGINT)
    assert started.communicate(timeout=60)[1] == "interrupted\n"
    assert started.returncode == 128 + signal.SIGINT


FREED = """
import os, signal, time
from hipfire_kernels.cli import _ending

class Freed:
    def __init__(self, action):
        self.action = action

    def __del__(self):
        self.action()

def fail():
    raise ValueError("a fault is said")

def command():
    Freed(fail)
    Freed(lambda: os.kill(os.getpid(), signal.SIGINT))
    time.sleep(3600)

_ending.run(command)
"""


def test_ctrl_c_while_an_object_is_freed() -> None:
    """Where Python can raise nothing it would print a traceback, and forget the interrupt."""
    done = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, timeout=60)
    assert done.returncode == 128 + signal.SIGINT
    assert "KeyboardInterrupt" not in done.stderr
    assert "ValueError: a fault is said" in done.stderr
    assert done.stderr.endswith("interrupted\n")


def test_every_command_is_known_here() -> None:
    names = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    assert names - set(LONG) == {"bench", "convert", "doctor", "explain", "isa", "list", "render", "report"}


DEAF = """
import threading
import time
from hipfire_kernels.cli import _ending

def command():
    threading.Thread(target=time.sleep, args=(3600,)).start()
    try:
        print("ready", flush=True)
        time.sleep(3600)
    except KeyboardInterrupt:
        print("heard", flush=True)
    time.sleep(3600)

_ending.run(command)
"""


def test_one_that_does_not_get_to_its_end_is_ended() -> None:
    """What sits in a computation does not see the exception; the clock of another thread runs."""
    assert _ending.GRACE_S < 2
    running = subprocess.Popen([sys.executable, "-c", DEAF], stdout=subprocess.PIPE, text=True, preexec_fn=listening)
    assert running.stdout is not None
    assert running.stdout.readline() == "ready\n"
    running.send_signal(signal.SIGINT)
    assert running.communicate(timeout=PATIENCE_S)[0] == "heard\n"
    assert running.returncode == 128 + signal.SIGINT


def test_a_signal_that_is_ignored_stays_so() -> None:
    """As of what runs behind `nohup`."""
    code = """
import signal
from hipfire_kernels.cli import _ending
signal.signal(signal.SIGHUP, signal.SIG_IGN)
_ending.run(lambda: signal.raise_signal(signal.SIGHUP))
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# ---- output ---------------------------------------------------------------------------------------------------------

SHORT = {
    "--help": 0, "list": 0, "list --json": 0, "explain --arch gfx1100": 0, "cache": 0, "nonsense": 2,
    "explain --arch nothing --json": 2,
}  # fmt: skip
"""Quick commands, and their exit codes. The words of `nonsense` go to stderr."""


@pytest.mark.parametrize("line", SHORT)
@pytest.mark.parametrize(
    ("to", "code", "says"),
    [
        (">/dev/full", 1, "error: the output cannot be written (No space left on device)"),
        (">&-", 0, ""),
        (">/dev/null 2>/dev/full", 0, ""),
        (">/dev/null 2>&-", 0, ""),
    ],
    ids=["full", "closed", "full stderr", "closed stderr"],
)
def test_output_that_nobody_takes(line: str, to: str, code: int, says: str) -> None:
    shell = f'{{ "$0" -m hipfire_kernels.cli {line} {to}; echo $? >&3; }} 3>&1'
    done = subprocess.run(["sh", "-c", shell, sys.executable], capture_output=True, text=True)
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    if line == "nonsense" or code == 0:
        code, says = SHORT[line], ""
    assert says in done.stderr
    assert int(done.stdout.split()[-1]) == code, done.stderr


@pytest.mark.parametrize("line", SHORT)
def test_a_reader_that_has_enough_is_no_error(line: str) -> None:
    """One that closes its end at once: the first write fails."""
    reads, writes = os.pipe()
    command = [sys.executable, "-m", "hipfire_kernels.cli", *line.split()]
    with os.fdopen(writes, "w") as pipe:
        running = subprocess.Popen(command, stdout=pipe, stderr=subprocess.PIPE, text=True)
    os.close(reads)
    said = running.communicate()[1]
    assert "Traceback" not in said
    assert "Broken pipe" not in said
    assert running.returncode == (2 if line == "nonsense" else 128 + signal.SIGPIPE)


def test_a_reader_that_has_enough_after_a_while() -> None:
    """There is more than a pipe holds: a write fails in the middle."""
    command = [sys.executable, "-m", "hipfire_kernels.cli", "explain", "--arch", "all", "--json"]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert running.stdout is not None
    assert running.stderr is not None
    running.stdout.read(1)
    running.stdout.close()
    assert running.stderr.read() == ""
    assert running.wait() == 128 + signal.SIGPIPE


def test_an_error_of_the_system_is_a_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*args: object) -> None:
        raise PermissionError(13, "Permission denied", "/some/file")

    monkeypatch.setattr(Variant, "source", refused)
    with pytest.raises(SystemExit) as ended:
        app(["render", "attention_flash_q8_0_rows8_d8", "--arch", "gfx1100", "--json"])
    seen = capsys.readouterr()
    assert ended.value.code == 1
    assert seen.err == "error: /some/file: Permission denied\n"
    assert json.loads(seen.out)["error"] == {"kind": "PermissionError", "message": "/some/file: Permission denied"}
