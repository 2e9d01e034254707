"""What is read of a cubin, against what ptxas said when it made this one; and files that are none.

fixtures/two_kernels.cubin is nvrtc 13.5's (sm_90a) of:

    extern "C" __global__ void __launch_bounds__(64) framed(const float* in, float* out, int n, int m) {
        float kept[25];
        for (int i = 0; i < 25; ++i) kept[i * m % 25] = in[i * n];
        out[threadIdx.x] = kept[m];
    }
    extern "C" __global__ void __launch_bounds__(64) plain(const float* in, float* out) {
        __shared__ float held[64];
        held[threadIdx.x] = in[threadIdx.x];
        __syncthreads();
        out[threadIdx.x] = held[63 - threadIdx.x];
    }

ptxas -v: framed 104 bytes stack frame, 32 registers; plain no stack frame, 14 registers, 256 bytes smem.
"""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest
from standin_lab import cubin

from hipfire_kernels.archs import arch
from hipfire_kernels.building.cubin import read_cubin
from hipfire_kernels.building.resources import Resources, read_args, read_resources
from hipfire_kernels.building.toolchains.registry import choose
from hipfire_kernels.errors import ToolchainError

SM_90 = arch("sm_90")
REAL = (Path(__file__).parent / "fixtures" / "two_kernels.cubin").read_bytes()


def test_what_the_assembler_said() -> None:
    assert read_cubin(REAL, SM_90, "plain", 256, 64) == Resources(
        vgprs=14,
        scratch_bytes=0,
        lds_bytes=256,
        kernarg_bytes=16,
        wavefront=32,
        max_workgroup=64,
        occupancy=16,  # 32 blocks of two warps, on four schedulers
        code_bytes=512,
    )
    framed = read_cubin(REAL, SM_90, "framed", 0, 64)
    assert (framed.vgprs, framed.scratch_bytes, framed.kernarg_bytes) == (32, 104, 24)


def test_the_stand_ins_cubins_are_read_like_the_compilers() -> None:
    made = cubin("some_kernel", registers=77, arguments=44, frame=24, code=640)
    found = read_cubin(made, SM_90, "some_kernel", 1000, 256)
    assert (found.vgprs, found.scratch_bytes, found.kernarg_bytes, found.code_bytes) == (77, 24, 44, 640)
    assert (found.lds_bytes, found.max_workgroup) == (1000, 256)
    # What the driver's stand-in looks at: machine, arch and name.
    assert made[18:20] == REAL[18:20]
    assert made[49] == REAL[49] == 90
    assert b".text.plain\0" in REAL
    assert b".text.some_kernel\0" in made


def test_a_frame_is_nothing_if_it_is_not_stated() -> None:
    info = struct.pack("<BBHII", 4, 0x11, 8, 1, 24)
    made = cubin("some_kernel", registers=8, arguments=8, frame=24)
    assert info in made
    without = made.replace(info, struct.pack("<BBHII", 4, 0x7F, 8, 1, 24))
    assert read_cubin(without, SM_90, "some_kernel", 0, 32).scratch_bytes == 0


def test_attributes_of_other_forms_are_passed_over() -> None:
    """A form that is not a size and a value is four bytes; a value of another size is no symbol's."""
    made = cubin("some_kernel", registers=8, arguments=8, frame=24)
    registers, frame = (struct.pack("<BBHII", 4, kind, 8, 1, value) for kind, value in ((0x2F, 8), (0x11, 24)))
    other = struct.pack("<BBH", 3, 0x2F, 100) + registers + struct.pack("<BBHI", 4, 0x2F, 4, 99)
    assert registers + frame in made
    assert read_cubin(made.replace(registers + frame, other), SM_90, "some_kernel", 0, 32).vgprs == 8


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (b"", r"\(0 bytes\) is not a code object"),
        (b"// PTX", r"\(6 bytes\) is not a code object"),
        (cubin("other", 8, 8), "the cubin has no kernel 'plain'"),
        (
            cubin("plain", 8, 8).replace(struct.pack("<BB", 4, 0x2F), struct.pack("<BB", 4, 0x7F)),
            "does not say",
        ),
        (cubin("plain", 8, 8).replace(b"\0plain\0", b"\0plane\0"), "the cubin has no kernel 'plain'"),
        (cubin("plain", 8, 8).replace(b".symtab", b".symbol"), "cannot be read: "),
    ],
)
def test_no_cubin_of_the_kernel(code: bytes, message: str) -> None:
    with pytest.raises(ToolchainError, match=message):
        read_cubin(code, SM_90, "plain", 0, 64)


AXPY = """
extern "C" __attribute__((global, amdgpu_flat_work_group_size(1, 32)))
void axpy(float a, const float* x, float* y) { y[__builtin_amdgcn_workitem_id_x()] += a * x[0]; }
"""


@pytest.mark.parametrize("vendor", ["nvidia", "amd"])
def test_a_damaged_file_is_an_error_of_the_librarys(vendor: str) -> None:
    """Cut off anywhere, and with bytes changed: something is read, or a ToolchainError says what is wrong."""
    rng, code = random.Random(1), REAL
    if vendor == "amd":
        code = choose(arch("gfx1100"), "clang").compile(AXPY, arch("gfx1100")).code
    damaged = [code[:length] for length in range(0, len(code), 101)]
    for _ in range(700):
        changed = bytearray(code)
        for _ in range(rng.choice((1, 3, 10))):
            changed[rng.randrange(len(code))] = rng.randrange(256)
        damaged.append(bytes(changed))
    refused = 0
    for one in damaged:
        try:
            if vendor == "nvidia":
                read_cubin(one, SM_90, "plain", 0, 64)
            else:
                read_resources(one, arch("gfx1100"), "axpy")
                read_args(one, "axpy")
        except ToolchainError:
            refused += 1
    assert refused > 50
