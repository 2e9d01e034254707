"""The host compiler with a sanitizer, for finding undefined behaviour and accesses out of bounds in kernels.

`undefined` needs no runtime library: what the compiler calls on a fault is compiled into the kernel, breaks the launch
off and says what and where, thread and source line, as for a deadlock. `address` needs the compiler's own runtime,
loaded before anything else in the process: `environment` is what a process must be started with.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping

from hipfire_kernels.archs import Arch
from hipfire_kernels.building.toolchains import Candidate, Compiled
from hipfire_kernels.building.toolchains._process import run
from hipfire_kernels.building.toolchains.host import HostToolchain
from hipfire_kernels.errors import ToolchainUnavailable

UNDEFINED, ADDRESS = "undefined", "address"

FAULTS: Mapping[str, str] = {
    "add_overflow": "a signed addition overflows",
    "sub_overflow": "a signed subtraction overflows",
    "mul_overflow": "a signed multiplication overflows",
    "negate_overflow": "a negation overflows",
    "divrem_overflow": "a division overflows, or is by zero",
    "shift_out_of_bounds": "a shift by a negative number or by the width of the type or more, or one that overflows",
    "out_of_bounds": "an index outside of an array",
    "pointer_overflow": "pointer arithmetic overflows",
    "type_mismatch_v1": "an access through a null or misaligned pointer, or beyond an object",
    "alignment_assumption": "a pointer is less aligned than was promised",
    "load_invalid_value": "a bool holds neither true nor false",
    "float_cast_overflow": "a number outside of the range of the integer type it is converted to",
    "builtin_unreachable": "control reaches what was said to be unreachable",
    "missing_return": "a function with a result ends without one",
    "vla_bound_not_positive": "an array of no or a negative size",
    "nonnull_arg": "null where it was promised not to be",
    "invalid_builtin": "a bit count of zero",
}
"""What clang calls, without `__ubsan_handle_`, and what that means."""

FIRST_CODE = 100
"""What a launch that was broken off returns for the first of `FAULTS`; then counted up."""

_UNDEFINED_CHECKS = (
    "alignment,array-bounds,bool,builtin,float-cast-overflow,integer-divide-by-zero,nonnull-attribute,null,object-size,"
    "pointer-overflow,return,shift-base,shift-exponent,signed-integer-overflow,unreachable,vla-bound"
)
_CHECKS = {
    # Past the driver, which would bring a runtime: the wheel's builds one, for a minute.
    UNDEFINED: tuple(
        part for option in ("-fsanitize", "-fsanitize-recover") for part in ("-Xclang", f"{option}={_UNDEFINED_CHECKS}")
    ),
    ADDRESS: ("-fsanitize=address", "-shared-libsan"),
}
_COMMON = ("-O1", "-gline-tables-only", "-fno-omit-frame-pointer")
_RUNTIMES = ("libclang_rt.asan.so", "libclang_rt.asan-x86_64.so", "libclang_rt.asan-aarch64.so")


class SanitizedToolchain(HostToolchain):
    """clang++ with `-fsanitize`. `address` needs a system one, with its runtime library."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.name = kind, f"host+{kind}"

    def options(self, arch: Arch) -> tuple[str, ...]:
        """Those of the host, with the checks behind them."""
        return (*super().options(arch), *_COMMON, *_CHECKS[self.kind])

    def candidates(self, arch: Arch) -> tuple[Candidate, ...]:
        """As for the host; for `address` the one with a runtime."""
        seen = super().candidates(arch)
        if self.kind == UNDEFINED or seen[-1].reason is not None or _runtime(seen[-1]) is not None:
            return seen
        why = "has no AddressSanitizer runtime here; install that of clang (libclang-rt, compiler-rt)"
        return (*seen[:-1], Candidate(seen[-1].label, why))

    def identity(self, arch: Arch) -> str:
        """That of the compiler, and of what is compiled in."""
        return f"{super().identity(arch)}, {hashlib.sha256(_handlers().encode()).hexdigest()[:8]}"

    def compile(self, source: str, arch: Arch, extra: tuple[str, ...] = ()) -> Compiled:
        """Compile with the checks; behind the source, so that its lines stay what they are, what they call."""
        text = source + _handlers() if self.kind == UNDEFINED else source
        return super().compile(text, arch, (*_COMMON, *_CHECKS[self.kind], *extra))


def environment(arch: Arch) -> dict[str, str]:
    """What a process that loads `address` kernels must be started with.

    Raises:
        ToolchainUnavailable: no compiler here has the runtime.
    """
    compiler = SanitizedToolchain(ADDRESS).chosen(arch)
    runtime = _runtime(compiler)
    assert runtime is not None  # else nothing would have been chosen
    symbolizer = run((*compiler.command, "-print-prog-name=llvm-symbolizer")).out.strip()
    return {
        "LD_PRELOAD": runtime,
        **({"ASAN_SYMBOLIZER_PATH": symbolizer} if os.path.isabs(symbolizer) else {}),  # for source lines
        # Python's own allocator would hand out memory without guards; what it leaves at its end is no leak of a
        # kernel. Fibers are not known to the runtime: no stacks of its own beside theirs.
        "PYTHONMALLOC": "malloc",
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0:abort_on_error=1:allocator_may_return_null=1",
    }


def require_loaded(arch: Arch) -> None:
    """Refuse `address` in a process that was not started with `environment`.

    Raises:
        ToolchainUnavailable: it was not; loading a kernel would end it without a word from here.
    """
    needed = environment(arch)
    if any(os.environ.get(name) != value for name, value in needed.items()):
        spelled = " ".join(f"{name}={value}" for name, value in needed.items())
        raise ToolchainUnavailable(
            f"device host+address needs a process started with {spelled}; `hfk sanitize --kind address` does that"
        )


def _runtime(compiler: Candidate) -> str | None:
    """The runtime library of a clang++; the wheel's has none."""
    if compiler.label == "ziglang":
        return None
    for name in _RUNTIMES:
        path = run((*compiler.command, f"-print-file-name={name}")).out.strip()
        if os.path.isabs(path) and os.path.exists(path):
            return path
    return None


def _handlers() -> str:
    """C++ for what the checks call. The first argument of each begins with the place in the source."""
    functions = "\n".join(f"HK_FAULT({name}, {number})" for number, name in enumerate(FAULTS, FIRST_CODE))
    return f"""
namespace hk {{
struct Place {{
    const char* file;
    unsigned line, column;
}};
}}
#define HK_FAULT(name, number)                                                            \\
    extern "C" __attribute__((visibility("hidden"), used, no_sanitize("undefined"))) void \\
        __ubsan_handle_##name(const hk::Place* at, ...) {{                                 \\
        hk::fail((hk::Error)number, {{at->file, (int)at->line}}, {{"", (int)at->column}});    \\
    }}
{functions}
"""
