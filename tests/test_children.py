"""Cases in child processes: what counts as a hang is what a case computes, not how long a busy machine takes for it."""

from __future__ import annotations

import resource
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from hipfire_kernels import families
from hipfire_kernels.authoring.family import KernelFamily
from hipfire_kernels.building import builder, processes
from hipfire_kernels.building.builder import build
from hipfire_kernels.checking.parity import Case, check, grid
from hipfire_kernels.errors import DeviceError
from hipfire_kernels.inspecting import watch_child
from hipfire_kernels.running.devices.host import HostDevice
from hipfire_kernels.running.preparing import prepare
from hipfire_kernels.testing import FuzzCase, campaign, children, worker
from hipfire_kernels.testing.children import Child

D1 = families()["attention_flash_q8_0_tile_batched"].variant(head_dim=32, mask="causal")
CASE = FuzzCase(D1.entry, ctx=5)


@contextmanager
def stopped(pid: int, seconds: float | None) -> Iterator[None]:
    """A process that gets nothing of the machine for some time, or ever."""
    import os

    os.kill(pid, signal.SIGSTOP)
    timer = threading.Timer(seconds or 0, os.kill, (pid, signal.SIGCONT))
    if seconds is not None:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


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


def test_a_busy_machine_is_no_hang(child: Child) -> None:
    with stopped(process_of(child), 1.5):
        found = child.run(CASE)
    assert found.ok, found.describe()


def test_one_that_waits_for_ever_is_a_hang(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "PATIENCE", 0.5)
    monkeypatch.setattr(children, "BUILD_S", 0.5)
    first = process_of(child)
    with stopped(first, None):
        assert child.run(CASE).fault == "hangs: no answer within 0.5 s"
    monkeypatch.undo()
    assert child.run(CASE).ok
    assert process_of(child) != first


def test_only_the_run_of_a_case_is_limited(monkeypatch: pytest.MonkeyPatch, host: HostDevice) -> None:
    seen: list[tuple[str, int]] = []

    def noted(name: str, then: Callable[..., Any] = lambda *args: None) -> Callable[..., Any]:
        def note(*args: Any) -> Any:
            seen.append((name, resource.getrlimit(resource.RLIMIT_CPU)[0]))
            return then(*args)

        return note

    free, used = resource.getrlimit(resource.RLIMIT_CPU)[0], processes.time.process_time()
    monkeypatch.setattr(worker, "prepare", noted("build", prepare))
    monkeypatch.setattr(worker, "check", noted("run", worker.check))
    assert worker.answer(CASE, host, 1000.0, noted("say"))["fault"] == ""
    assert [name for name, _ in seen] == ["build", "say", "run"]
    assert [limit for _, limit in seen][:2] == [free, free]
    assert used + 1000 <= seen[2][1] <= processes.time.process_time() + 1001
    assert resource.getrlimit(resource.RLIMIT_CPU)[0] == free


@pytest.mark.parametrize("family", families().values(), ids=lambda f: f.name)
def test_nothing_is_compiled_once_a_case_runs(
    family: KernelFamily, host: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant = next(family.variants())
    prepare(variant, host)
    monkeypatch.setattr(builder, "artifact_key", lambda *args: pytest.fail("builds"))
    for case in next(zip(grid(variant, rows=(3,), contexts=(129,)), strict=False)):
        assert check(variant, case, host).ok


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
    import subprocess
    import sys

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


def test_a_busy_machine_is_no_hang_of_a_watched_kernel(
    checker: watch_child.Checker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_child, "LIMIT_S", 1.0)
    artifact, case = build(D1, "host"), Case(1, 5, 2, 2, 32)
    assert checker.run(D1, artifact, [case])[0].ok
    with stopped(checker._process.pid or 0, 1.5):
        assert checker.run(D1, artifact, [case])[0].ok
    monkeypatch.setattr(watch_child, "BUILD_S", 0.5)
    with stopped(checker._process.pid or 0, None), pytest.raises(DeviceError, match=r"hangs, no answer within 0\.5 s"):
        checker.run(D1, artifact, [case])
    monkeypatch.undo()
    assert checker.run(D1, artifact, [case])[0].ok


def test_a_checker_that_was_lost_is_replaced(checker: watch_child.Checker) -> None:
    checker._process.kill()
    checker._process.join()
    assert checker.run(D1, build(D1, "host"), [Case(1, 5, 2, 2, 32)])[0].ok
