"""`hfk fuzz` must find planted faults, shrink what it found, and write a case that `hfk replay` fails on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from budget import some
from fuzz_lab import hfk, variant_name

from hipfire_kernels.running.devices.protocol import Device
from hipfire_kernels.testing import VariantSubject, check, read_cases, variant_of

# A fault, and what the shrunk case still needs to show it: what the fault is about.
FAULTS: dict[str, set[str]] = {
    "bound one short": set(),
    "query row ignores first_row": {"rows"},
    "swapped GQA index": {"group"},
    "barrier after the scores missing": set(),
    "window one wide": {"window"},
    "tree bias skips its first column": set(),
    "all rows see what the longest sees": {"rows"},
    "row of the scatter off": set(),
    "last tile not launched": {"ctx"},
    "codes for 128 steps": set(),
    "running sum not rescaled": {"ctx"},
}


@pytest.mark.parametrize("fault", some(FAULTS, 6))
def test_a_planted_fault_is_found_and_shrunk(fault: str, host: Device, tmp_path: Path) -> None:
    done = hfk(
        tmp_path, fault, "fuzz", variant_name(fault), "--count", "150", "--seed", "4", "--failures", "1",
        "--jobs", "1", "--work", "200000", "--json",
    )  # fmt: skip
    assert done.code == 1, done.out + done.err
    failure = done.document["failures"][0]
    found, shrunk = failure["found"]["case"], failure["shrunk"]["case"]
    assert len(shrunk) < len(found)
    assert FAULTS[fault] <= shrunk.keys(), shrunk
    (file,) = done.document["files"]
    (case,) = read_cases(tmp_path / file)
    assert case.as_dict() == shrunk
    assert check(case, VariantSubject(variant_of(case), host)).ok  # it is the fault that fails, not the case


def test_replay_fails_where_the_fault_is(host: Device, tmp_path: Path) -> None:
    (tmp_path / "case.json").write_text(json.dumps({"variant": variant_name("bound one short"), "head_dim": 128}))
    assert hfk(tmp_path, None, "replay", "case.json").code == 0
    done = hfk(tmp_path, "bound one short", "replay", "case.json", "--json")
    assert done.code == 1
    assert not done.document["cases"][0]["ok"]


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("crashes", "crashes: SIGABRT"),
        ("hangs", "hangs: no answer within 2 s of CPU time"),
        ("deadlocks", "DeadlockError"),
    ],
)
def test_what_takes_the_process_with_it_is_a_failing_case(fault: str, says: str, host: Device, tmp_path: Path) -> None:
    (tmp_path / "case.json").write_text(json.dumps({"variant": variant_name(fault), "ctx": 40, "head_dim": 128}))
    limit = ["--limit", "2"] if fault == "hangs" else []
    done = hfk(tmp_path, fault, "replay", "case.json", *limit)
    assert done.code == 1, done.out + done.err
    assert says in done.out
