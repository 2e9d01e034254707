"""The memory check: what a kernel touches that is not its own is found, and named: array, distance, thread, line."""

from __future__ import annotations

import ctypes
import dataclasses
import platform
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import hipfire_kernels as hk
from hipfire_kernels.authoring.args import Lds, Scalar, Tensor
from hipfire_kernels.authoring.family import KernelFamily, Tolerance, Variant
from hipfire_kernels.building import lines
from hipfire_kernels.building.builder import build
from hipfire_kernels.checking.oracle import check, hold, oracle_of
from hipfire_kernels.checking.parity import grid
from hipfire_kernels.errors import DeadlockError, DeviceError, InputError, MemoryFault
from hipfire_kernels.inspecting import revision
from hipfire_kernels.inspecting.watch_child import Checker
from hipfire_kernels.running.binding import launch
from hipfire_kernels.running.devices import device
from hipfire_kernels.running.devices.gpu import GpuDevice
from hipfire_kernels.running.devices.host import HostDevice
from hipfire_kernels.running.devices.protocol import Device, KernelArgs, Launch
from hipfire_kernels.testing import worker
from hipfire_kernels.testing.checking import assert_parity

BLOCK = 64


def probe(
    body: str, *, lds: int = 64, dtype: str = "f32", align: int = 1, over: tuple[str, ...] = (), **more: Any
) -> Variant:
    """A kernel of `x` and `out`, n elements each, LDS arrays `front`, `shared` and `back`, and this body."""
    family = KernelFamily(
        name="probe",
        doc="whatever the test says",
        params={"head_dim": (32,)},
        entry=lambda v: "probe",
        args=lambda v: (
            Tensor("x", dtype, ("n",), align=align),
            Tensor("out", dtype, ("n",), writes=True, align=align, over=over),
            Tensor("grid", "u8", ("blocks",)),
            Scalar("n", "i32"),
        ),
        grid=lambda v, s: (s.blocks, 1, 1),
        block=BLOCK,
        lds=lambda v, arch: (
            Lds("front", "int", 4),
            Lds("shared", "float", lds, align),
            Lds("back", "unsigned char", 32),
        ),
        tolerance=Tolerance(1e-6),
        body="{% for _ in range(1) %}\n{{ signature }} {\n    {{ lds.front }} {{ lds.shared }} {{ lds.back }}"
        " const int i = block_x() * 64 + thread();\n" + body + "\n}\n{% endfor %}\n",
        **more,
    )
    return family.variant(head_dim=32)


NUMPY = {"f32": np.float32, "f16": np.float16, "u8": np.uint8}


def run(variant: Variant, blocks: int = 3, n: int | None = None, on: Device | None = None) -> np.ndarray[Any, Any]:
    """Launch under the check: `x` counts up, `out` is all ones before."""
    count = blocks * BLOCK if n is None else n
    dtype = NUMPY[variant.args[0].dtype]
    out = np.ones(count, dtype)
    where = on or device("host")
    launch(variant, where, checked=True, x=np.arange(count).astype(dtype), out=out, grid=np.zeros(blocks, np.uint8))
    return out


def fault(variant: Variant, blocks: int = 3, **how: Any) -> MemoryFault:
    with pytest.raises(MemoryFault) as found:
        run(variant, blocks, **how)
    return found.value


# ---- arrays ---------------------------------------------------------------------------------------------------------


SIZES = {"192 elements": 3, "whole pages": 32, "more than a page": 35}


@pytest.mark.parametrize("blocks", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("out[i] = x[i + 1];", r"thread 63: reads x[{n}], 1 element behind the end of x (f32 [{n}], {n} elements)"),
        ("out[i] = x[i - 1];", r"block (0, 0, 0), thread 0: reads x[-1], 1 element before the start of x (f32 [{n}]"),
        (
            "out[i + 3] = x[i];",
            r"thread 61: writes out[{n}], 1 element behind the end of out (f32 [{n}], {n} elements)",
        ),
        ("out[i - 2] = x[i];", r"thread 0: writes out[-2], 2 elements before the start of out (f32 [{n}], {n} el"),
        ("out[i] = grid[i / 64 - 1];", r"thread 0: reads grid[-1], 1 element before the start of grid (u8 [{blocks}]"),
    ],
)
def test_one_past_either_end(body: str, said: str, blocks: int) -> None:
    found = fault(probe("\n" + body), blocks)
    assert said.format(n=blocks * BLOCK, blocks=blocks) in str(found)
    assert f", at body of probe:5: {body!r}" in str(found)
    assert (found.array in body, found.writes) == (True, "writes" in said)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("96", "block (2, 0, 0), thread 0: reads x[192], 1 element behind the end of x"),
        ("n", "block (1, 0, 0), thread 0: reads x[192], 1 element behind the end of x"),
        ("65536", "block (1, 0, 0), thread 0: reads x[65536], 65345 elements behind the end of x"),
        ("-64", "block (1, 0, 0), thread 0: reads x[-64], 64 elements before the start of x"),
    ],
)
def test_a_stride_taken_for_another(row: str, said: str) -> None:
    """Rows are 64 elements apart."""
    assert said in str(fault(probe(f"out[i] = x[(long)block_x() * {row} + thread()];")))


def test_an_index_that_rises_or_falls_with_the_block_is_least_at_a_corner() -> None:
    """The last of 99 blocks, of which not all run where arrays begin behind a page."""
    found = fault(probe("out[i] = x[(98 - block_x()) * 64 + thread() - 1];"), 99)
    assert "block (98, 0, 0), thread 0: reads x[-1], 1 element before the start of x" in str(found)


def test_what_is_only_read_cannot_be_written() -> None:
    found = fault(probe("((float*)x)[i] = out[i];"))
    assert "thread 0: writes x[0], and declares that it only reads x (f32 [192]), at body of probe:4" in str(found)


def test_behind_an_array_of_wide_alignment() -> None:
    """Of arrays that begin at multiples of 16 bytes, up to 14 bytes behind one belong to no page of their own."""
    writes = probe("if (i == 0) { out[n] = 1; } else if (i < n) out[i] = x[i];", dtype="f16", align=16)
    assert "probe: out (f16 [187]) is written behind its end" in str(fault(writes, n=187))
    reads = fault(probe("if (i < n) out[i] = x[i + 1];", dtype="f16", align=16), n=187)
    said = "probe: out[186] depends on what lies beside x (f16 [187]): it is read outside of its bounds"
    assert said in str(reads)
    far = fault(probe("if (i < n) out[i] = x[i + 7];", dtype="f16", align=16), n=187)
    assert "reads x[192], 6 elements behind the end of x (f16 [187], 187 elements)" in str(far)


def test_an_array_without_elements() -> None:
    assert "thread 0: reads x[0], 1 element behind the end of x (f32 [0], 0 elements)" in str(
        fault(probe("out[i] = x[i];"), n=0)
    )


def test_addresses_that_belong_to_nothing() -> None:
    assert "thread 7: reads through a null pointer, near none of its arrays, at body of probe:4" in str(
        fault(probe("const float* p = thread() == 7 ? nullptr : x; out[i] = *(const volatile float*)p;"))
    )
    assert "writes through address 0x7b000000, near none" in str(fault(probe("*(volatile int*)0x7b000000l = i;")))


def test_a_vector_at_an_address_it_cannot_have() -> None:
    body = "typedef float Four __attribute__((ext_vector_type(4)));\n*(volatile Four*)(out + 4 * (i / 4) + 1) = 1.0f;"
    found = fault(probe(body))
    assert "thread 0: accesses a vector at an address that is not a multiple of its size" in str(found)
    assert "at body of probe:5: " in str(found)


# ---- LDS ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("shared[thread() + 1] = x[i];", "thread 63: writes shared[64], 1 element behind the end of shared (float in "),
        ("shared[thread() - 1] = x[i];", "thread 0: writes shared[-1], 1 element before the start of shared (float in"),
        (
            "out[i] = shared[thread() + 5];",
            "thread 59: reads shared[64], 1 element behind the end of shared (float in ",
        ),
        ("out[i] = shared[thread() - 9];", "thread 0: reads shared[-9], 9 elements before the start of shared (float"),
        ("out[i] = front[thread()];", "thread 4: reads front[4], 1 element behind the end of front (int in LDS, 4 el"),
        (
            "back[thread()] = 1;",
            "thread 32: writes back[32], 1 element behind the end of back (unsigned char in LDS, 3",
        ),
        (
            "if (thread() < 9) back[thread() - 1] = 1;",
            "thread 0: writes back[-1], 1 element before the start of back (unsigned char in ",
        ),
    ],
)
def test_one_past_either_end_of_an_lds_array(body: str, said: str) -> None:
    """The arrays beside it are LDS too, and no excuse."""
    found = fault(probe("\n" + body))
    assert said in str(found)
    assert f", at body of probe:5: {body!r}" in str(found)


def test_behind_an_lds_array_that_does_not_fill_its_place() -> None:
    found = fault(probe("shared[thread() + 3] = x[i];", lds=66, align=16))
    assert (
        "probe, block (0, 0, 0): has written shared[66], 1 element behind the end of shared (float in LDS, 66 "
        in str(found)
    )


MISSING = "a barrier is missing, or it is never written"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            "shared[thread()] = x[i];\nout[i] = shared[63 - thread()];",
            "block (0, 0, 0), thread 0: reads shared[63] (float in LDS, 64 elements) before anybody has written it, at "
            "body of probe:5: 'out[i] = shared[63 - thread()];'",
        ),
        (
            "if (thread() != 7) shared[thread()] = x[i];\nblock_sync();\nout[i] = shared[63 - thread()];",
            # Others behind it are written first: which thread it was can be read off the result alone.
            "block (0, 0, 0): reads shared[7] (float in LDS, 64 elements) before anybody has written it; with other "
            "bytes there out[56] comes out",
        ),
        (
            "out[i] = max_f32(shared[thread()], x[i]);",  # which passes NaN by
            "thread 0: reads shared[0] (float in LDS, 64 elements) before anybody has written it, at body of probe:4",
        ),
        (
            "if (block_x() == 2 && thread() < 4) out[i] = (float)(front[thread()] & 3);",
            "block (2, 0, 0), thread 0: reads front[0] (int in LDS, 4 elements) before anybody has written it",
        ),
        (
            "out[i] = x[i]; if (thread() == 63) out[i] = (float)back[31];",
            "block (0, 0, 0), thread 63: reads back[31] (unsigned char in LDS, 32 elements) before anybody",
        ),
    ],
)
def test_lds_that_is_read_before_it_is_written(body: str, said: str) -> None:
    found = fault(probe(body))
    assert said in str(found)
    assert MISSING in str(found)
    assert "comes out different" in str(found)


def test_lds_that_is_read_and_not_used_is_no_fault() -> None:
    """A lane beyond the row takes part in a sum of its own."""
    got = run(probe("const float x0 = shared[thread()]; out[i] = i == -1 ? x0 : x[i];"))
    assert np.array_equal(got, np.arange(192))


# ---- other faults ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("out[i] = (float)(i / (n - 192));", "thread 0: divides a whole number by zero, or the least one by -1, at b"),
        ("out[i] = (float)(i % (thread() - 9));", "thread 9: divides a whole number by zero, or the least one by -1"),
        ("volatile int a = 1 << 31, b = -1; out[i] = (float)(a / b);", "thread 0: divides a whole number by zero, or"),
        ("if (i == 70) __builtin_trap();", "block (1, 0, 0), thread 6: comes to what the compiler made of undefined"),
        (
            "struct F { static float fall(volatile int* d) { volatile float own[64]; own[++*d % 64] = 1.0f; "
            "return *d > 99999 ? own[0] : fall(d) + own[1]; } }; volatile int d = 0; if (thread() == 40) out[i] = "
            "F::fall(&d);",
            "thread 40: needs more stack than a thread has: a recursion, or arrays of its own that are too large, at b",
        ),
        ("volatile float own[20000]; own[i] = 1.0f; out[i] = own[i + 1];", "thread 0: needs more stack than a thread"),
    ],
)
def test_other_faults_of_the_processor(body: str, said: str) -> None:
    assert said in str(fault(probe(body)))


# ---- lines ----------------------------------------------------------------------------------------------------------


def test_calls_are_named_from_the_inside_out() -> None:
    body = (
        "struct Own { static float last(const float* p, int at) {\nreturn p[at + 1];\n} };\nout[i] = Own::last(x, i);"
    )
    assert str(fault(probe(body))).endswith(
        "at body of probe:5: 'return p[at + 1];', called at body of probe:7: 'out[i] = Own::last(x, i);'"
    )
    assert "called at body of probe:4: 'store_u16((unsigned char*)(out + n), 1);'" in str(
        fault(probe("store_u16((unsigned char*)(out + n), 1);"))
    )


def test_a_function_of_the_c_library_is_known_by_where_it_returns_to() -> None:
    found = fault(probe("\nif (i == 0) __builtin_memset(out, 0, 4 * n + 4 + i);\nelse out[i] = 1.0f;"))
    assert "writes out[192], 1 element behind the end of out" in str(found)
    assert "at body of probe:5: 'if (i == 0) __builtin_memset(out, 0, 4 * n + 4 + i);'" in str(found)


def test_an_address_without_a_line() -> None:
    code = build(probe("out[i] = x[i];"), "host").code
    assert lines.frames(code, 0) == ()
    assert len(lines.text(code)) > lines.symbol(code, "hk_run") - lines.text(code).start > 0


# ---- what a checked launch leaves -----------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [1, 3, 40])
@pytest.mark.parametrize("order", [None, 5])
def test_results_are_those_of_a_launch_without_it(blocks: int, order: int | None) -> None:
    variant = probe("shared[thread()] = x[i]; block_sync(); out[i] += wave_sum(shared[63 - thread()]) / 3.0f;")
    x, plain = np.arange(blocks * 64, dtype=np.float32), np.ones(blocks * 64, np.float32)
    on = HostDevice(thread_order=order)
    launch(variant, on, x=x, out=plain, grid=np.zeros(blocks, np.uint8))
    assert np.array_equal(run(variant, blocks, on=on), plain)


def test_a_fault_leaves_the_arrays_and_the_process_as_they_were() -> None:
    variant, before = probe("out[i] = 7.0f; if (i == 191) out[i + 1] = 7.0f;"), signal.getsignal(signal.SIGSEGV)
    out = np.ones(192, np.float32)
    for _ in range(3):
        with pytest.raises(MemoryFault):
            launch(variant, device("host"), checked=True, x=out.copy(), out=out, grid=np.zeros(3, np.uint8))
        assert (out == 1).all()
    assert signal.getsignal(signal.SIGSEGV) == before
    assert np.array_equal(run(probe("out[i] = x[i];")), np.arange(192))


def test_sums_over_blocks_are_no_fault() -> None:
    """Not all blocks run a second time; and sums of floats come out in as many ways as blocks can follow each other."""
    whole = probe("if (i < 1) out[1] = 5.0f; if (thread() == 0) __atomic_fetch_add((int*)out, 1, __ATOMIC_RELAXED);")
    assert run(whole, 50).view(np.int32)[0] == np.float32(1).view(np.int32) + 50
    assert run(whole, 50)[1] == 5


def test_arrays_that_may_be_the_same_memory_are_so_under_the_check() -> None:
    body = "*(volatile float*)(out + i) = 5.0f; const float now = *(const volatile float*)(x + i); out[i] = now + 1.0f;"
    variant, both = probe(body, over=("x",)), np.arange(192, dtype=np.float32)
    launch(variant, device("host"), checked=True, x=both, out=both, grid=np.zeros(3, np.uint8))
    assert (both == 6).all()
    assert np.array_equal(run(variant), np.arange(192) + 1)


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(DeadlockError, match="waits at body of probe:4"):
        run(probe("if (lane() < 31) wave_sum(1.0f); out[i] = x[i];"))
    on = HostDevice(checked=True)
    kernel = on.load(build(probe("out[i] = x[i];"), "host"))
    packed = KernelArgs([ctypes.c_void_p(0)] * 3 + [ctypes.c_int(0)])
    with pytest.raises(InputError, match="packed without their declaration; bind them"):
        on.launch([Launch(kernel, (1, 1, 1), 64, packed)])


def test_kernels_are_checked_from_many_threads() -> None:
    good, bad = probe("out[i] = wave_sum(x[i]);"), probe("out[i + 1] = wave_sum(x[i]);")
    want = run(good, 30)

    def work(number: int) -> bool:
        return np.array_equal(run(good, 30), want) if number % 2 else "writes out[1920]" in str(fault(bad, 30))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(24)))


CHILD = """
import ctypes, resource, sys
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
sys.path.insert(0, sys.argv[1])
from hipfire_kernels.running.devices import memory_check
from test_memory_check import *
run(probe("out[i] = x[i];"))
"""
OUTSIDE = "on = HostDevice(checked=True)\nkernel = on.load(build(probe('out[i] = x[i];'), 'host'))\n"
OUTSIDE += "with memory_check.handled(kernel.shared_object): ctypes.string_at(1)"
UNCHECKED = "launch(probe('*(volatile int*)0l = i;'), device('host'), x=np.ones(64, 'f4'), out=np.ones(64, 'f4'), "
UNCHECKED += "grid=np.zeros(1, 'u1'))"


@pytest.mark.parametrize("body", [OUTSIDE, UNCHECKED], ids=["outside of kernels", "in a kernel that is not checked"])
@pytest.mark.parametrize("handler", [[], ["-X", "faulthandler"]], ids=["no handler", "another handler"])
def test_faults_of_others_are_passed_on(body: str, handler: list[str]) -> None:
    command = [sys.executable, *handler, "-c", CHILD + body, str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == -signal.SIGSEGV, done.stdout + done.stderr
    assert ("Segmentation fault" in done.stderr) == bool(handler)


# ---- where it is on -------------------------------------------------------------------------------------------------


def known(body: str) -> Variant:
    """A probe with a reference: it doubles."""
    return probe(
        body, reference=lambda x: {"out": 2 * x.astype(np.float64)}, extents={"n": (192, 192), "blocks": (3, 3)}
    )


# What is read behind the array changes no result.
HIDDEN = "const float far = x[i + (i == 191)]; out[i] = 2 * x[i] + (far != far || far == far ? 0.0f : 1.0f);"
SAID = r"thread 63: reads x\[192\], 1 element behind the end of x .* at body of probe:4: "


def test_parity_and_drawn_cases_are_under_the_check() -> None:
    assert hk.parity(known("out[i] = 2 * x[i];"), quick=True).ok
    bad = known(HIDDEN.replace("const float", "const volatile float"))
    with pytest.raises(MemoryFault, match=SAID):
        hk.parity(bad, quick=True)
    case = next(iter(oracle_of(bad).grid(bad, quick=True)))
    assert oracle_of(bad).check(bad, case, device("host")).ok  # no result shows it
    for run_case in (check, hold):
        with pytest.raises(MemoryFault, match=SAID):
            run_case(bad, case, device("host"))
    with pytest.raises(MemoryFault, match=SAID):
        assert_parity(bad, case)


def test_a_case_of_a_campaign_that_faults_does_not_cost_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = known(HIDDEN.replace("const float", "const volatile float"))
    monkeypatch.setattr(worker, "variant_of", lambda case: bad)
    case = next(iter(oracle_of(bad).grid(bad, quick=True)))
    found = worker.answer(case, device("host"), 60.0, lambda: None)
    assert re.match("MemoryFault: probe, block .*" + SAID, found["fault"])
    assert not found["broken"]


def test_a_watched_kernel_is_under_the_check() -> None:
    variant = hk.families()["kv_cache_write_q8_0_batched"].variant(pair=False)
    now = revision.current(variant.entry, ["host"])
    text, right = now.source("host"), "write_block(x[from], cache + to);"
    assert text.count(right) == 1
    wrong = right.replace("x[from]", "x[from] + 0.0f * x[from - 1]")
    edited = dataclasses.replace(now, sources={"host": text.replace(right, wrong)})
    with pytest.raises(
        DeviceError,
        match=r"thread 0: reads x\[-1\], 1 element before .*, at kv_cache_write_q8_0_batched.hip.j2:\d+: .*:",
    ):
        Checker().run(variant, build(edited, "host"), list(grid(variant, rows=(2,), contexts=(3,)))[:1])


def test_who_has_no_check_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    variant = probe("out[i] = x[i];")
    with pytest.raises(InputError, match="a checked launch on cuda:0; the memory check is one of the host device"):
        GpuDevice.checking(SimpleNamespace(name="cuda:0"), required=True)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"a checked launch on host\+undefined; kernels under a sanitizer have its"):
        run(variant, on=HostDevice(sanitizer="undefined"))
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    alone = HostDevice()
    for refused in (lambda: run(variant, on=alone), lambda: HostDevice(checked=True)):
        with pytest.raises(InputError, match="needs Linux on x86-64; this is linux on aarch64"):
            refused()
    with pytest.warns(RuntimeWarning, match="run without the memory check: .* this is linux on aarch64"):
        assert alone.checking() is alone


def test_a_kernel_whose_runtime_cannot_leave_a_fault_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    variant = probe("out[i] = x[i];")
    source = "#define HK_PORTABLE_SWITCH\n" + variant.source("host")
    monkeypatch.setattr(Variant, "source", lambda self, arch: source)
    with pytest.raises(DeviceError, match="probe cannot be checked: its host runtime does not leave a launch that"):
        run(variant)
