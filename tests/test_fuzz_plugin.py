"""The pytest plugin, in a project of its own, and what `hfk fuzz` and `hfk replay` say to bad input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz_lab import hfk

from hipfire_kernels.cli import app
from hipfire_kernels.running.devices.protocol import Device

ENGINE = """
import dataclasses
import numpy as np
import pytest
from hipfire_kernels import reference
from hipfire_kernels.testing.suite import *


def kernel(request):
    r = request
    positions = np.maximum(r.positions, {least})
    return reference.attend(r.q, r.k_cache, r.v_cache, positions, r.scale, r.tree_bias, r.window).astype(np.float32)


@pytest.fixture
def hk_adapter():
    return kernel
"""


def pytest_run(folder: Path, *args: str) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "hipfire_kernels.testing.plugin", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, *args], cwd=folder, env=dict(os.environ), capture_output=True, text=True)
    return done.stdout + done.stderr


def test_an_engine_runs_the_suite_on_its_own_kernel(tmp_path: Path) -> None:
    (tmp_path / "test_engine.py").write_text(ENGINE.format(least=-1))
    options = ["--hk-cases", "12", "--hk-variants", "attention_flash_q8_0_tile_batched_d1"]
    assert "12 passed" in pytest_run(tmp_path, *options)
    (tmp_path / "test_engine.py").write_text(ENGINE.format(least=0))  # a row that sees no key sees the first one
    out = pytest_run(tmp_path, *options)
    assert "failed" in out
    assert "kernel: FAILED variant=attention_flash_q8_0_tile_batched_d1" in out
    assert "replay: {" in out


def test_without_an_adapter_the_suite_runs_the_variants(tmp_path: Path, host: Device) -> None:
    (tmp_path / "test_own.py").write_text("from hipfire_kernels.testing.suite import *\n")
    variants = "attention_flash_q8_0_tile_batched_d1_window,kv_cache_write_q8_0_pair_batched"
    assert "10 passed" in pytest_run(tmp_path, "--hk-variants", variants, "--hk-device", "host", "--hk-cases", "5")
    assert "no variant or family is named 'nonsense'" in pytest_run(tmp_path, "--hk-variants", "nonsense")


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["fuzz"], 2, "no VARIANT is given"),
        (["fuzz", "--all", "--shard", "3/2"], 2, "--shard is '3/2'"),
        (["fuzz", "--all", "--ray", "--shard", "2/2"], 2, "required: --shard 1/2"),
        (["fuzz", "--all", "--shard", "1/2"], 2, "without --seed"),
        (["fuzz", "--merge", "nowhere.json"], 2, "--merge nowhere.json cannot be read"),
        (["fuzz", "--all", "--ledger", "nowhere.jsonl"], 2, "nowhere.jsonl cannot be read"),
        (["fuzz", "kv_cache_write_q8_0_batched", "--device", "hip:63", "--count", "2"], 3, "error:"),
        (["replay", "nowhere.json"], 2, "nowhere.json cannot be read"),
        (["replay", "empty.json"], 2, "holds no case"),
        (["replay", "odd.json"], 2, "odd.json, case 1: no variant has the entry name 'x'"),
    ],
)
def test_bad_input_is_refused(
    args: list[str], code: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.json").write_text("")
    (tmp_path / "odd.json").write_text('{"variant": "x"}')
    with pytest.raises(SystemExit) as ended:
        app(args, prog_name="hfk")
    said = capsys.readouterr().err
    assert (ended.value.code, says in said) == (code, True), said


def test_shards_of_a_campaign_merge(tmp_path: Path, host: Device) -> None:
    for part in ("1/2", "2/2"):
        done = hfk(
            tmp_path, None, "fuzz", "kv_cache_write_q8_0_batched", "--count", "31", "--seed", "1", "--shard", part,
            "--jobs", "1", "--json",
        )  # fmt: skip
        assert done.code == 0, done.err
        (tmp_path / f"{part[0]}.json").write_text(done.out)
    merged = hfk(tmp_path, None, "fuzz", "--merge", "1.json", "--merge", "2.json", "--json").document
    assert merged["cases"] == 31
    assert set(merged["worst"]) == {"kv_cache_write_q8_0_batched", "kv_cache_write_q8_0_pair_batched"}
    text = hfk(tmp_path, None, "fuzz", "--merge", "1.json", "--merge", "2.json").out
    assert "2 variants, 0 known and 31 drawn cases" in text
    assert json.loads((tmp_path / "1.json").read_text())["cases"] == 16
