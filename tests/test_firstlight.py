"""`hfk firstlight`: what it does where things are wrong, that it goes on where it was, and what it leaves."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from budget import some
from firstlight_lab import KV, REDUCE, TILE, asked, document, few, hfk, install, passed, quiet, replace_body
from standin_lab import HIP, missing
from test_endings import marked, until

import hipfire_kernels as hk
from hipfire_kernels.bench.firstlight import early, process, steps
from hipfire_kernels.bench.firstlight.checks import Canaries
from hipfire_kernels.bench.firstlight.process import Ended
from hipfire_kernels.checking.matrix_arithmetic import KEPT, ZERO, arithmetic
from hipfire_kernels.checking.matrix_probe import PROBE, used_by
from hipfire_kernels.dispatch import runfolder
from hipfire_kernels.dispatch.runfolder import (
    ABSENT,
    CRASHED,
    FAILED,
    HUNG,
    LOST,
    PASSED,
    SKIPPED,
    Folder,
    Mark,
    Result,
)
from hipfire_kernels.errors import InputError
from hipfire_kernels.running.devices.isa import IsaDevice

# ---- the runner, with processes that are made up ---------------------------------------------------------------------


class Killed(BaseException):
    """As if the run were killed here."""


class Children:
    """Instead of processes: what each step comes to, and what has been started."""

    def __init__(self, folder: Folder, monkeypatch: pytest.MonkeyPatch, **becomes: Any) -> None:
        self.folder, self.becomes, self.started = folder, becomes, list[str]()
        monkeypatch.setattr(process, "run", self.run)

    def run(self, path: Path, step: str, silent_s: float, interrupted: Callable[[], None] = lambda: None) -> Ended:
        assert path == self.folder.path
        self.started.append(step)
        if step != "alive":
            assert self.folder.mark(step) is not None  # before it starts
        becomes = self.becomes.get(step.replace("-", "_"), PASSED)
        if isinstance(becomes, KeyboardInterrupt):
            interrupted()
        if isinstance(becomes, BaseException):
            raise becomes
        if isinstance(becomes, Ended):
            return becomes
        if step != "alive":
            self.folder.keep(Result(step, becomes, ("made up",), runfolder.now(), 0.0))
        return Ended("", "", "done")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    """A run that begins. Nothing waits for the disk: no machine goes down here."""
    monkeypatch.setattr(os, "fsync", lambda number: None)
    made = Folder(tmp_path / "run")
    made.make(asked(names=(KV, REDUCE, TILE)))
    return made


def states(folder: Folder) -> dict[str, str]:
    return {step.name: result.state for step, result in quiet(folder).results()}


def test_all_steps_in_order(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    children = Children(folder, monkeypatch)
    runner = quiet(folder)
    assert runner.run() == ""
    assert children.started == [step.name for step in runner.plan]
    assert children.started[:7] == [
        "machine", "memory", "kernel", "compilers", "matrix", "canaries", "interpreter",
    ]  # fmt: skip
    assert children.started[7:10] == [f"quick-{name}" for name in (KV, REDUCE, TILE)]  # the simplest first
    summary = document(folder.path / "summary.json")
    assert summary["complete"]
    assert summary["good"]
    children.started.clear()
    quiet(folder).run()
    assert children.started == []  # all of it is known


def test_what_depends_on_a_failed_step_is_not_run_and_the_rest_is(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    children = Children(folder, monkeypatch, **{f"quick_{REDUCE}": FAILED})
    assert quiet(folder).run() == ""
    found = states(folder)
    assert found[f"quick-{REDUCE}"] == FAILED
    assert found[f"quick-{TILE}"] == found[f"grid-{REDUCE}"] == found["qualify"] == found["bench"] == SKIPPED
    assert found[f"grid-{KV}"] == PASSED
    assert children.started.count("alive") == 1
    said = folder.result(f"quick-{TILE}")
    assert said is not None
    assert f"needs quick-{REDUCE}" in said.found[0]
    # Mended, and asked for: what was skipped is run.
    children.becomes.clear()
    children.started.clear()
    assert quiet(folder).run(again=[f"quick-{REDUCE}"]) == ""
    assert set(states(folder).values()) == {PASSED}
    assert f"quick-{KV}" not in children.started


def test_a_card_that_is_dead_behind_a_step_gets_no_other(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    hung = Ended(HUNG, "no sign of life for 5 s", "launching")
    children = Children(folder, monkeypatch, canaries=hung, alive=hung)
    said = quiet(folder).run()
    assert "behind canaries the card does no work any more" in said
    assert children.started[-2:] == ["canaries", "alive"]
    found = folder.result("canaries")
    assert found is not None
    assert (found.state, found.found[0]) == (HUNG, "no sign of life for 5 s; the last it said: launching")
    # After a reset it goes on behind that step.
    del children.becomes["alive"]
    children.started.clear()
    assert quiet(folder).run() == ""
    assert children.started[0] == "interpreter"
    assert states(folder)["canaries"] == HUNG


def test_a_process_that_cannot_be_ended_stops_the_run(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    children = Children(folder, monkeypatch, memory=Ended(HUNG, "no sign of life for 5 s", "x", gone=False))
    assert "behind memory" in quiet(folder).run()
    assert children.started == ["machine", "memory"]
    found = folder.result("memory")
    assert found is not None
    assert "it sits in the driver" in found.found[-1]


STEPS = [step.name for step in steps.plan(asked(names=(KV, REDUCE, TILE)))]


@pytest.mark.parametrize("victim", some(STEPS, 5))
def test_killed_while_a_step_runs(victim: str, folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mark says which step it was; it is not run again, and what does not need it is."""
    children = Children(folder, monkeypatch, **{victim.replace("-", "_"): Killed()})
    with pytest.raises(Killed):
        quiet(folder).run()
    assert folder.result(victim) is None
    before = children.started.index(victim)
    children.becomes.clear()
    children.started.clear()
    quiet(folder).run()
    assert victim not in children.started
    assert not set(STEPS[:before]) & set(children.started)
    found = states(folder)
    assert found[victim] == LOST
    needing = {step.name for step in quiet(folder).plan if victim in step.needs}
    assert all(found[name] == SKIPPED for name in needing)
    lost = folder.result(victim)
    assert lost is not None
    assert "the run was killed while it ran" in lost.found[0]
    assert lost.found[-1] == f"it is not run again unless you ask for it: --again {victim}"
    quiet(folder).run(again=[victim])
    assert set(states(folder).values()) == {PASSED}


@pytest.mark.parametrize("boundary", some(STEPS, 5))
@pytest.mark.parametrize("behind", [False, True])
def test_killed_between_two_steps(boundary: str, behind: bool, folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ahead of a step's mark, and behind its result: nothing is lost, and nothing is run twice."""
    children = Children(folder, monkeypatch)
    plain = folder.begin

    def begin(step: str) -> None:
        if step == boundary and not behind:
            raise Killed
        plain(step)

    monkeypatch.setattr(folder, "begin", begin)
    runner = quiet(folder)
    if behind:
        monkeypatch.setattr(runner, "_on_step", lambda step, result, known: kill_behind(step.name, boundary))
    with pytest.raises(Killed):
        runner.run()
    monkeypatch.setattr(folder, "begin", plain)
    again = Children(folder, monkeypatch)
    quiet(folder).run()
    assert children.started + again.started == STEPS
    assert set(states(folder).values()) == {PASSED}


def kill_behind(step: str, boundary: str) -> None:
    if step == boundary:
        raise Killed


def test_a_reset_of_the_machine_is_told_from_a_kill(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    Children(folder, monkeypatch)
    passed(folder, "machine")
    folder._write(folder._file("memory", "begun.json"), vars(Mark("memory", runfolder.now(), "another life")))
    folder.note("memory", {"begins": "64 bytes"})
    quiet(folder).run()
    found = folder.result("memory")
    assert found is not None
    assert "the machine was started anew while it ran" in found.found[0]
    assert found.found[1] == "at work on 64 bytes"


def test_a_kernel_that_has_brought_down_a_step_is_not_run_by_the_next(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time it runs may cost a reset."""
    Children(folder, monkeypatch, canaries=Ended(HUNG, "no sign of life for 5 s", "x"))
    folder.note("canaries", {"begins": "a case", "family": REDUCE})
    quiet(folder).run()
    found = states(folder)
    assert found[f"quick-{REDUCE}"] == found[f"grid-{REDUCE}"] == found[f"quick-{TILE}"] == SKIPPED
    assert found[f"quick-{KV}"] == PASSED
    job = steps.Job(steps.ALIVE, folder.asked(), folder, lambda what: None)
    assert job.left_out(REDUCE) == f"{REDUCE} is left out: a kernel of it has brought down step canaries"
    assert job.left_out(KV) == ""
    children = Children(folder, monkeypatch)
    quiet(folder).run(again=[f"quick-{REDUCE}"])
    assert f"quick-{REDUCE}" in children.started
    assert "canaries" not in children.started
    children.started.clear()
    quiet(folder).run(again=["canaries"])
    assert set(states(folder).values()) == {PASSED}


def test_ctrl_c_leaves_no_mark(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    Children(folder, monkeypatch, kernel=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        quiet(folder).run()
    assert folder.mark("kernel") is None
    Children(folder, monkeypatch)
    quiet(folder).run()
    assert set(states(folder).values()) == {PASSED}


def test_another_run_is_refused(folder: Folder) -> None:
    for other, match in (
        (asked(device="hip:1", names=(KV, REDUCE, TILE)), "device was 'hip:0'"),
        (asked(), "families was"),
        (asked(names=(KV, REDUCE, TILE), templates="x"), "its kernels have changed since"),
    ):
        with pytest.raises(InputError, match=f"is of another run: {match}.*name another folder"):
            folder.make(other)
    with pytest.raises(InputError, match="there is no step 'kernels'; the steps of this run: machine, memory"):
        quiet(folder).run(until="kernels")


def test_notes_survive_a_line_that_was_cut_off(folder: Folder) -> None:
    folder.note("memory", {"a": 1})
    with folder._file("memory", "progress.jsonl").open("ab") as file:
        file.write(b'\n{"b": ')
    folder.note("memory", {"c": 3})
    assert folder.notes("memory") == [{"a": 1}, {"c": 3}]


def test_matrix_families_need_the_matrix_unit() -> None:
    matrix = {name for name, family in hk.families().items() if used_by(family)}
    assert matrix == {name for name in hk.families() if "mma" in name}
    assert set(steps.SIMPLEST_FIRST) == set(hk.families())
    plan = {step.name: step for step in steps.plan(asked(names=tuple(hk.families())))}
    for name in hk.families():
        assert (runfolder.MATRIX in plan[runfolder.quick(name)].needs) == (name in matrix)


# ---- what steps find ------------------------------------------------------------------------------------------------


def isa(name: str = "isa:gfx1201") -> IsaDevice:
    found = hk.device(name)
    assert isinstance(found, IsaDevice)
    return found


@pytest.mark.parametrize("fault", ["", "beside", "input"])
def test_canaries(fault: str) -> None:
    """A launch that writes where it must not, planted behind the launch of a right kernel."""
    on = isa()
    plain = on.launch

    def scribbling(launches: Any, stream: Any = None) -> None:
        plain(launches, stream)
        on.synchronize()
        x, y = launches[0].args.described()
        at = {"beside": (y, y.nbytes), "input": (x, 0)}.get(fault)
        if at is not None:
            ctypes.memset(launches[0].args.values[at[0].slot].value + at[1], 0x11, 1)

    vars(on)["launch"] = scribbling
    with Canaries(on) as held:
        got, want = early.run_trivial(on)
        held.look()
    assert np.array_equal(got, want)
    assert (
        held.faults
        == {"": [], "beside": ["wrote beside an array of int32"], "input": ["its input x was changed"]}[fault]
    )
    assert not {"launch", "empty"} & set(vars(on))


def test_arithmetic_of_both_modes() -> None:
    for name, word in (("isa:gfx1201", KEPT), ("isa:gfx1201+flush", ZERO)):
        told = arithmetic(isa(name))
        assert told["subnormal f16 of A"] == told["subnormal f16 of B"] == word
        assert told["1 and three quarters of a unit"] == "to nearest"


def test_on_the_interpreter(tmp_path: Path) -> None:
    """All steps of one family; then nothing is left to do."""
    arguments = ("firstlight", "--device", "isa:gfx1201", "--family", KV, "--out", "run", "--json")
    done = hfk(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    found = {one["step"]: one for one in summary["steps"]}
    assert summary["complete"]
    assert summary["device"]["kind"] == "interpreter"
    wanted = {"interpreter": ABSENT, "qualify": ABSENT, "bench": ABSENT, "compilers": found["compilers"]["state"]}
    assert {name: one["state"] for name, one in found.items()} == {name: wanted.get(name, PASSED) for name in found}
    for name in ("qualify", "bench"):
        assert found[name]["found"][0].startswith("no times here: isa:gfx1201 interprets machine code")
    assert summary["evidence"] == ""
    page = (tmp_path / "run" / "index.html").read_text(encoding="utf-8")
    assert "interpreter of gfx1201" in page
    assert "no card" in page
    assert "http" not in page  # it needs no network
    again = hfk(*arguments, cwd=tmp_path)
    assert again.stderr.count("(from before)") == len(found)
    refused = hfk("evidence", "add", "run", cwd=tmp_path)
    assert refused.returncode == 3
    assert "it is from no card: isa:gfx1201 is interpreter" in refused.stderr


# ---- on the stand-in for HIP ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def standin(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    if why := missing(HIP):
        pytest.skip(why)
    return install(tmp_path_factory.mktemp("standin"))


EARLY = ("machine", "memory", "kernel", "compilers", "matrix", "canaries", "interpreter")


def on_standin(
    tmp_path: Path, environ: dict[str, str], until: str, behind: tuple[str, ...], *more: str
) -> tuple[int, dict[str, Result], str]:
    """Run on hip:0 with some steps behind us: exit code, what came of steps, and what was said."""
    folder = Folder(tmp_path / "run")
    if not folder.path.exists():
        folder.make(asked(names=(KV, REDUCE)))
        passed(folder, *behind)
    names = ("--family", KV, "--family", REDUCE, "--few", "--until", until, *more)
    done = hfk("firstlight", "--device", "hip:0", "--out", "run", *names, cwd=tmp_path, **environ)
    return done.returncode, {s.name: r for s, r in quiet(folder).results()}, done.stdout + done.stderr


def test_no_card_at_all(tmp_path: Path, standin: dict[str, str]) -> None:
    code, found, said = on_standin(tmp_path, {**standin, "STANDIN_ARCHS": ""}, "kernel", ())
    assert code == 3
    assert found["machine"].state == FAILED
    assert "hip:0 does not open: hipGetDeviceCount failed: hipErrorNoDevice" in said
    assert found["memory"].state == found["kernel"].state == SKIPPED


def test_a_wrong_lane_map(tmp_path: Path, standin: dict[str, str]) -> None:
    root = Path(standin["ROCM_PATH"])
    file = root / "kernels" / "matrix_probe.so"
    right = file.read_bytes()
    try:
        replace_body(
            root,
            PROBE.variant(),
            "matrix_host.h",
            "hk::multiply<fragment::acc_row, fragment::acc_col>",
            "hk::multiply<fragment::acc_col, fragment::acc_row>",
        )
        code, found, said = on_standin(tmp_path, standin, "matrix", EARLY[:4])
    finally:
        file.write_bytes(right)
    assert code == 1
    assert found["matrix"].state == FAILED
    assert "acc_row: " in said
    assert "is claimed" in said


def test_a_kernel_that_hangs(tmp_path: Path, standin: dict[str, str]) -> None:
    planted = {**standin, "STANDIN_HANGS": "kv_cache_write"}
    code, found, said = on_standin(tmp_path, planted, f"quick-{REDUCE}", EARLY, "--limit", "6")
    assert code == 1
    hung = found[f"quick-{KV}"]
    assert hung.state == HUNG
    assert hung.found[0].startswith("no sign of life for 6 s; the last it said: ")
    assert hung.found[1] == "at work on kv_cache_write_q8_0_pair_batched"
    assert found[f"quick-{REDUCE}"].state == PASSED, said  # the card works on
    # Mended, and asked for again.
    code, found, said = on_standin(tmp_path, standin, f"quick-{KV}", EARLY, "--again", f"quick-{KV}")
    assert (code, found[f"quick-{KV}"].state) == (0, PASSED), said


def test_a_kernel_that_crashes(tmp_path: Path, standin: dict[str, str]) -> None:
    planted = {**standin, "STANDIN_CRASHES": "reduce_batched"}
    code, found, said = on_standin(tmp_path, planted, f"quick-{REDUCE}", (*EARLY, f"quick-{KV}"))
    assert code == 1
    crashed = found[f"quick-{REDUCE}"]
    assert crashed.state == CRASHED
    assert crashed.found[0].startswith("SIGABRT, ")
    assert "at work on attention_flash_reduce_batched" in said


@pytest.mark.parametrize("wrong", [pytest.param(False, marks=pytest.mark.long), True])
def test_beside_the_interpreter(wrong: bool, tmp_path: Path, standin: dict[str, str]) -> None:
    """The blocks that the cache write quantises must be the interpreter's to the bit."""
    root, (variant,) = Path(standin["ROCM_PATH"]), few(KV)
    file = root / "kernels" / f"{variant.entry}.so"
    right = file.read_bytes()
    try:
        if wrong:
            replace_body(root, variant, "kv_cache_write_q8_0_batched.hip.j2", "127.0f", "126.0f")
        code, found, said = on_standin(tmp_path, standin, "interpreter", (*EARLY[:4], "canaries"))
    finally:
        file.write_bytes(right)
    assert code == int(wrong), said
    assert found["interpreter"].state == (FAILED if wrong else PASSED)
    if wrong:
        assert "other bits than the interpreter's, and must have the same" in said


def test_killed_for_good(tmp_path: Path, standin: dict[str, str]) -> None:
    """SIGKILL while a step hangs: its process ends too, and the next run knows which step it was."""
    folder = Folder(tmp_path / "run")
    folder.make(asked(names=(KV, REDUCE)))
    passed(folder, *EARLY)
    command = ("firstlight", "--device", "hip:0", "--out", "run", "--family", KV, "--family", REDUCE, "--few")
    environ = {**os.environ, **standin, "STANDIN_HANGS": "kv_cache_write", "HK_MARK": str(tmp_path)}
    running = subprocess.Popen(
        [sys.executable, "-m", "hipfire_kernels.cli", *command], cwd=tmp_path, env=environ,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        while not folder.notes(f"quick-{KV}"):
            assert running.poll() is None
            time.sleep(0.05)
    finally:
        running.send_signal(signal.SIGKILL)
        running.wait()
    until(lambda: marked(str(tmp_path)) == [])
    code, found, said = on_standin(tmp_path, standin, f"quick-{REDUCE}", EARLY)
    assert code == 1
    assert found[f"quick-{KV}"].state == LOST
    assert found[f"quick-{REDUCE}"].state == PASSED, said
