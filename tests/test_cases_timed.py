"""`hfk ab` and `hfk tune` on kernels of somebody else: any family with a reference can be timed against itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_ab import once
from test_cli import Run, hfk

from hipfire_kernels.authoring.registry import REGISTRY, VARIABLE
from hipfire_kernels.bench import ab, tune_cases
from hipfire_kernels.inspecting import compare
from hipfire_kernels.running.devices.protocol import Device
from hipfire_kernels.running.timing import Times

__all__ = ["hfk"]

PACKAGE = Path(__file__).parent / "outside"
SAMPLE = dict.fromkeys(("code", "records", "environment", "machine", "wrong", "output"), "")
SAMPLE |= {"traced": None, "worst": 0.0}

Hfk = Callable[..., Run]


@pytest.fixture(autouse=True)
def rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package, known here and in the processes of a run."""
    monkeypatch.syspath_prepend(PACKAGE)
    monkeypatch.setenv(VARIABLE, "rowkernels")
    REGISTRY.load("rowkernels")
    yield
    for name in ("rms_norm", "swiglu", "top_k"):
        REGISTRY.remove(name)
    REGISTRY._taken.discard("rowkernels")


def test_ab_of_two_variants_of_the_package(hfk: Hfk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ab, "_sample", once({}))
    sizes = ("--extent", "rows=2", "--extent", "d=64", "--repeats", "4", "--rounds", "4")
    done = hfk("ab", "--kernel", "swiglu_f32", "swiglu_f32_256", *sizes)
    assert done.code == 0, done
    assert "kernel: off swiglu_f32, on swiglu_f32_256\ncase: rows=2 d=64\n" in done.out
    assert re.search(r"\nworst error, on: [\d.]+e-0[78]\n", done.out)
    assert re.search(r"\noff  [\d.]+ us a call \([\d.]+x the time of the least case\)", done.out)
    assert re.search(r"\nar   [\d.]+ us a call \(rows=1 d=32\)", done.out)
    assert re.search(r"\n(on is faster|off is faster|no verdict)", done.out)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("swiglu_f32", "rms_norm_f32"), "take different arguments (gate, up)"),
        (("swiglu_f32", "swiglu_f16"), "take different arguments (gate, up, out)"),
        (("swiglu_f32", "swiglu_f32_256", "--extent", "cols=2"), "has no extent 'cols'; its extents are rows, d"),
        (("swiglu_f32", "swiglu_f32_256", "--extent", "rows=0"), "extent rows of swiglu_f32 is 0; declared: 1 .. 64"),
        (("swiglu_f32", "swiglu_f32_256", "--extent", "rows"), "required: NAME=N"),
        (("swiglu_f32", "swiglu_f32_256", "--ctx", "5"), "--ctx is of attention kernels"),
        (("tile_batched", "rows8", "--extent", "rows=2"), "--extent is for variants of families with a reference"),
    ],
)
def test_what_ab_of_cases_refuses(arguments: tuple[str, ...], says: str, hfk: Hfk) -> None:
    run = hfk("ab", "--kernel", *arguments)
    assert run.code == 2
    assert says in run.err


def test_a_wrong_arm_gives_no_time(hfk: Hfk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sample of an arm that is wrong ends the run."""
    monkeypatch.setattr(ab, "_sample", lambda arm, name: {**SAMPLE, "wrong": "error 3 (limit 1e-05)"})
    run = hfk("ab", "--kernel", "swiglu_f32", "swiglu_f32_256")
    assert run.code == 1
    assert "REFUSED, no times: swiglu_f32 (ar): error 3" in run.out


def test_tune_of_the_package(hfk: Hfk) -> None:
    done = hfk("tune", "--family", "swiglu", "--device", "host", "--extent", "rows=4", "--extent", "d=256")
    assert done.code == 0, done
    for dtype in ("f32", "f16", "bf16"):
        assert re.search(rf"swiglu_{dtype} +rows=4 d=256 +swiglu_{dtype}_256 +[\d.]+ +[\d.]+ +[\d.]+x", done.out)
    assert re.search(r"\n\d of 3 variants have a faster choice", done.out)


def test_a_candidate_that_is_wrong_is_no_choice(hfk: Hfk, monkeypatch: pytest.MonkeyPatch) -> None:
    right = tune_cases._fault
    monkeypatch.setattr(tune_cases, "_fault", lambda v, on: "error 3" if v.width == 256 else right(v, on))
    run = hfk("tune", "--family", "swiglu", "--device", "host", "--json")
    assert run.code == 1
    assert run.document["faults"] == [f"swiglu_{t}_256: error 3" for t in ("f32", "f16", "bf16")]
    assert all(contest["rivals"] == [] for contest in run.document["contests"])


def test_a_faster_candidate_wins(host: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the pairs of the interleaved run, and only beyond doubt."""
    for factor, won in ((0.5, True), (1.0, False), (2.0, False)):

        def times(sides: Any, *_: Any, factor: float = factor) -> dict[str, Times]:
            plain = [10.0 + i % 3 for i in range(18)]
            factors = [1.0, factor]
            return {entry: Times(tuple(f * t for t in plain)) for entry, f in zip(sides, factors, strict=True)}

        monkeypatch.setattr(compare, "times", times)
        contest = tune_cases.contests(REGISTRY["swiglu"], host, {"d": 64})[0]
        tune_cases.run(contest, host, lambda what: None)
        assert (contest.winner is not None) == won
