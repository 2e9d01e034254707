"""The fiber runtime: what it computes, and that a kernel which would hang or race on a GPU is an error here."""

from __future__ import annotations

import ctypes
import dataclasses
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hipfire_kernels import build
from hipfire_kernels.authoring.args import Lds, Scalar, Tensor
from hipfire_kernels.authoring.family import KernelFamily, Tolerance, Variant
from hipfire_kernels.errors import DeadlockError, DeviceError, InputError, RenderError
from hipfire_kernels.running.binding import launch
from hipfire_kernels.running.devices import arena, device
from hipfire_kernels.running.devices import host as host_runtime
from hipfire_kernels.running.devices.host import HostDevice
from hipfire_kernels.running.devices.protocol import Device, KernelArgs, Launch


def probe(body: str, *, block: int = 64, lds: int = 64) -> Variant:
    """A one-off kernel: `out[block * threads]`, an LDS array `shared` and this body."""
    family = KernelFamily(
        name="probe",
        doc="whatever the test says",
        params={"head_dim": (32,)},
        entry=lambda v: "probe",
        args=lambda v: (Tensor("out", "f32", ("n",), writes=True), Scalar("n", "i32")),
        grid=lambda v, s: (s.n // block, 1, 1),
        block=block,
        lds=lambda v, arch: (Lds("shared", "float", lds),),
        tolerance=Tolerance(0),
        body="{{ signature }} {\n{{ lds.shared }}\n" + body + "\n}\n",
    )
    return family.variant(head_dim=32)


def run(variant: Variant, host: Device, blocks: int = 3) -> np.ndarray[Any, Any]:
    out = np.full(blocks * variant.family.block, np.nan, np.float32)
    launch(variant, host, out=out)
    return out


def test_wave_operations(host: Device) -> None:
    body = """
    const float id = (float)(block_x() * 64 + thread());
    const int own = first_row_of(lane(), 2);
    const float pair[2] = {(1.0f + (float)own) * id, (2.0f - (float)own) * id};
    out[block_x() * 64 + thread()] = wave_sum(id) + 1000.0f * wave_max(id) + 1e6f * wave_sum_rows(pair);
    """
    got = run(probe(body), host)
    for wave in range(6):
        ids = np.arange(32 * wave, 32 * wave + 32, dtype=np.float64)
        sums = np.repeat([ids.sum(), 2 * ids.sum()], 16)
        want = (np.float32(ids.sum() + 1000 * ids.max()) + np.float32(1e6) * sums).astype(np.float32)
        assert np.allclose(got[32 * wave : 32 * wave + 32], want, rtol=1e-6)


def test_lds_is_shared_by_the_block_and_barriers_order_it(host: Device) -> None:
    body = """
    shared[thread()] = (float)thread();
    block_sync();
    out[block_x() * 64 + thread()] = shared[63 - thread()];
    """
    variant = probe(body)
    for run_on in (host, HostDevice(thread_order=3)):
        assert np.array_equal(run(variant, run_on).reshape(3, 64), np.tile(63.0 - np.arange(64), (3, 1)))


def test_lds_starts_as_nan(host: Device) -> None:
    assert np.isnan(run(probe("out[block_x() * 64 + thread()] = shared[thread()];"), host)).all()


def test_a_missing_barrier_shows_as_a_dependence_on_thread_order(host: Device) -> None:
    body = "shared[thread()] = (float)thread(); out[block_x() * 64 + thread()] = shared[63 - thread()];"
    variant = probe(body)
    results = [run(variant, d).tobytes() for d in (host, *(HostDevice(thread_order=s) for s in range(3)))]
    assert len(set(results)) > 1


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "if (thread() < 32) block_sync();\nif (thread() >= 32) block_sync();",
            "different barriers: body of probe:.: .*block_sync",
        ),
        ("if (lane() < 16) wave_sum(1.0f);\nelse wave_max(1.0f);", "wave operations: body of probe:4: .*wave_"),
        ("if (lane() < 31) wave_sum(1.0f);", "waits at body of probe:3: .*wave_sum.*no other thread can run"),
        ("if (thread() == 5) block_sync(); else wave_sum(1.0f);", "waits at body of probe:3:"),
    ],
)
@pytest.mark.parametrize("order", [None, 1])
def test_a_kernel_that_would_hang_is_an_error_with_its_line(
    body: str, message: str, order: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant = probe(body + "\nout[0] = shared[0];")
    host = HostDevice(thread_order=order)
    with pytest.raises(DeadlockError, match=f"(?s)probe, block .*{message}"):
        run(variant, host)

    good = probe("block_sync(); out[block_x() * 64 + thread()] = 1.0f;")
    assert (run(good, host) == 1.0).all()


def test_threads_that_have_returned_do_not_hold_a_barrier(host: Device) -> None:
    body = """
    const int at = block_x() * 64 + thread();
    out[at] = 2.0f;
    if (wave() == 1) return;
    block_sync();
    out[at] = 1.0f;
    """
    got = run(probe(body), host).reshape(3, 2, 32)
    assert (got[:, 0] == 1).all()
    assert (got[:, 1] == 2).all()


def test_a_write_behind_the_lds_is_an_error(host: Device) -> None:
    variant = probe("shared[thread() + 4] = 1.0f; out[0] = 1.0f;")
    with pytest.raises(DeviceError, match="behind its 256 bytes of LDS"):
        run(variant, host)


def test_too_much_lds_is_refused_before_any_compiler() -> None:
    variant = probe("", lds=16 * 1024 + 28)
    with pytest.raises(RenderError, match="65648 bytes of LDS, 112 more than the 65536"):
        variant.source("gfx1100")
    assert probe("", lds=16 * 1024).source("gfx1100")


@pytest.mark.parametrize("block", [48, 2048])
def test_a_block_that_no_arch_can_run_is_refused(block: int) -> None:
    with pytest.raises(RenderError, match=f"declares {block} threads a block"):
        probe("", block=block).source("host")


def test_an_undefined_name_in_a_template_is_an_error() -> None:
    with pytest.raises(RenderError, match=r"'tiel' is undefined.*head_dim"):
        probe("{{ tiel }}").source("gfx1100")


def test_arguments_are_checked_against_the_declaration(host: Device) -> None:
    variant = probe("out[block_x() * 64 + thread()] = 1.0f;")
    out = np.zeros(64, np.float32)
    for call, message in [
        ({}, "probe needs out="),
        ({"out": out, "m": 3}, "probe takes no m"),
        ({"out": out[:, None]}, r"out has shape \(64, 1\); required: 1 dimensions"),
        ({"out": out.astype(np.float64)}, "out has dtype f64"),
        ({"out": out, "n": 2**31}, "n is 2147483648; required: a 32-bit integer"),
    ]:
        with pytest.raises(InputError, match=message):
            launch(variant, host, **call)
    launch(variant, host, out=out)
    assert (out == 1).all()


def test_an_empty_grid_launches_nothing(host: Device) -> None:
    """A block would write beside the empty array, into the memory that it lies in."""
    held = np.zeros(64, np.float32)
    variant = probe("out[(int)thread() - 32] = 1.0f;")
    launch(variant, host, out=held[32:32])
    assert not held.any()
    one = np.zeros(192, np.float32)
    launch(variant, host, out=one[64:128])
    assert one.sum() == 64, "a block of it does write"


def test_the_portable_switch_computes_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: Device) -> None:
    """Where there is no assembly switch, setjmp and longjmp take its place; here it is forced."""
    body = """
    shared[thread()] = wave_sum((float)thread());
    block_sync();
    out[block_x() * 64 + thread()] = shared[63 - thread()];
    """
    want = run(probe(body), host)
    portable = probe(body + "\n")
    source = portable.source("host")
    monkeypatch.setattr(Variant, "source", lambda self, arch: "#define HK_PORTABLE_SWITCH\n" + source)
    assert build(portable, "host").source.startswith("#define HK_PORTABLE_SWITCH")
    assert np.array_equal(run(portable, host), want)


def test_device_names() -> None:
    assert device("auto") is device("auto")
    assert device("host").name == "host"
    with pytest.raises(InputError, match="device 'gpu' is not known; required: host"):
        device("gpu")


def test_kernels_of_one_process_run_from_many_threads(host: Device) -> None:
    from concurrent.futures import ThreadPoolExecutor

    variant = probe("out[block_x() * 64 + thread()] = wave_sum((float)block_x());")
    want = run(variant, host, blocks=50)
    with ThreadPoolExecutor(4) as pool:
        for got in pool.map(lambda _: run(variant, host, blocks=50), range(16)):
            assert np.array_equal(got, want)


# ---- arenas ----------------------------------------------------------------------------------------------------------


def mappings() -> int:
    """Mappings of this process, of 65,530 that Linux grants."""
    return len(Path("/proc/self/maps").read_text().splitlines())


def test_all_kernels_of_a_process_run_on_the_same_stacks() -> None:
    one = build(probe("out[block_x() * 64 + thread()] = wave_sum(1.0f);"), "host")
    own, out = HostDevice(), np.zeros(8 * 64, np.float32)
    args = KernelArgs([ctypes.c_void_p(out.ctypes.data), ctypes.c_int(out.size)])
    before, count = mappings(), 60
    for i in range(count):
        out[:] = 0
        own.launch([Launch(own.load(dataclasses.replace(one, key=f"{one.key}{i}")), (8, 1, 1), 64, args)])
        assert (out == 32).all()
    # Two for each thread of the first block on a worker; a shared object has five or six.
    assert mappings() - before < 2 * 64 * host_runtime._WORKERS.most + 12 * count


def test_blocks_of_all_sizes_after_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    for block in (32, 1024, 384, 64, 1024):
        body = f"""
        shared[thread()] = (float)thread();
        block_sync();
        out[block_x() * {block} + thread()] = shared[{block - 1} - thread()];
        """
        got = run(probe(body, block=block, lds=1024), HostDevice(), blocks=9).reshape(9, block)
        assert np.array_equal(got, np.tile(float(block - 1) - np.arange(block), (9, 1)))


def test_an_arena_grows_and_goes_when_its_thread_ends() -> None:
    seen = []

    def work() -> None:
        for threads, workspace_bytes in ((32, 1000), (16, 5000), (64, 10), (64, 5000)):
            own = arena.arena(threads, workspace_bytes)
            assert own is arena.arena(1, 1)
            seen.append((own.threads, own.workspace_bytes, mappings()))

    before = mappings()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert [one[:2] for one in seen] == [(32, 1000), (32, 5000), (64, 5000), (64, 5000)]
    guards = [one[2] - before for one in seen]
    assert all(2 * n <= more < 2 * n + 20 for n, more in zip((32, 32, 64, 64), guards, strict=True)), guards
    assert mappings() - before < 20


def test_no_memory_for_an_arena_is_an_error(host: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    variant = probe("out[block_x() * 1024 + thread()] = 1.0f;", block=1024)
    monkeypatch.setattr(arena, "_own", threading.local())
    with monkeypatch.context() as tight:
        tight.setattr(arena, "STACK_BYTES", 1 << 50)
        with pytest.raises(DeviceError, match=r"no memory for the stacks.*64 KiB and two mappings each .*map_count"):
            run(variant, host)
    assert (run(variant, host) == 1).all()


def test_a_kernel_with_another_runtime_is_refused(host: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    variant = probe("out[block_x() * 64 + thread()] = 1.0f;")
    source = variant.source("host").replace("hk_workspace_bytes", "hk_bytes")
    monkeypatch.setattr(Variant, "source", lambda self, arch: source)
    with pytest.raises(DeviceError, match="probe has a host runtime that cannot be called from this version"):
        run(variant, host)


OVERFLOWS = {
    "a recursion": "struct F { static float fall(volatile int* n) { volatile float own[64]; own[++*n % 64] = 1.0f; "
    "return *n > 100000 ? own[0] : fall(n) + own[1]; } }; volatile int depth = 0; "
    "if (thread() == 40) shared[0] = F::fall(&depth); block_sync(); out[0] = shared[0];",
    "an array larger than a guard page": "volatile float own[20000]; if (thread() == 40) own[40] = own[0] + 1.0f; "
    "block_sync(); out[0] = own[thread()];",
}
CHILD = """
import resource, sys
import pytest
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
sys.path.insert(0, sys.argv[1])
from test_host_device import Variant, device, probe, run
patch = pytest.MonkeyPatch()
variant = probe(sys.argv[3])
source = sys.argv[2] + variant.source("host")
patch.setattr(Variant, "source", lambda self, arch: source)
run(variant, device("host"))
"""


@pytest.mark.parametrize("switch", ["", "#define HK_PORTABLE_SWITCH\n"], ids=["own", "portable"])
@pytest.mark.parametrize("body", OVERFLOWS.values(), ids=OVERFLOWS)
def test_a_stack_that_overflows_ends_the_process(body: str, switch: str) -> None:
    """It must not write over the stack of the thread beside it."""
    command = [sys.executable, "-c", CHILD, str(Path(__file__).parent), switch, body]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == -signal.SIGSEGV, done.stdout + done.stderr
