"""The sanitizers find what they are for, and nothing in the kernels as they are."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz_lab import hfk, variant_name

from hipfire_kernels import cli, families
from hipfire_kernels.archs import arch
from hipfire_kernels.building.builder import build
from hipfire_kernels.building.toolchains import _llvm, registry, sanitized
from hipfire_kernels.building.toolchains.registry import choose
from hipfire_kernels.checking.parity import Case, Result
from hipfire_kernels.errors import DeviceError, InputError, ToolchainUnavailable, UndefinedBehaviour
from hipfire_kernels.inspecting import compare, revision
from hipfire_kernels.running.devices import device
from hipfire_kernels.running.devices.host import HostDevice

ROWS8 = families()["attention_flash_q8_0_rows"].variant(rows=8, head_dim=128)
START = "    const int head = block_x(), tile = block_y();\n"
CASE = Case(5, 130, 2, 1, 128)
HOST = arch("host")


def run(planted: str, kind: str) -> Result:
    """A parity case on the rows kernel with something planted at its start, under a sanitizer."""
    on = HostDevice(sanitizer=kind)
    now = revision.current(ROWS8.entry, ["host"])
    text = now.source("host")
    assert text.count(START) == 1
    edited = dataclasses.replace(now, sources={"host": text.replace(START, f"{START}{planted}\n")})
    (result,) = compare.parity(compare.Build(ROWS8, build(edited, "host", on.toolchain)), [CASE], on)
    return result


class TestUndefined:
    @pytest.mark.parametrize(
        ("planted", "said"),
        [
            ("volatile int big = 2147483647; big = big + first_row + 1;", "a signed addition overflows"),
            ("volatile int big = 65536; big = big * (big + head);", "a signed multiplication overflows"),
            ("volatile int i = 4; int few[4] = {}; few[i] = head; big(few);", "an index outside of an array"),
            ("volatile int i = 1; big(*(const int*)(k_cache + i + head));", "null or misaligned pointer"),
            ("volatile int i = 32; big(1 << i);", "a shift by a negative number or by the width"),
            ("volatile float x = 3e9f; big((int)x);", "outside of the range of the integer type"),
            ("volatile int i = 0; big(head / i);", "a division overflows, or is by zero"),
        ],
    )
    def test_what_is_planted_is_found(self, planted: str, said: str) -> None:
        with_sink = "volatile int sink; const auto big = [&](auto x) { sink = (int)(unsigned long long)x; };"
        named = planted if "big(" not in planted or "int big" in planted else f"{with_sink} {planted}"
        with pytest.raises(UndefinedBehaviour) as found:
            run(named, "undefined")
        assert said in str(found.value)
        assert f"'{named}'" in str(found.value)
        assert str(found.value).startswith("attention_flash_q8_0_rows8_d4, block (0, 0, 0), thread 0: ")

    def test_the_kernels_as_they_are(self) -> None:
        on = device("host+undefined")
        assert on.name == "host+undefined"
        assert run("", "undefined").ok
        assert run("volatile unsigned big = 4294967295u; big = big + 1;", "undefined").ok

    def test_it_is_compiled_apart(self) -> None:
        plain, checked = (build(ROWS8, "host", name) for name in (None, "host+undefined"))
        assert plain.key != checked.key
        assert b"__ubsan_handle" not in plain.code
        assert plain.source == checked.source

    def test_through_the_wheel(self, monkeypatch: pytest.MonkeyPatch) -> None:
        wheel = _llvm._wheel_program()
        if wheel is None:
            pytest.skip("the ziglang wheel is not installed")
        monkeypatch.setattr(_llvm, "_on_path", lambda stem: [])
        compiler = sanitized.SanitizedToolchain("undefined")
        assert compiler.chosen(HOST).label == "ziglang"
        monkeypatch.setattr(registry, "sanitized", lambda: (compiler,))
        with pytest.raises(UndefinedBehaviour, match="an index outside of an array"):
            run("volatile int i = 5; volatile int few[5] = {}; few[i] = head;", "undefined")
        with pytest.raises(ToolchainUnavailable, match="no AddressSanitizer runtime"):
            sanitized.SanitizedToolchain("address").chosen(HOST)


CHILD = """
import sys
sys.path.insert(0, sys.argv[1])
from test_sanitize import run
print(run(sys.argv[2], "address").describe())
"""


class TestAddress:
    def child(self, planted: str) -> subprocess.CompletedProcess[str]:
        reason = sanitized.SanitizedToolchain("address").available(HOST)
        if reason is not None:
            pytest.skip(reason)
        env = {**os.environ, **sanitized.environment(HOST)}
        command = [sys.executable, "-c", CHILD, str(Path(__file__).parent), planted]
        return subprocess.run(command, env=env, capture_output=True, text=True)

    def test_a_read_behind_an_array(self) -> None:
        done = self.child("if (q[((long long)batch * n_heads + 40) * 128 * 4] == 1.5f) return;")
        assert done.returncode < 0
        assert "AddressSanitizer: heap-" in done.stderr
        assert "kernel.cpp" in done.stderr

    def test_an_index_behind_a_private_array(self) -> None:
        done = self.child("volatile int i = 5; volatile int few[4] = {}; few[i] = head;")
        assert done.returncode < 0
        assert "stack-buffer-overflow" in done.stderr

    def test_a_read_of_one_key_behind_an_input(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of a case: nothing of ours stands between its arrays and what the runtime guards."""
        if reason := sanitized.SanitizedToolchain("address").available(HOST):
            pytest.skip(reason)
        for name, value in {**sanitized.environment(HOST), "TMPDIR": str(tmp_path)}.items():
            monkeypatch.setenv(name, value)
        fault = "the key behind the last is read"
        (tmp_path / "case.json").write_text(json.dumps({"variant": variant_name(fault), "group": 5, "head_dim": 128}))
        done = hfk(tmp_path, fault, "replay", "case.json", "--device", "host+address")
        assert (done.code, "AddressSanitizer: heap-buffer-overflow" in done.out) == (1, True), done.out + done.err

    def test_a_process_without_the_runtime_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("LD_PRELOAD", raising=False)
        with pytest.raises(ToolchainUnavailable, match=r"LD_PRELOAD=|no AddressSanitizer runtime"):
            device("host+address")


class TestCommand:
    @pytest.mark.parametrize("kind", ["undefined", "address"])
    def test_cases_of_a_variant(self, kind: str, tmp_path: Path) -> None:
        if reason := sanitized.SanitizedToolchain(kind).available(HOST):
            pytest.skip(reason)
        command = [sys.executable, "-m", "hipfire_kernels.cli", "sanitize", "kv_cache_write_q8_0_batched"]
        command += ["--kind", kind, "--count", "6", "--out", str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    def test_refusals(self, capsys: pytest.CaptureFixture[str]) -> None:
        for arguments, said in ((["--all", "--kind", "memory"], "legal: undefined, address"), ([], "no VARIANT")):
            with pytest.raises(SystemExit) as ended:
                cli.app(["sanitize", *arguments])
            assert ended.value.code == 2
            assert said in capsys.readouterr().err
        with pytest.raises(InputError, match="is not known"):
            device("host+memory")
        assert issubclass(UndefinedBehaviour, DeviceError)
        assert choose(HOST).name == "host"
