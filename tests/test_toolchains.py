"""Which compiler is chosen and why, what it is called, and what follows when one fails, hangs or aborts."""

from __future__ import annotations

import ctypes
import errno
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from standin_lab import compile_library

from hipfire_kernels.archs import arch
from hipfire_kernels.building import scratch
from hipfire_kernels.building.processes import state_and_parent
from hipfire_kernels.building.resources import read_resources
from hipfire_kernels.building.toolchains import _llvm, _process, host
from hipfire_kernels.building.toolchains._hiprtc_child import main as hiprtc_child
from hipfire_kernels.building.toolchains.clang import ClangToolchain
from hipfire_kernels.building.toolchains.hiprtc import HiprtcToolchain
from hipfire_kernels.building.toolchains.host import HostToolchain
from hipfire_kernels.building.toolchains.nvrtc import NvrtcToolchain
from hipfire_kernels.building.toolchains.registry import choose, toolchains
from hipfire_kernels.errors import CompileError, InputError, ToolchainUnavailable

GFX1100, GFX1201, HOST = arch("gfx1100"), arch("gfx1201"), arch("host")
HIP = """
extern "C" __attribute__((global)) void axpy(const float* x, float* y, float a, int n) {
    const int i = __builtin_amdgcn_workgroup_id_x() * 32 + __builtin_amdgcn_workitem_id_x();
    if (i < n) y[i] = a * x[i] + y[i];
}
"""
WRONG = HIP.replace("a * x[i]", "a * z[i]")

Fake = Callable[..., Path]


@pytest.fixture
def bin_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty PATH, no wheel, and a probe memory of its own."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("HIPFIRE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(_llvm, "_wheel_program", lambda: None)
    return folder


def program(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def fake_clang(path: Path, version: str, targets: str = "amdgcn", lld: str = "") -> Path:
    """A clang that answers a probe and notes every start in `calls` beside it."""
    return program(
        path,
        f"""echo "$1" >> {path.parent}/calls
case "$1" in
--version) echo "Some clang version {version} (vendor)";;
-print-targets) echo "{targets}";;
-print-prog-name=ld.lld) echo "{lld or "ld.lld"}";;
*) exit 3;;
esac""",
    )


def fake_lld(path: Path, version: str) -> Path:
    return program(path, f'echo "LLD {version} (compatible)"')


class TestChoice:
    def test_nothing_installed_lists_every_reason(self, bin_dir: Path) -> None:
        with pytest.raises(ToolchainUnavailable) as refused:
            choose(GFX1100)
        said = str(refused.value)
        assert "clang, clang-22 to clang-17: not on the PATH" in said
        assert "ziglang: not installed" in said
        assert "hiprtc: " in said
        assert "pip install ziglang" in said

    def test_gxx_is_refused_with_the_reason(self, bin_dir: Path) -> None:
        program(bin_dir / "g++", "exit 0")
        with pytest.raises(ToolchainUnavailable, match=r"g\+\+: not supported: kernels use ext_vector_type"):
            choose(HOST)

    @pytest.mark.parametrize(("version", "targets", "lld", "reason"), [
        ("16.0.6", "amdgcn", "16.0.6", "16.0.6 (vendor); 17 or newer is needed"),
        ("18.1.0", "x86-64", "18.1.0", "built without the AMDGPU target"),
        ("18.1.0", "amdgcn", "", "found none; install lld"),
        ("18.1.0", "amdgcn", "17.0.1", "found LLD 17.0.1"),
    ])  # fmt: skip
    def test_passed_over(self, bin_dir: Path, version: str, targets: str, lld: str, reason: str) -> None:
        if lld:
            fake_lld(bin_dir / "ld.lld", lld)
        fake_clang(bin_dir / "clang", version, targets)
        said = ClangToolchain().available(GFX1100)
        assert said is not None
        assert reason in said

    def test_first_that_serves_wins_and_the_others_are_explained(self, bin_dir: Path) -> None:
        fake_lld(bin_dir / "ld.lld", "19.1.7")
        fake_clang(bin_dir / "clang", "14.0.0")
        fake_clang(bin_dir / "clang-19", "19.1.7")
        fake_clang(bin_dir / "clang-18", "18.1.0")
        old, chosen = ClangToolchain().candidates(GFX1100)
        assert old.reason is not None
        assert chosen.command == (str(bin_dir / "clang-19"),)
        assert chosen.identity == "Some clang version 19.1.7 (vendor), LLD 19.1.7 (compatible)"

    def test_one_program_under_two_names_is_one_candidate(self, bin_dir: Path) -> None:
        fake_clang(bin_dir / "clang-17", "14.0.0")
        (bin_dir / "clang").symlink_to(bin_dir / "clang-17")
        assert [c.label for c in ClangToolchain().candidates(GFX1100)] == [str(bin_dir / "clang"), "ziglang"]

    def test_gfx12_needs_a_newer_one_than_gfx11(self, bin_dir: Path) -> None:
        fake_lld(bin_dir / "ld.lld", "18.1.0")
        fake_clang(bin_dir / "clang-18", "18.1.0")
        assert ClangToolchain().available(GFX1100) is None
        assert "19 or newer" in str(ClangToolchain().available(GFX1201))

    def test_a_compiler_that_cannot_start(self, bin_dir: Path) -> None:
        program(bin_dir / "clang", "echo broken >&2; exit 9")
        assert "--version gave no answer: exit status 9 broken" in str(ClangToolchain().available(GFX1100))

    def test_host_compiler_must_link(self, bin_dir: Path) -> None:
        program(
            bin_dir / "clang++",
            '[ "$1" = --version ] && echo "clang version 20.1.0" || { echo no crt1 >&2; exit 1; }',
        )
        assert "cannot link a shared object: no crt1" in str(HostToolchain().available(HOST))

    def test_one_installed_later_is_found(self, bin_dir: Path) -> None:
        toolchain = ClangToolchain()
        assert toolchain.available(GFX1100) is not None
        fake_clang(bin_dir / "clang", "22.1.0")
        assert "install lld" in str(toolchain.available(GFX1100))
        fake_lld(bin_dir / "ld.lld", "22.1.0")
        assert toolchain.available(GFX1100) is None

    @pytest.mark.parametrize(("name", "target"), [("clang", HOST), ("host", GFX1100), ("gcc", GFX1100)])
    def test_name_that_does_not_fit(self, name: str, target: object) -> None:
        with pytest.raises(InputError, match=f"toolchain '{name}' does not build for"):
            choose(target, name)  # type: ignore[arg-type]

    def test_clang_comes_before_hiprtc(self) -> None:
        assert [toolchain.name for toolchain in toolchains() if toolchain.targets(GFX1100)] == [
            "clang",
            "hiprtc",
        ]


class TestProbeMemory:
    """A fresh process knows the compiler's version without starting it, until the compiler changes."""

    ASK = """
import sys
from hipfire_kernels.archs import arch
from hipfire_kernels.building.toolchains.clang import ClangToolchain
print(ClangToolchain().identity(arch("gfx1100")))
"""

    def ask(self) -> str:
        return subprocess.run([sys.executable, "-c", self.ASK], capture_output=True, text=True, check=True).stdout

    @pytest.fixture
    def clang(self, bin_dir: Path) -> Path:
        fake_lld(bin_dir / "ld.lld", "22.1.0")
        return fake_clang(bin_dir / "clang", "22.1.0")

    @staticmethod
    def calls(clang: Path) -> int:
        return len((clang.parent / "calls").read_text().splitlines())

    def test_survives_the_process(self, clang: Path) -> None:
        assert self.ask() == self.ask() == "Some clang version 22.1.0 (vendor), LLD 22.1.0 (compatible)\n"
        assert self.calls(clang) == 3

    def test_ends_with_another_program(self, clang: Path) -> None:
        first = self.ask()
        fake_clang(clang, "22.1.1")
        assert self.ask() == first.replace("clang version 22.1.0", "clang version 22.1.1")

    def test_ends_with_another_linker(self, clang: Path) -> None:
        first = self.ask()
        fake_lld(clang.parent / "ld.lld", "22.1.2")
        assert self.ask() == first.replace("LLD 22.1.0", "LLD 22.1.2")

    @pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"facts": {"clang": "x"}}'])
    def test_damaged_is_asked_again(self, clang: Path, tmp_path: Path, damage: bytes) -> None:
        first = self.ask()
        (memory,) = (tmp_path / "cache" / "probes").iterdir()
        memory.write_bytes(damage)
        assert self.ask() == first
        assert self.calls(clang) == 6
        assert json.loads(memory.read_bytes())["facts"]["amdgcn"] == "yes"

    def test_altered_is_asked_again(self, clang: Path, tmp_path: Path) -> None:
        first = self.ask()
        (memory,) = (tmp_path / "cache" / "probes").iterdir()
        memory.write_bytes(memory.read_bytes().replace(b"22.1.0", b"22.1.9"))
        assert self.ask() == first


def real(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave one kind of compiler to be found; skip, with the reason, where the machine has none of it."""
    if which == "wheel":
        if importlib.util.find_spec("ziglang") is None:
            pytest.skip("the ziglang wheel is not installed")
        monkeypatch.setattr(_llvm, "_on_path", lambda stem: [])
    else:
        if ClangToolchain().candidates(GFX1100)[-1].label == "ziglang":
            pytest.skip("no system clang on the PATH serves")
        monkeypatch.setattr(_llvm, "_wheel_program", lambda: None)


@pytest.mark.parametrize("which", ["system", "wheel"])
class TestClang:
    @pytest.mark.parametrize("name", ["gfx1100", "gfx1101", "gfx1151", "gfx1200", "gfx1201"])
    def test_builds(self, which: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        real(which, monkeypatch)
        built = ClangToolchain().compile(HIP, arch(name))
        assert read_resources(built.code, arch(name), "axpy").wavefront == 32
        assert built.log == ""

    def test_same_source_same_bytes(self, which: str, monkeypatch: pytest.MonkeyPatch) -> None:
        real(which, monkeypatch)
        assert ClangToolchain().compile(HIP, GFX1100) == ClangToolchain().compile(HIP, GFX1100)

    def test_no_fused_multiply_add(self, which: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """fma has an instruction of its own: the code grows or shrinks by which of the two is used."""
        real(which, monkeypatch)
        plain = ClangToolchain().compile(HIP, GFX1100).code
        fused = ClangToolchain().compile(HIP, GFX1100, ("-ffp-contract=fast",)).code
        sizes = [read_resources(code, GFX1100, "axpy").code_bytes for code in (plain, fused)]
        assert sizes[0] != sizes[1]

    def test_error_carries_the_compilers_words(self, which: str, monkeypatch: pytest.MonkeyPatch) -> None:
        real(which, monkeypatch)
        with pytest.raises(CompileError) as refused:
            ClangToolchain().compile(WRONG, GFX1100)
        assert "did not compile the source for gfx1100 (exit status " in str(refused.value)
        assert "\n  kernel.hip:4: error: use of undeclared identifier 'z'" in str(refused.value)
        assert "use of undeclared identifier 'z'" in refused.value.log
        assert tempfile.gettempdir() not in refused.value.log
        assert refused.value.source == WRONG

    def test_warnings_are_kept(self, which: str, monkeypatch: pytest.MonkeyPatch) -> None:
        real(which, monkeypatch)
        log = ClangToolchain().compile(HIP.replace("int n)", "int n, int m)"), GFX1100).log
        assert "unused parameter 'm'" in log


@pytest.mark.parametrize("which", ["system", "wheel"])
class TestHost:
    SOURCE = """
typedef float float4 __attribute__((ext_vector_type(4)));
extern "C" float muladd(float a, float b, float c) { float4 v = a; return v.zw.x * b + c; }
extern "C" float half_of(float a) { return (float)(_Float16)a; }
"""

    def test_runs(self, which: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        real(which, monkeypatch)
        built = HostToolchain().compile(self.SOURCE, HOST)
        assert built.log == ""
        (tmp_path / "k.so").write_bytes(built.code)
        library = ctypes.CDLL(str(tmp_path / "k.so"))
        for function in (library.muladd, library.half_of):
            function.restype = ctypes.c_float
        half = library.half_of(ctypes.c_float(0.1))
        assert half == float(np.float16(0.1))
        # (1 + e)(1 - e) - 1 with e = 2^-13: -e^2 when fused, 0 when the product is rounded first.
        e = 2.0**-13
        assert library.muladd(ctypes.c_float(1 + e), ctypes.c_float(1 - e), ctypes.c_float(-1)) == 0.0

    def test_error_carries_the_compilers_words(self, which: str, monkeypatch: pytest.MonkeyPatch) -> None:
        real(which, monkeypatch)
        with pytest.raises(CompileError, match=r"kernel\.cpp:1: error: "):
            HostToolchain().compile("int f() { return x; }", HOST)

    def test_identity_names_the_cpu(self, which: str, monkeypatch: pytest.MonkeyPatch) -> None:
        real(which, monkeypatch)
        here = HostToolchain().identity(HOST)
        monkeypatch.setattr(host, "machine", lambda: "another cpu")
        assert HostToolchain().identity(HOST) != here


class TestHostDetails:
    def test_wheel_cache_that_cannot_be_written(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / "file").write_text("x")
        monkeypatch.setenv("HIPFIRE_CACHE_DIR", str(tmp_path / "file"))
        first = host._zig_cache()
        assert first.is_dir()
        assert host._zig_cache() == first
        assert caplog.text.count(f"ziglang builds its runtime anew in {first}, for {tmp_path / 'file'} cannot") == 1
        monkeypatch.setenv("HIPFIRE_CACHE_DIR", str(tmp_path / "good"))
        assert host._zig_cache() == tmp_path / "good" / "hipfire-zig"

    def test_wheel_cache_on_a_full_disk(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """What is there of the runtime needs no room any more."""
        room, asked = 20 << 20, []

        def reserve(folder: Path, wanted: int) -> None:
            asked.append(wanted)
            if wanted > room and folder.is_relative_to(tmp_path):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(host, "reserve", reserve)
        monkeypatch.setattr(scratch, "reserve", reserve)
        monkeypatch.setenv("HIPFIRE_CACHE_DIR", str(tmp_path))
        elsewhere = host._zig_cache()
        assert not elsewhere.is_relative_to(tmp_path)
        assert f"for {tmp_path} cannot take it (No space left on device)" in caplog.text
        with (tmp_path / "hipfire-zig" / "runtime").open("wb") as file:
            file.truncate(46 << 20)
        assert host._zig_cache() == tmp_path / "hipfire-zig"
        assert asked == [64 << 20, 64 << 20, 18 << 20]

    def test_no_disk_has_room_for_the_wheels_cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(folder: Path, wanted: int) -> None:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

        monkeypatch.setattr(host, "reserve", full)
        monkeypatch.setattr(scratch, "reserve", full)
        monkeypatch.setenv("HIPFIRE_CACHE_DIR", str(tmp_path))
        with pytest.raises(ToolchainUnavailable) as refused:
            host._zig_cache()
        said = str(refused.value)
        assert said.startswith("ziglang's runtime: no folder serves (")
        assert f"{tempfile.gettempdir()}: Disk quota exceeded; {tmp_path}/scratch: Disk quota exceeded" in said
        assert said.endswith("set TMPDIR or HIPFIRE_CACHE_DIR to one that has 64 MB of room")

    def test_cpu_flags_are_read(self) -> None:
        assert any(line.startswith(("flags=", "Features=")) for line in host._cpu().splitlines())


class TestHangs:
    def test_compiler_is_ended_with_its_children(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_process, "WALL_S", 0.3)
        slow = program(tmp_path / "slow", f"sleep 3000 & echo $! > {tmp_path}/pid; wait")
        while not (tmp_path / "pid").exists():  # a busy machine may not get so far in time
            assert _process.run([str(slow)]).failure == "it was ended after 0 s"
        grandchild = int((tmp_path / "pid").read_text())
        while (state_and_parent(grandchild) or "X")[0] not in "ZX":
            time.sleep(0.01)

    def test_one_that_computes_is_ended_by_what_it_computes(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(_process, "LIMIT_S", 1.0)
        endless = program(tmp_path / "endless", "while :; do :; done")
        assert _process.run([str(endless)]).failure == "it was ended after 1 s of CPU time"
        waits = program(tmp_path / "waits", "sleep 1.5; echo done")
        assert _process.run([str(waits)]) == _process.Finished(None, "done\n", "")

    def test_signal_is_named(self, tmp_path: Path) -> None:
        assert _process.run([str(program(tmp_path / "p", "kill -SEGV $$"))]).failure == "ended by SIGSEGV"

    def test_absent_program(self, tmp_path: Path) -> None:
        assert "could not be started" in str(_process.run([str(tmp_path / "absent")]).failure)


@pytest.fixture(scope="module")
def stub() -> bytes:
    """A library with hiprtc's functions that does what words in the source tell it to."""
    return compile_library("hiprtc")


@pytest.fixture
def rocm(stub: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A ROCm folder with the stub in it, found the way hip-python finds a real one."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libhiprtc.so").write_bytes(stub)
    monkeypatch.setenv("ROCM_PATH", str(tmp_path))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path / "lib"))
    monkeypatch.setenv("STANDIN_UNKNOWN_ARCH", "gfx1201")
    monkeypatch.setenv("HIPFIRE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


class TestHiprtc:
    def test_compiles(self, rocm: Path) -> None:
        toolchain = HiprtcToolchain()
        assert toolchain.available(GFX1100) is None
        built = toolchain.compile("the source, WARN", GFX1100, ("-DX",))
        options = " ".join((*toolchain.options(GFX1100), "-DX"))
        assert built.code.decode() == f"options: {options}\nsource: the source, WARN"
        assert built.log == "kernel:1:1: warning: mind this\n"
        assert "--offload-arch=gfx1100" in options
        assert choose(GFX1100, "hiprtc").name == "hiprtc"

    def test_identity_changes_with_the_library(self, rocm: Path) -> None:
        library = rocm / "lib" / "libhiprtc.so"
        first = HiprtcToolchain().identity(GFX1100)
        assert f"libhiprtc.so ({library.stat().st_size} bytes" in first
        with library.open("ab") as file:
            file.write(b"\0" * 16)
        assert HiprtcToolchain().identity(GFX1100) != first

    def test_error_carries_the_log(self, rocm: Path) -> None:
        with pytest.raises(
            CompileError, match=r"(?s)hiprtc did not compile .* kernel:7: error: no such thing"
        ) as refused:
            HiprtcToolchain().compile("WRONG", GFX1100)
        assert "1 error generated" in refused.value.log
        assert "HIPRTC_ERROR_COMPILATION" in str(refused.value)

    def test_error_without_a_log(self, rocm: Path) -> None:
        with pytest.raises(CompileError, match="HIPRTC_ERROR_INVALID_OPTION"):
            HiprtcToolchain().compile("OPTION", GFX1100)

    def test_abort_is_survived_and_explained(self, rocm: Path) -> None:
        with pytest.raises(CompileError, match=r"ended by SIGABRT.*use a newer one, or toolchain 'clang'"):
            HiprtcToolchain().compile("ABORT", GFX1100)

    def test_what_an_abort_leaves_is_removed(self, rocm: Path) -> None:
        """comgr makes its temporary files where TMPDIR says, and no cache of its own."""
        log = HiprtcToolchain().compile("ENVIRONMENT", GFX1100).log
        assert log.endswith("0")
        assert Path(log[:-1]).parent == Path(tempfile.gettempdir())
        assert not os.path.exists(log[:-1])

    def test_arch_the_library_aborts_on_is_a_reason(self, rocm: Path) -> None:
        assert HiprtcToolchain().available(GFX1100) is None
        assert "cannot compile an empty kernel for gfx1201" in str(HiprtcToolchain().available(GFX1201))
        with pytest.raises(ToolchainUnavailable, match="SIGABRT"):
            HiprtcToolchain().compile("the source", GFX1201)

    def test_hang_is_ended(self, rocm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert HiprtcToolchain().available(GFX1100) is None
        monkeypatch.setattr(_process, "WALL_S", 1.0)
        with pytest.raises(CompileError, match="it was ended after 1 s"):
            HiprtcToolchain().compile("HANG", GFX1100)

    def test_library_absent(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ROCM_PATH", str(tmp_path))
        monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
        reason = HiprtcToolchain().available(GFX1100)
        if reason is None:
            pytest.skip("this machine has a libhiprtc on the loader's own path")
        assert "the library does not load: " in reason
        assert "ROCM_PATH" in reason

    def test_hip_python_absent(self, monkeypatch: pytest.MonkeyPatch) -> None:
        found = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "hip" else found(name))
        assert HiprtcToolchain().available(GFX1100) == "hip-python: not installed; `pip install hip-python`"

    def test_hip_python_broken(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "hip", None)
        hiprtc_child(tmp_path, [])
        answer = json.loads((tmp_path / "answer.json").read_text())
        assert answer["stage"] == "import"
        assert "hip" in answer["error"]


def test_an_empty_log_of_nvrtc_spoils_no_shared_bytes() -> None:
    """The log is one byte, and the bindings write into the bytes object that they are given."""
    why = NvrtcToolchain().available(arch("sm_90"))
    if why is not None:
        pytest.skip(f"no nvrtc: {why}")
    source = 'extern "C" __global__ void nothing(int* x) { x[0] = 1; }'
    assert NvrtcToolchain().compile(source, arch("sm_90")).log == ""
    assert [bytes([n])[0] for n in range(256)] == list(range(256))
