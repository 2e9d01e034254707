"""Threads and processes: a plan in two threads, a fork, what travels by pickle and what says why it does not."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from route_lab import opened

import hipfire_kernels as hk
from hipfire_kernels import errors
from hipfire_kernels.authoring.family import KernelFamily, Variant
from hipfire_kernels.checking.parity import Case, Result, inputs
from hipfire_kernels.dispatch import AttendRequest, admit
from hipfire_kernels.errors import InputError
from hipfire_kernels.running.attention import check_verify, verify_plan
from hipfire_kernels.running.devices.host import HostDevice
from hipfire_kernels.running.devices.protocol import Device

Array = np.ndarray[Any, Any]
TILE = hk.families()["attention_flash_q8_0_tile_batched"]
REQUEST = AttendRequest(
    arch="host", kv_format="q8_0", head_dim=64, n_heads=4, n_kv_heads=2, rows=5, logical_ctx=40, layout="chain",
    capturing=False, recording=False,
)  # fmt: skip


def arrays(seed: int = 0) -> dict[str, Array]:
    i = inputs(Case(5, 40, 4, 2, 64, seed=seed))
    return {"q": i.q, "k_cache": i.k_cache, "v_cache": i.v_cache, "positions": i.positions}


# ---- threads ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["plan", "verify plan"])
def test_a_plan_that_another_thread_runs_is_refused(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread stands inside of a launch; the plan is free again when it is through, or has failed."""
    device, call = HostDevice(), arrays()
    if level == "plan":
        run: Callable[..., Any] = hk.plan(REQUEST, device, capacity=77).run
    else:
        shape = check_verify(device, call["q"], call["k_cache"], call["v_cache"])
        run = verify_plan(TILE.variant(head_dim=64, mask="causal"), device, shape, 77).run
    inside, go_on, launch = threading.Event(), threading.Event(), device.launch

    def standing(*args: Any) -> None:
        inside.set()
        assert go_on.wait(300)
        launch(*args)

    first, second = (np.full_like(call["q"], np.nan) for _ in range(2))
    with ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(device, "launch", standing)
        done = pool.submit(run, **call, out=first)
        assert inside.wait(300)
        monkeypatch.undo()
        try:
            with pytest.raises(
                InputError, match=r"another thread runs <\w*Plan .*; required: one at a time, make a plan"
            ):
                run(**call, out=second)
        finally:
            go_on.set()
        done.result()
    assert np.isnan(second).all()
    with pytest.raises(InputError, match="q has dtype"):
        run(**{**call, "q": call["q"][:3]}, out=second)
    run(**call, out=second)
    assert np.array_equal(first, second)


def test_threads_that_share_a_plan_get_right_numbers_or_none() -> None:
    plan = hk.plan(REQUEST, "host", capacity=77)
    calls = [arrays(seed) for seed in range(4)]
    want = [hk.attend(**call) for call in calls]

    def work(seed: int) -> int:
        done = 0
        for _ in range(30):
            out = np.full_like(want[seed], np.nan)
            try:
                plan.run(**calls[seed], out=out)
            except InputError:
                assert np.isnan(out).all()
            else:
                done += 1
                assert np.array_equal(out, want[seed])
        return done

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(work, range(4))) > 0


# ---- forks -----------------------------------------------------------------------------------------------------------

FORKED = """
import os, threading
import numpy as np
import hipfire_kernels as hk
from hipfire_kernels.dispatch import calls, counters
from hipfire_kernels.running import devices
from test_processes import REQUEST, arrays

def run():
    return hk.attend(**arrays()).tobytes(), hk.draft_attend(*(np.ones((5, 2, 64), np.float32),) * 3).tobytes()

want, plan = run(), hk.plan(REQUEST, "host", capacity=77)
locks = calls._plans_lock, counters._lock, devices._opening
held, go_on = threading.Event(), threading.Event()

def hold():  # as a thread does that is in the middle of something while another one forks
    with locks[0], locks[1], locks[2]:
        held.set()
        go_on.wait()

holder = threading.Thread(target=hold, daemon=True)
holder.start()
held.wait()
child = os.fork()
if not child:
    ok = run() == want and hk.device("host") is devices.device("host")
    out = np.zeros_like(arrays()["q"])
    plan.run(**arrays(), out=out)
    os._exit(0 if ok and out.tobytes() == want[0] else 1)
_, status = os.waitpid(child, 0)
go_on.set()
holder.join()
assert run() == want
print("child", os.waitstatus_to_exitcode(status))
"""


def child(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd="tests", timeout=600)


def test_a_forked_child_goes_on_by_itself(host: Device) -> None:
    """Its threads stayed in the parent: those that run blocks, and those that held a lock."""
    hk.attend(**arrays())  # so that the child compiles nothing
    done = child(FORKED)
    assert done.stdout == "child 0\n", done.stdout + done.stderr


SPAWNED = """
import multiprocessing as mp
import numpy as np
import hipfire_kernels as hk
from test_processes import REQUEST, arrays

if __name__ == "__main__":
    want = hk.attend(**arrays())
    for method in ("spawn", "forkserver"):
        with mp.get_context(method).Pool(1) as pool:
            got = pool.apply(hk.attend, tuple(arrays().values()))
            decision = pool.apply(hk.dispatch.admit, (REQUEST,))
            assert decision == hk.dispatch.admit(REQUEST)
            try:
                pool.apply(hk.attend, (arrays()["q"], 5, 5, 5))
            except hk.InputError as error:
                print(method, np.array_equal(got, want), error)
"""


def test_a_spawned_child_takes_requests_and_gives_back_results_and_errors(host: Device, tmp_path: Any) -> None:
    hk.attend(**arrays())
    file = tmp_path / "spawned.py"  # spawn imports the program again
    file.write_text(SPAWNED)
    command = [sys.executable, str(file)]
    path = {"PYTHONPATH": ":".join(["tests", *sys.path])}
    import os

    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env={**os.environ, **path})
    said = "k_cache is a int; the host device takes numpy arrays and CPU DLPack producers"
    assert done.stdout.splitlines() == [f"spawn True {said}", f"forkserver True {said}"], done.stderr


# ---- pickle ----------------------------------------------------------------------------------------------------------


def travelled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def test_every_variant_and_family_travels_by_name() -> None:
    for family in hk.families().values():
        assert travelled(family) is family
        assert copy.deepcopy(family) is family
        for variant in family.variants():
            found = travelled(variant)
            assert found == variant
            assert found.family is family
            assert {type(value) for _, value in found.params} == {type(value) for _, value in variant.params}
    assert len(pickle.dumps(variant)) < 300


def test_a_variant_that_the_other_process_does_not_have_is_refused_there() -> None:
    """Another version of the package, say."""
    removed = Variant(TILE, (("head_dim", 320), ("mask", "causal")))
    with pytest.raises(InputError, match="attention_flash_q8_0_tile_batched: head_dim=320 is not declared"):
        pickle.loads(pickle.dumps(removed))


def test_a_family_of_ones_own_says_why_it_does_not() -> None:
    own: KernelFamily = dataclasses.replace(TILE, doc="changed")
    for value in (own, own.variant(head_dim=64, mask="causal"), {"deep": [own]}):
        with pytest.raises(
            InputError, match=r"<KernelFamily attention_flash\w* .*> cannot be pickled: it is none of fam"
        ):
            pickle.dumps(value)


def test_requests_decisions_and_results_travel() -> None:
    gfx = dataclasses.replace(
        REQUEST, arch="gfx1100", head_dim=256, n_heads=24, n_kv_heads=4, rows=16, logical_ctx=20676
    )
    with opened(128, 4, 2):
        tuned = admit(dataclasses.replace(REQUEST, head_dim=128), route_name="verify_gqa")
    assert tuned.tuning is not None
    result = Result(TILE.variant(head_dim=64, mask="causal"), Case(5, 40, 4, 2, 64), 1e-7, 1e-5, "")
    for value in (REQUEST, gfx, admit(REQUEST), admit(gfx), tuned, result):
        found = travelled(value)
        assert found == value
        assert type(found) is type(value)
    assert travelled(admit(gfx)).explain() == admit(gfx).explain()


def test_results_of_a_generation_travel() -> None:
    from hipfire_kernels.model.result import GenerationResult

    result = GenerationResult(tokens=[1, 2], accepted=[1], produced=[2], stop_reason="stop")
    result.attention.routes["tile_batched"] += 3
    assert travelled(result) == result


def raised(kind: type[errors.HipfireError]) -> errors.HipfireError:
    more: dict[str, Any] = {errors.CompileError: {"log": "a log", "source": "a source"}}.get(kind, {})
    if kind is errors.NotAdmitted:
        more = {"decision": admit(dataclasses.replace(REQUEST, rows=0))}
    return kind("what was seen", **more)


KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.HipfireError)]


@pytest.mark.parametrize("kind", KINDS)
def test_errors_travel_with_all_that_they_hold(kind: type[errors.HipfireError]) -> None:
    error = raised(kind)
    found = travelled(error)
    assert type(found) is kind
    assert (str(found), vars(found)) == (str(error), vars(error))
    assert repr(found) == repr(error)


def plan() -> Any:
    return hk.plan(REQUEST, "host", capacity=77)


def tile_plan() -> Any:
    return plan()._prepared["tile_batched"]


BOUND: list[tuple[Callable[[], Any], str]] = [
    (lambda: hk.device("host"), "<HostDevice host> .*; send its name, and call hipfire_kernels.device"),
    (lambda: HostDevice(thread_order=3), "<HostDevice host thread_order=3> .*; send its name"),
    (plan, "<Plan tile_batched on host: .*> .*; send its `decision.request`, and call hipfire_kernels.plan"),
    (tile_plan, "<TilePlan attention_flash_q8_0_tile_batched_d2 on host, up to 40 keys> .*; make another one"),
]


@pytest.mark.parametrize(("make", "message"), BOUND)
def test_what_belongs_to_a_process_says_why_it_does_not_travel(make: Callable[[], Any], message: str) -> None:
    value = make()
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(
            InputError, match=message.replace(" .*;", " cannot be pickled: it belongs to this process;")
        ):
            pickle.dumps([value], protocol)
    with pytest.raises(InputError, match="cannot be pickled"):
        copy.deepcopy(value)


def test_each_has_a_repr_that_one_can_read() -> None:
    rows8 = hk.families()["attention_flash_q8_0_rows"]
    assert repr(rows8) == "<KernelFamily attention_flash_q8_0_rows (rows, head_dim)>"
    assert repr(rows8.variant(rows=8, head_dim=128)) == "<Variant attention_flash_q8_0_rows8_d4>"
    assert repr(hk.device("host")) == "<HostDevice host>"
    assert repr(plan()) == ("<Plan tile_batched on host: 5 rows, 4/2 heads of 64, up to 40 of 77 keys, 5,280 bytes>")
    closed = "verify_mma, verify_gqa, rows8, rows4, wmma_prefill"
    assert repr(admit(REQUEST)) == (
        f"<Decision tile_batched on host for verify of 5 rows, 4/2 heads of 64, 40 keys; passed over: {closed}>"
    )
    nothing = repr(admit(dataclasses.replace(REQUEST, rows=0)))
    assert nothing.startswith("<Decision no route on host for verify of 0 rows")
    assert eval(repr(REQUEST), {"AttendRequest": AttendRequest}) == REQUEST
