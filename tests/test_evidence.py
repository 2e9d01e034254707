"""Evidence: what a file must be, which record counts, and what closes a route again."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mutants import MUTANTS, _mutated_environment

from hipfire_kernels import families
from hipfire_kernels.authoring import templates
from hipfire_kernels.authoring.family import Variant
from hipfire_kernels.authoring.render import source_digest
from hipfire_kernels.dispatch import AttendRequest, Decision, admit, evidence, plan, policy
from hipfire_kernels.dispatch.record import dump, load
from hipfire_kernels.errors import InputError
from hipfire_kernels.q8_0 import random_q8_0
from hipfire_kernels.running.devices.protocol import Device

TESTS = Path(__file__).parent
ROWS8, TILE, REDUCE = (f"attention_flash_{name}_d8" for name in ("q8_0_rows8", "q8_0_tile_batched", "reduce_batched"))
NO = {"admitted": False, "why": "not faster here"}
EDIT = next(m for m in MUTANTS if m.name == "row of the scatter off")
"""An edit of the multi-row kernels' template alone."""


def digests(arch: str) -> dict[str, str]:
    variants = {v.entry: v for family in families().values() for v in family.variants()}
    return {entry: source_digest(variants[entry].source(arch)) for entry in (ROWS8, TILE, REDUCE)}


def record(arch: str = "gfx1201", **changes: Any) -> dict[str, Any]:
    """Measured evidence for rows8 at head_dim 256, as JSON has it."""
    speed = {"rows": 16, "route_us": 50.0, "established_us": 100.0, "ratio": 2.0, "quartiles": [1.9, 2.1]}
    return {
        "arch": arch,
        "device": "A card",
        "driver": "7.2",
        "toolchain": "clang: 22",
        "date": "2026-02-03",
        "route": "rows8",
        "kind": "measured",
        "shape": {"head_dim": 256, "n_heads": 24, "n_kv_heads": 4, "rows": [8, 16]},
        "parity": {"cases": 40, "worst_error": 2e-6, "limit": 1e-5, "ok": True},
        "speed": [{"ctx": ctx, **speed, "revision": None} for ctx in (2048, 8192, 20676)],
        "crossover": {"ctx": 8192, "below": 2048, "above": 20676},
        "digests": digests(arch),
        "verdict": {"admitted": True, "why": "2.00x from 8192 keys on"},
        "source": "a test",
        **changes,
    }


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's evidence folder, empty."""
    monkeypatch.setenv("HIPFIRE_EVIDENCE_DIR", str(tmp_path))
    evidence.forget()
    yield tmp_path
    evidence.forget()


def put(folder: Path, *records: dict[str, Any], name: str = "mine.json") -> None:
    (folder / name).write_text(json.dumps({"schema": 1, "records": records}), encoding="utf-8")
    evidence.forget()


def ask(arch: str = "gfx1201", ctx: int = 20676, head_dim: int = 256) -> Decision:
    return admit(AttendRequest(arch, "verify", "q8_0", head_dim, 24, 4, 16, ctx, "chain", False, False))


def why_not(decision: Decision) -> str:
    (failed,) = (c for c in decision.rejected["rows8"] if c.name == "evidence")
    return str(failed)


# ---- which record counts --------------------------------------------------------------------------------------------


def test_the_shipped_records_are_whole_and_are_written_as_they_are_read() -> None:
    records = evidence.shipped()
    assert load(dump(records), "again") == records
    reported = [r for r in records if r.arch == "gfx1100"]
    assert {r.key for r in reported} == {("gfx1100", f"rows{n}", d, 0) for n in (4, 8) for d in (128, 256)}
    assert {evidence.status(r) for r in reported} == {"unknown"}
    published = {(s.revision, s.ctx): s.ratio for s in evidence.find("gfx1100", "rows8", 256).speed}  # type: ignore[union-attr]
    assert published[("c91f4b6", 2048)] == 1.06
    assert published[("de2448f", 20676)] == 2.40


def test_a_record_of_the_user_opens_its_arch_and_head_dim_alone(folder: Path) -> None:
    assert ask().route == "tile_batched"
    put(folder, record())
    decision = ask()
    assert decision.route == "rows8"
    assert decision.evidence is not None
    assert decision.evidence.device == "A card"
    assert evidence.status(decision.evidence) == "fresh"
    assert ask(arch="gfx1200").route == ask(head_dim=128).route == "tile_batched"


def test_a_record_of_the_user_overrides_the_shipped_one(folder: Path) -> None:
    assert ask("gfx1100").route == "rows8"
    put(folder, record("gfx1100", crossover=None, verdict=NO))
    decision = ask("gfx1100")
    assert decision.route == "rows4"  # about which the user's file says nothing
    assert why_not(decision).startswith("evidence: 'measured, not admitted: not faster here', required")


def test_reported_evidence_does_not_count_where_only_measured_does(folder: Path) -> None:
    with policy.override({"HIPFIRE_EVIDENCE": "measured"}):
        decision = ask("gfx1100")
        assert decision.route == "tile_batched"
        assert why_not(decision).startswith("evidence: 'reported', required measured evidence (HIPFIRE_EVIDENCE)")
        put(folder, record("gfx1100"))
        assert ask("gfx1100").route == "rows8"


@pytest.mark.parametrize(
    ("crossover", "minimum", "opens_above"),
    [
        ({"ctx": 8192, "below": 2048, "above": 20676}, None, 8192),
        ({"ctx": 2048, "below": None, "above": 8192}, None, 2048),
        ({"ctx": 2048, "below": None, "above": 8192}, "6000", 6000),
        ({"ctx": 8192, "below": 2048, "above": 20676}, "6000", 8192),
        ({"ctx": 2048, "below": None, "above": 8192}, "0", None),
    ],
)
def test_the_measured_crossover_is_used(
    folder: Path, crossover: dict[str, Any], minimum: str | None, opens_above: int | None
) -> None:
    put(folder, record(crossover=crossover))
    with policy.override({"HIPFIRE_FA_PERTOKEN_MIN_CTX": minimum} if minimum else {}):
        if opens_above is None:
            assert ask().route == "tile_batched"
            return
        assert ask(ctx=opens_above + 1).route == "rows8"
        closed = ask(ctx=opens_above)
    assert closed.route == "tile_batched"
    named = "HIPFIRE_FA_PERTOKEN_MIN_CTX" if str(opens_above) == minimum else "measured crossover"
    assert f"required above {opens_above} ({named})" in closed.explain()


# ---- staleness ------------------------------------------------------------------------------------------------------

CHILD = """
import sys
from mutants import MUTANTS, plant
if sys.argv[1:]:
    plant(next(m for m in MUTANTS if m.name == sys.argv[1]))
from test_evidence import ask
print(ask().explain())
"""


def explained(*edit: str) -> str:
    """The decision of a process of its own, with a template edited."""
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", CHILD, *edit]
    return subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True
    ).stdout


def test_an_edited_template_closes_the_route_in_a_new_process(folder: Path) -> None:
    put(folder, record())
    lines = explained().splitlines()
    assert lines[0] == "route: rows8"
    assert "  on measured evidence: a test" in lines
    edited = explained(EDIT.name)
    assert edited.startswith("route: tile_batched")
    assert f"stale: the source of {ROWS8} has changed since it was measured" in edited
    # The established kernel was half of what was timed.
    assert f"stale: the source of {TILE} has changed" in explained("bound one short")


def test_an_edited_template_is_seen_after_forget(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(folder, record())
    assert ask().route == "rows8"
    edited = _mutated_environment(EDIT)
    monkeypatch.setattr(templates, "_environment", lambda folder: edited)
    assert ask().route == "rows8"
    evidence.forget()
    assert f"the source of {ROWS8} has changed" in why_not(ask())


def test_a_kernel_that_is_gone_is_a_change(folder: Path) -> None:
    put(folder, record(digests={**digests("gfx1201"), "attention_of_yesterday": "00"}))
    assert "the source of attention_of_yesterday has changed" in why_not(ask())


@pytest.mark.parametrize("closing", ["stale", "not admitted"])
def test_the_launcher_looks_at_the_evidence_too(closing: str, folder: Path, host: Device) -> None:
    """A plan outlives its decision: what closes the route later sends its calls to the established one."""
    near = {"crossover": {"ctx": 128, "below": None, "above": 8192}}
    put(folder, record("host", **near))
    prepared = plan(AttendRequest("host", "verify", "q8_0", 256, 1, 1, 8, 200, "chain", False, False), host)
    rng = np.random.default_rng(0)
    k, v = (random_q8_0(rng, (200, 1, 8, 34)) for _ in range(2))
    q, out = rng.standard_normal((8, 1, 256), np.float32), np.empty((8, 1, 256), np.float32)
    positions = np.arange(192, 200, dtype=np.int32)
    assert prepared.run(q, k, v, positions, out) == "rows8"
    changes = {"stale": {"digests": {**digests("host"), ROWS8: "00"}}, "not admitted": {"verdict": NO}}[closing]
    put(folder, record("host", **near, **changes))
    assert prepared.run(q, k, v, positions, out) == "tile_batched"


# ---- bad files ------------------------------------------------------------------------------------------------------


def broken(path: str, value: Any) -> dict[str, Any]:
    """A record with one field changed; `...` removes it."""
    changed = copy.deepcopy(record())
    at: Any = changed
    *parents, last = [int(p) if p.isdecimal() else p for p in path.split(".")]
    for part in parents:
        at = at[part]
    if value is ...:
        del at[last]
    else:
        at[last] = value
    return changed


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("arch", "gfx90a", r"\.arch is 'gfx90a'; required: one of gfx1100"),
        ("arch", "gfx1201:xnack-", r"\.arch is 'gfx1201:xnack-'"),
        ("route", "rows16", r"\.route is 'rows16'; required: one of verify_mma, verify_gqa, rows8, rows4"),
        ("route", "tile_batched", r"\.route is 'tile_batched'"),
        ("kind", "guessed", r"\.kind is 'guessed'; required: one of reported, measured"),
        ("device", None, r"\.device is None; required: a string where the kind is measured"),
        ("date", "yesterday", r"\.date is 'yesterday'; required: YYYY-MM-DD"),
        ("toolchain", 22, r"\.toolchain is 22; required: a string"),
        ("shape", [256], r"\.shape is \[256\]; required: an object with head_dim"),
        ("shape.head_dim", "256", r"\.shape\.head_dim is '256'; required: a whole number"),
        ("shape.head_dim", True, r"\.shape\.head_dim is True; required: a whole number"),
        ("shape.n_heads", 0, r"\.shape is .*; required: numbers of at least 1"),
        ("shape.rows", 16, r"\.shape\.rows is 16; required: a list"),
        ("parity.ok", "yes", r"\.parity\.ok is 'yes'; required: true or false"),
        ("parity.worst_error", 1e-3, r"\.parity\.ok is True; required: false where the worst error is over"),
        ("parity.worst_error", None, r"\.parity\.ok is True; required: false where the worst error is over"),
        ("parity.limit", -1, r"\.parity\.limit is -1\.0; required: above 0"),
        ("parity.cases", None, r"\.parity\.cases is None; required: a number"),
        ("speed", [], r"\.speed is \(\); required: measured"),
        ("speed.1.ratio", ..., r"\.speed\[1\]\.ratio is missing"),
        ("speed.1.ratio", 0, r"\.speed\[1\]\.ratio is 0\.0; required: above 0"),
        ("speed.0.quartiles", [2.1, 2.2], r"\.speed\[0\]\.quartiles is .*; required: around the ratio"),
        ("speed.0.quartiles", [2.1], r"\.speed\[0\]\.quartiles is \[2\.1\]; required: a list of 2"),
        ("speed.0.ctx", -5, r"\.speed\[0\]\.ctx is -5; required: at least 1"),
        ("crossover", None, r"\.crossover is None; required: measured"),
        ("crossover.below", 9000, r"\.crossover is .*; required: below < ctx < above"),
        ("digests", None, r"\.digests is None; required: the sources of measured evidence"),
        ("digests", {ROWS8: 5}, rf"\.digests\.{ROWS8} is 5; required: a string"),
        ("verdict.why", "", r"\.verdict\.why is ''; required: a reason"),
        ("verdict", ..., r"\.verdict is missing; required: exactly the fields arch"),
        ("verdicts", {}, r"\.verdicts is not a field; required: exactly the fields arch"),
    ],
)
def test_a_bad_field_is_named(folder: Path, path: str, value: Any, message: str) -> None:
    put(folder, record("gfx1101"), broken(path, value))
    with pytest.raises(InputError, match=r"evidence file \S*mine\.json: records\[1\]" + message):
        ask()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no JSON"),
        ('{"schema": 1, "records": [', "is no JSON"),
        ('{"schema": 1, "records": [NaN]}', "NaN is not a JSON number"),
        ("[]", r"schema is \[\]; required: 1"),
        ('{"records": []}', "schema is None; required: 1"),
        ('{"schema": 2, "records": []}', "schema is 2; required: 1. Run hfk qualify"),
        ('{"schema": 1, "records": {}}', "records a list"),
        ('{"schema": 1, "records": [], "more": 1}', "exactly the fields schema and records"),
        ('{"schema": 1, "records": ["x"]}', r"records\[0\] is 'x'; required: an object"),
    ],
)
def test_a_bad_file_is_named(folder: Path, text: str, message: str) -> None:
    (folder / "mine.json").write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=r"evidence file \S*mine\.json.*" + message):
        ask()


def test_files_that_cannot_be_read_are_named(folder: Path) -> None:
    (folder / "mine.json").mkdir()
    with pytest.raises(InputError, match=r"evidence file \S*mine\.json cannot be read"):
        ask()
    (folder / "mine.json").rmdir()
    (folder / "mine.json").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match=r"evidence file \S*mine\.json cannot be read"):
        ask()


def test_two_records_of_the_user_about_the_same_are_an_error(folder: Path) -> None:
    put(folder, record())
    put(folder, record(), name="other.json")
    with pytest.raises(InputError, match=r"mine\.json and \S*other\.json both have evidence for \('gfx1201', 'rows8'"):
        ask()


def test_a_folder_that_is_a_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HIPFIRE_EVIDENCE_DIR", str(tmp_path / "file"))
    with pytest.raises(InputError, match=r"evidence folder \S*file cannot be read"):
        ask()


# ---- which of the open routes runs ----------------------------------------------------------------------------------


def timed(route: str, ratios: dict[tuple[int, int], float], **changes: Any) -> dict[str, Any]:
    """Measured evidence with these ratios at (ctx, rows)."""
    speed = [{**record()["speed"][0], "ctx": ctx, "rows": rows, "ratio": ratio, "quartiles": None}
             for (ctx, rows), ratio in ratios.items()]  # fmt: skip
    low = {"ctx": 128, "below": None, "above": None}
    return record(route=route, speed=speed, crossover=low, **changes)


@pytest.mark.parametrize(
    ("records", "route"),
    [
        ([timed("rows8", {(20676, 16): 1.2})], "rows8"),
        ([timed("rows8", {(20676, 16): 0.8})], "tile_batched"),  # that has no timing: as fast as itself
        ([timed("rows8", {(20676, 16): 1.0})], "rows8"),
        ([timed("rows8", {(20676, 16): 0.8}), timed("rows4", {(20676, 16): 0.9})], "tile_batched"),
        ([timed("rows8", {(20676, 16): 1.2}), timed("rows4", {(20676, 16): 1.3})], "rows4"),
        ([timed("rows8", {(20676, 16): 1.3}), timed("rows4", {(20676, 16): 1.3})], "rows8"),
        # One that others reported and nobody timed is taken to be as fast as the established one.
        ([timed("rows4", {}, kind="reported", digests=None)], "rows4"),
        ([timed("rows4", {}, kind="reported", digests=None), timed("rows8", {(20676, 16): 0.9})], "rows4"),
        ([timed("rows4", {}, kind="reported", digests=None), timed("rows8", {(20676, 16): 1.1})], "rows8"),
    ],
)
def test_the_route_that_was_measured_as_the_fastest_runs(
    folder: Path, records: list[dict[str, Any]], route: str
) -> None:
    put(folder, *records)
    assert ask().route == route


@pytest.mark.parametrize(
    ("rows", "ctx", "ratio"),
    [
        (16, 4096, 1.0),
        (16, 5000, 1.0),
        (16, 30000, 2.0),
        (8, 4096, 3.0),
        (11, 4096, 3.0),
        (12, 9e9, 2.0),
        (1, 1, 3.0),
        (8, 32768, 3.0),  # of as many rows, although another has the context
        (16, 15000, 2.0),  # half of 32,768, nearly four times 4,096
    ],
)
def test_the_timing_that_counts_is_the_nearest(rows: int, ctx: int, ratio: float) -> None:
    """By rows first, then by context, both by ratio."""
    held = timed("rows8", {(4096, 16): 1.0, (32768, 16): 2.0, (4096, 8): 3.0})
    (one,) = load(json.dumps({"schema": 1, "records": [held]}), "it")
    found = one.nearest(rows, int(ctx))
    assert found is not None
    assert found.ratio == ratio


# ---- cost -----------------------------------------------------------------------------------------------------------


def test_a_decision_on_measured_evidence_reads_and_renders_nothing_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so it costs about what one on reported evidence does."""
    put(folder, record())
    decided = ask(), ask("gfx1100")
    rendered: list[str] = []
    source = Variant.source
    monkeypatch.setattr(Variant, "source", lambda self, arch: (rendered.append(arch), source(self, arch))[1])
    monkeypatch.setattr(evidence._SHELF, "_read", lambda files: pytest.fail("the files are read again"))
    assert (ask(), ask("gfx1100")) == decided
    assert not rendered

    def cost(arch: str) -> float:
        began = time.process_time()
        for _ in range(50):
            ask(arch)
        return time.process_time() - began

    pairs = [(cost("gfx1201"), cost("gfx1100")) for _ in range(7)]
    assert min(a for a, _ in pairs) < 5 * min(b for _, b in pairs)


def test_importing_dispatch_reads_and_renders_nothing() -> None:
    program = (
        "import builtins, pathlib\n"
        "import hipfire_kernels.authoring.templates as r\n"
        "from hipfire_kernels.dispatch import evidence\n"
        "assert not r._environment.cache_info().currsize\n"
        "assert evidence._SHELF._shipped is None and not evidence._SHELF._on_file"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
