"""Keys and digests: whatever a result depends on is in its key. Each part is changed alone, and must change the key.

The journal of `hfk qualify` and what an A/B run is bound to are in `test_qualify` and `test_ab`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_cache import Script
from test_evidence import record as evidence_record
from test_tune import GQA, MMA, N64, tuned
from test_verify_split import ask, record

from hipfire_kernels import families
from hipfire_kernels.archs import ARCHS, Arch
from hipfire_kernels.bench.tune import Held
from hipfire_kernels.building import builder, cache
from hipfire_kernels.building.cache import ArtifactCache, Entry, artifact_key
from hipfire_kernels.building.toolchains import _probe
from hipfire_kernels.checking.parity import Case
from hipfire_kernels.dispatch import evidence, tuning
from hipfire_kernels.dispatch.record import dump, load, record_key
from hipfire_kernels.errors import InputError
from hipfire_kernels.running.devices.protocol import Device

# ---- compiled kernels -----------------------------------------------------------------------------------------------


@pytest.fixture
def key_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The key under which a kernel is kept; nothing is compiled."""

    def compiled(variant: Any, arch: Arch, compiler: Any, identity: str, source: str, key: str) -> Entry:
        return Entry(key, arch.name, variant.entry, compiler.name, identity, {}, "", "now", b"code")

    monkeypatch.setattr(builder, "_compile", compiled)

    def of(kernel: Declared | None = None, script: Script | None = None, arch: str = "host") -> str:
        return builder.build(kernel or Declared(), arch, script or Script(), ArtifactCache(tmp_path)).key

    return of


class Declared:
    """The least that `build` takes."""

    def __init__(self, text: str = "body", entry: str = "k", lds_bytes: int = 64, threads: int = 32) -> None:
        self.text, self.entry, self.declared = text, entry, (lds_bytes, threads)

    def lds_bytes(self, arch: str) -> int:
        return self.declared[0]

    def threads(self, arch: str) -> int:
        return self.declared[1]

    def source(self, arch: str) -> str:
        return self.text


class Other(Script):
    name = "another"


KERNELS: dict[str, tuple[dict[str, Any], dict[str, Any], type[Script]]] = {
    "source": ({"text": "other"}, {}, Script),
    "entry": ({"entry": "other"}, {}, Script),
    "lds": ({"lds_bytes": 128}, {}, Script),
    "compiler's version": ({}, {"version": "2"}, Script),
    "options": ({}, {"options": ("-O2",)}, Script),
    "toolchain": ({}, {}, Other),
}


@pytest.mark.parametrize("part", KERNELS)
def test_each_part_of_a_compiled_kernels_key(part: str, key_of: Callable[..., str]) -> None:
    kernel, script, kind = KERNELS[part]
    assert key_of(Declared(**kernel), kind(**script)) != key_of()
    assert key_of() == key_of()


@pytest.mark.parametrize("declared", [{"lds_bytes": 128}, {"threads": 64}], ids=str)
def test_what_a_cubin_does_not_say_is_in_its_key(declared: dict[str, int], key_of: Callable[..., str]) -> None:
    assert key_of(Declared(**declared), arch="sm_90") != key_of(arch="sm_90")


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Arch)])
def test_each_field_of_the_arch_is_in_the_key(
    field: str, key_of: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, row = key_of(), ARCHS["host"]
    value = getattr(row, field)
    monkeypatch.setitem(ARCHS, "host", replace(row, **{field: value + 1 if isinstance(value, int) else f"{value}x"}))
    assert key_of() != before


def test_the_format_of_an_entry_is_in_the_key(key_of: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {key_of()}
    with monkeypatch.context() as patch:
        patch.setattr(builder, "FIELDS", builder.FIELDS[1:])
        keys.add(key_of())
    with monkeypatch.context() as patch:
        patch.setattr(cache, "SCHEMA", cache.SCHEMA + 1)
        keys.add(key_of())
    assert len(keys) == 3


def test_parts_do_not_run_into_one_another() -> None:
    assert len({artifact_key(*parts) for parts in (("ab", "c"), ("a", "bc"), ("abc",), ("a", "b", "c"), ())}) == 5


# ---- what is remembered of a compiler -------------------------------------------------------------------------------


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., int]]:
    """How often a question is put anew, in this process and behind a fresh start of one."""
    monkeypatch.setenv("HIPFIRE_CACHE_DIR", str(tmp_path / "cache"))

    def ask_for(question: tuple[str, ...], files: list[Path]) -> int:
        monkeypatch.setattr(_probe, "_known", {})
        count: list[int] = []
        for _ in range(2):
            _probe.recall(question, map(str, files), lambda: (count.append(1), {"a": "b"})[1])
        return len(count)

    return ask_for


def test_each_part_of_a_question_about_a_compiler(asked: Callable[..., int], tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text("1")
    second.write_text("2")
    assert asked(("clang", "x"), [first]) == 1
    assert asked(("clang", "x"), [first]) == 0
    for question, files in (
        (("clang++", "x"), [first]),
        (("clang", "y"), [first]),
        (("clang",), [first]),
        (("clang", "x"), [second]),
        (("clang", "x"), [first, second]),
        (("clang", "x"), []),
        (("clang", "x"), [tmp_path / "none"]),
    ):
        assert asked(question, files) == 1, (question, files)
        assert asked(question, files) == 0
    first.unlink()
    assert asked(("clang", "x"), [first]) == 1


def test_each_part_of_a_files_stamp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, alias = tmp_path / "file", tmp_path / "alias"
    file.write_text("1")
    alias.hardlink_to(file)
    link = tmp_path / "link"
    stamps = []
    for place in (file, alias):  # the same in all but the place that the link leads to
        link.unlink(missing_ok=True)
        link.symlink_to(place)
        stamps.append(_probe._stamp(str(link)))
    assert stamps[0] != stamps[1]
    plain = {"st_size": 1, "st_mtime_ns": 2, "st_ctime_ns": 3}
    seen = []
    for changed in ({}, *({name: 9} for name in plain)):
        with monkeypatch.context() as patch:
            patch.setattr(_probe.os, "stat", lambda path, found={**plain, **changed}: SimpleNamespace(**found))
            patch.setattr(_probe.os.path, "realpath", lambda path: path)
            seen.append(tuple(_probe._stamp("x")))
    assert len(set(seen)) == 4
    assert _probe._stamp("/nowhere/a") != _probe._stamp("/nowhere/b")


def test_what_is_remembered_is_held_by_a_digest_of_all_of_it() -> None:
    facts = {"clang": "22", "lld": "22"}
    others = [{**facts, "clang": "21"}, {**facts, "lld": "21"}, {"clang": "22"}, {**facts, "more": ""}]
    assert len({_probe._digest(one) for one in (facts, *others)}) == 5


# ---- evidence -------------------------------------------------------------------------------------------------------


def test_each_part_of_what_evidence_decides_on() -> None:
    here = record("verify_gqa", {1: 2.0})
    assert here.key == ("host", "verify_gqa", 256, 6)
    with evidence.using([here]):
        assert evidence.find("host", "verify_gqa", 256, 6) == here
        for at, other in ((0, "gfx1100"), (1, "verify_mma"), (2, 128), (3, 4), (3, None)):
            changed: list[Any] = ["host", "verify_gqa", 256, 6]
            changed[at] = other
            assert evidence.find(*changed) is None, changed
    assert record_key("host", "rows8", 256, 6) == record_key("host", "rows8", 256, 4)


def test_records_that_differ_in_one_part_lie_beside_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = load(json.dumps({"schema": 1, "records": [evidence_record()]}), "it")[0]
    gqa = replace(one, route="verify_gqa")
    others = [one, replace(one, arch="gfx1200"), replace(one, route="rows4"), gqa]
    others += [replace(one, shape=replace(one.shape, head_dim=128)), replace(gqa, shape=replace(one.shape, n_heads=16))]
    monkeypatch.setenv("HIPFIRE_EVIDENCE_DIR", str(tmp_path))
    (tmp_path / "a.json").write_text(dump(others), encoding="utf-8")
    evidence.forget()
    try:
        current = evidence.current()
        assert [current[r.key] for r in others] == others
        assert len({r.key for r in others}) == 6
        (tmp_path / "b.json").write_text(dump([replace(one, device="another")]), encoding="utf-8")
        evidence.forget()
        with pytest.raises(InputError, match="both have evidence for"):
            evidence.current()
    finally:
        evidence.forget()


def test_each_kernel_whose_source_was_measured_makes_a_record_stale() -> None:
    one = load(json.dumps({"schema": 1, "records": [evidence_record()]}), "it")[0]
    assert one.digests is not None
    assert evidence.changed(one) == ()
    for entry in one.digests:
        assert evidence.changed(replace(one, digests={**one.digests, entry: "0" * 64})) == (entry,)
    assert set(evidence.changed(replace(one, arch="gfx1100"))) == set(one.digests), "the source for another arch"


def test_the_users_folder_is_the_one_that_is_named_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its name is relative, and the process has gone elsewhere."""
    for name in ("a", "b"):
        (tmp_path / name / "here").mkdir(parents=True)
        found = evidence_record(device=f"the card of {name}")
        (tmp_path / name / "here" / "x.json").write_text(json.dumps({"schema": 1, "records": [found]}))
    seen = []
    try:
        for name in ("a", "b", "a"):
            monkeypatch.chdir(tmp_path / name)
            monkeypatch.setenv("HIPFIRE_EVIDENCE_DIR", "here")
            held = evidence.find("gfx1201", "rows8", 256)
            seen.append(held and held.device)
    finally:
        evidence.forget()
    assert seen == ["the card of a", "the card of b", "the card of a"]


# ---- tuning ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"arch": "gfx1100"}, {"head_dim": 128}, {"n_heads": 48, "n_kv_heads": 8}, {"n_heads": 12, "n_kv_heads": 2},
        {"rows": 8}, {"rows": 17}, {"logical_ctx": 2048}, {"logical_ctx": 4097}, {"multiprocessors": 9},
    ],
    ids=str,
)  # fmt: skip
def test_each_part_of_what_a_tuning_decides_on(changes: dict[str, Any]) -> None:
    request = ask(logical_ctx=4096, rows=16, multiprocessors=8)
    with tuning.using([tuned(MMA, {"splits": 11}, 16, 4096)]):
        for family, other, splits in ((MMA, {}, 11), (MMA, changes, None), (GQA, {}, None)):
            found = tuning.find(families()[family], replace(request, **other))
            assert found is not None
            assert found.splits == splits, (family, other)


def test_tunings_that_differ_in_one_part_lie_beside_each_other() -> None:
    one = tuned(MMA, {"splits": 11}, 16, 4096)
    parts = {"arch": "gfx1100", "family": GQA, "head_dim": 128, "n_heads": 48, "n_kv_heads": 8, "rows": 8, "ctx": 8192}
    assert len({one.key, *(replace(one, **{name: value}).key for name, value in parts.items())}) == 8
    assert len(one.key) == len(parts)


def test_each_kernel_that_was_timed_makes_a_tuning_stale() -> None:
    one = tuned(MMA, {"splits": 11}, 16, 4096)
    entries = [v.entry for v in families()[MMA].variants() if (v.head_dim, v.group) == (256, 6)][:3]
    whole = {entry: str(evidence.source_digest(entry, "host")) for entry in entries}
    request = ask(logical_ctx=4096, rows=16, multiprocessors=8)
    for stale in (None, *entries):
        digests = whole if stale is None else {**whole, stale: "0" * 64}
        with tuning.using([replace(one, digests=digests)]):
            found = tuning.find(families()[MMA], request)
        assert found is not None
        assert found.splits == (11 if stale is None else None)
        assert stale is None or f"the source of {stale} has changed" in found.why


def test_each_part_of_what_a_candidate_is_held_for(host: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a draft's kernel the group is no parameter: what was right for one may be wrong for another."""
    held, seen = Held(host), []

    def one(self: Held, variant: Any, splits: int | None, case: Case) -> float:
        seen.append((variant, splits, case.rows, case.n_heads))
        return 0.0

    monkeypatch.setattr(Held, "_draft", one)
    first, second = list(families()[N64].variants())[:2]
    asked_for = [(first, 2, 4, 6), (second, 2, 4, 6), (first, 3, 4, 6), (first, None, 4, 6), (first, 2, 8, 6)]
    asked_for.append((first, 2, 4, 8))
    for _ in range(2):
        for what in asked_for:
            assert held.fault(*what) == ""
    assert seen == asked_for
