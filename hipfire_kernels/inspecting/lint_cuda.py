"""The NVIDIA dialect through clang, for the warnings that NVRTC does not have.

Above all that of a cast to something wider: on an NVIDIA GPU an access must be aligned to its size, and what a pointer
is aligned to is what the declaration says (`Tensor.align`, else the dtype). A cast that raises it says so by going
through `void*`, and whoever writes that looks at the declaration. Nothing is generated: clang needs no CUDA for the
rest.
"""

from __future__ import annotations

from collections.abc import Sequence

from hipfire_kernels.archs import arch
from hipfire_kernels.building import scratch
from hipfire_kernels.building.toolchains._process import run
from hipfire_kernels.building.toolchains.registry import choose
from hipfire_kernels.errors import ToolchainUnavailable

_WORDS = """\
#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __shared__ __attribute__((shared))
#define __align__(n) __attribute__((aligned(n)))
#define __forceinline__ __inline__ __attribute__((always_inline))
#define __launch_bounds__(...) __attribute__((launch_bounds(__VA_ARGS__)))
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct uint3 { unsigned x, y, z; };
extern const __device__ uint3 threadIdx, blockIdx;
__device__ float2 make_float2(float, float);
__device__ float fmaf(float, float, float);
__device__ float fmaxf(float, float);
__device__ float fminf(float, float);
__device__ float fabsf(float);
__device__ float rintf(float);
__device__ float exp2f(float);
__device__ void* memcpy(void*, const void*, unsigned long);
__device__ float floorf(float);
__device__ float __fsqrt_rn(float);
__device__ float __int_as_float(int);
__device__ float __uint_as_float(unsigned);
__device__ unsigned __float_as_uint(float);
__device__ int __popc(unsigned);
__device__ int __clz(int);
__device__ unsigned __brev(unsigned);
__device__ unsigned __byte_perm(unsigned, unsigned, unsigned);
__device__ unsigned __funnelshift_r(unsigned, unsigned, unsigned);
__device__ unsigned long __cvta_generic_to_shared(const void*);
__device__ unsigned long __cvta_generic_to_global(const void*);
template <class T> __device__ T __shfl_sync(unsigned, T, int);
template <class T> __device__ T __shfl_xor_sync(unsigned, T, int);
template <class T> __device__ T __shfl_up_sync(unsigned, T, unsigned, int);
template <class T> __device__ T __reduce_max_sync(unsigned, T);
template <class T> __device__ T __reduce_min_sync(unsigned, T);
__device__ int __any_sync(unsigned, int);
__device__ int __all_sync(unsigned, int);
__device__ unsigned __ballot_sync(unsigned, int);
__device__ int atomicAdd(int*, int);
__device__ float atomicAdd(float*, float);
__device__ void __syncwarp();
__device__ void __syncthreads();
"""
"""What NVRTC knows by itself, as far as kernels use it."""

_OPTIONS = (
    "--no-default-config",
    "-x",
    "cuda",
    "--cuda-device-only",
    "--cuda-gpu-arch=sm_90",
    "-nocudainc",
    "-nocudalib",
    "-fsyntax-only",
    "-std=c++17",
    "-Wall",
    "-Wextra",
    "-Wno-unknown-cuda-version",
)


_LIKE = arch("gfx1100")
"""A clang that builds for it reads CUDA as well."""


def unavailable() -> str | None:
    """Why there is no clang here; None when there is one."""
    try:
        choose(_LIKE, "clang")
    except ToolchainUnavailable as error:
        return str(error)
    return None


def complaints(source: str, warnings: Sequence[str]) -> str:
    """What clang says about a kernel's source for sm_90; empty when nothing.

    Raises:
        ToolchainUnavailable: there is no clang here.
    """
    chosen = choose(_LIKE, "clang").chosen(_LIKE)
    command = (chosen.command[0], "clang") if chosen.label == "ziglang" else chosen.command
    with scratch.folder() as folder:
        (folder / "words.h").write_text(_WORDS)
        (folder / "kernel.cu").write_text(source)
        finished = run((*command, *_OPTIONS, *warnings, "-include", "words.h", "kernel.cu"), cwd=folder)
    return finished.err.strip() or finished.failure or ""
