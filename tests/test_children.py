"""Cases in child processes: what counts as a hang is what a case computes, not how long a busy machine takes for it."""

from __future__ import annotations

import itertools
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hipfire_kernels import families
from hipfire_kernels.authoring.family import KernelFamily
from hipfire_kernels.building import builder, processes
from hipfire_kernels.building.builder import build
from hipfire_kernels.checking.oracle import check, oracle_of
from hipfire_kernels.checking.parity import Case
from hipfire_kernels.errors import DeviceError
from hipfire_kernels.inspecting import watch_child
from hipfire_kernels.running.devices.host import HostDevice
from hipfire_kernels.running.preparing import prepare
from hipfire_kernels.testing import FuzzCase, campaign, children, worker
from hipfire_kernels.testing.children import Child

D1 = families()["attention_flash_q8_0_tile_batched"].variant(head_dim=32, mask="causal")
CASE = FuzzCase(D1.entry, ctx=5)
LONG = FuzzCase(D1.entry, rows=8, ctx=2048, n_kv_heads=2, group=6)
"""One that is not over at once."""


def stop(pid: int, seconds: float | None) -> None:
    """Let a process have nothing of the machine, for some time or for ever."""
    os.kill(pid, signal.SIGSTOP)
    if seconds is not None:
        threading.Timer(seconds, os.kill, (pid, signal.SIGCONT)).start()


@pytest.fixture
def child(host: HostDevice) -> Iterator[Child]:
    build(D1, "host")
    running = Child("host", None, 1.0)
    assert running.run(CASE).ok
    yield running
    running.close()


def process_of(child: Child) -> int:
    assert child._process is not None
    return child._process.pid


@pytest.mark.parametrize("at", ["build", "run"])
def test_a_busy_machine_is_no_hang(at: str, child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_at(at, child, 1.5, monkeypatch)
    found = child.run(LONG)
    assert found.ok, found.describe()


@pytest.mark.parametrize("at", ["build", "run"])
def test_one_that_waits_for_ever_is_a_hang(at: str, child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    first = process_of(child)
    with monkeypatch.context() as patch:
        patch.setattr(children, "PATIENCE" if at == "run" else "BUILD_S", 0.5)
        stop_at(at, child, None, patch)
        assert child.run(LONG).fault == "hangs: no answer within 0.5 s"
    assert child.run(CASE).ok
    assert process_of(child) != first


def stop_at(at: str, child: Child, seconds: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop the process that the next case is given to: before it looks at its kernels, or once it runs the case."""
    plain, answers = Child._read, itertools.count()

    def read(self: Child, process: Any, limit_s: float) -> Any:
        if next(answers) == 1:
            stop(process.pid, seconds)
        return plain(self, process, limit_s)

    if at == "build":
        stop(process_of(child), seconds)
    else:
        monkeypatch.setattr(Child, "_read", read)


def test_ctrl_c_is_not_sent_to_it(child: Child) -> None:
    """Its end would be taken for that of a kernel, before the parent has heard of the signal."""
    assert os.getpgid(process_of(child)) != os.getpgid(0)


def test_only_the_run_of_a_case_is_limited(monkeypatch: pytest.MonkeyPatch, host: HostDevice) -> None:
    seen: list[tuple[str, int]] = []

    def noted(name: str, then: Callable[..., Any] = lambda *args: None) -> Callable[..., Any]:
        def note(*args: Any) -> Any:
            seen.append((name, resource.getrlimit(resource.RLIMIT_CPU)[0]))
            return then(*args)

        return note

    free, used = resource.getrlimit(resource.RLIMIT_CPU)[0], processes.time.process_time()
    monkeypatch.setattr(worker, "prepare", noted("build", prepare))
    monkeypatch.setattr(worker, "hold", noted("run", worker.hold))
    assert worker.answer(CASE, host, 1000.0, noted("say"))["fault"] == ""
    assert [name for name, _ in seen] == ["build", "say", "run"]
    assert [limit for _, limit in seen][:2] == [free, free]
    assert used + 1000 <= seen[2][1] <= processes.time.process_time() + 1001
    assert resource.getrlimit(resource.RLIMIT_CPU)[0] == free


@pytest.mark.parametrize("family", families().values(), ids=lambda f: f.name)
def test_nothing_is_compiled_once_a_case_runs(
    family: KernelFamily, host: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant, on = next(family.variants()), host.checking()
    prepare(variant, on)
    monkeypatch.setattr(builder, "artifact_key", lambda *args: pytest.fail("builds"))
    assert check(variant, next(iter(oracle_of(variant).glance(variant))), on).ok


def test_a_limit_that_somebody_has_set_stays() -> None:
    code = """
import resource
from hipfire_kernels.building.processes import cpu_limit
resource.setrlimit(resource.RLIMIT_CPU, (50, resource.RLIM_INFINITY))
for wanted in (20, 100):
    with cpu_limit(wanted):
        print(resource.getrlimit(resource.RLIMIT_CPU)[0])
print(resource.getrlimit(resource.RLIMIT_CPU)[0])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() in (["21", "50", "50"], ["22", "50", "50"])


def test_an_interrupted_campaign_ends_its_processes_and_reports_nothing(
    monkeypatch: pytest.MonkeyPatch, host: HostDevice
) -> None:
    """What its processes end with is not taken for a fault of a kernel."""
    said: list[str] = []
    at_work = threading.Event()
    made: list[Child] = []

    def progress(text: str) -> None:
        said.append(text)
        at_work.set()

    def interrupted(self: threading.Thread, timeout: float | None = None) -> None:
        at_work.wait()
        raise KeyboardInterrupt

    def _children(settings: campaign.Settings) -> list[Child]:
        made.extend(Child(settings.device, None, settings.limit_s) for _ in range(2))
        return made

    monkeypatch.setattr(campaign, "_children", _children)
    settings = campaign.Settings((D1,), count=100_000, jobs=2, work=100_000)
    monkeypatch.setattr(threading.Thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        campaign.run(settings, [], progress)
    monkeypatch.undo()
    for thread in threading.enumerate():
        if thread.daemon and "guarded" in thread.name:
            thread.join()
    assert not [text for text in said if text.startswith("FAILED")]
    assert all(child._process is None for child in made)
    with pytest.raises(DeviceError, match="interrupted"):
        made[0].run(CASE)


# ---- hfk watch ------------------------------------------------------------------------------------------------------


@pytest.fixture
def checker(host: HostDevice) -> Iterator[watch_child.Checker]:
    running = watch_child.Checker()
    yield running
    running._process.kill()


@pytest.mark.parametrize("at", ["build", "run"])
def test_a_busy_machine_is_no_hang_of_a_watched_kernel(
    at: str, checker: watch_child.Checker, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact, case = build(D1, "host"), Case(8, 2048, 12, 2, 32)
    plain, answers = watch_child.Checker._answer, itertools.count()
    seconds: list[float | None] = [1.5, None]

    def answer(self: watch_child.Checker, limit_s: float) -> Any:
        if next(answers) == 1:
            stop(self._process.pid or 0, seconds.pop(0))
        return plain(self, limit_s)

    monkeypatch.setattr(watch_child, "LIMIT_S", 1.0)
    assert checker.run(D1, artifact, [case])[0].ok
    with monkeypatch.context() as patch:
        if at == "run":
            patch.setattr(watch_child.Checker, "_answer", answer)
        else:
            stop(checker._process.pid or 0, 1.5)
        assert checker.run(D1, artifact, [case])[0].ok
        answers = itertools.count()
        if at == "build":
            stop(checker._process.pid or 0, None)
        patch.setattr(watch_child, "WALL_S" if at == "run" else "BUILD_S", 0.5)
        with pytest.raises(DeviceError, match=r"hangs, no answer within 0\.5 s"):
            checker.run(D1, artifact, [case])
    assert checker.run(D1, artifact, [case])[0].ok


def test_a_checker_that_was_lost_is_replaced(checker: watch_child.Checker) -> None:
    checker._process.kill()
    checker._process.join()
    assert checker.run(D1, build(D1, "host"), [Case(1, 5, 2, 2, 32)])[0].ok
