"""`hfk evidence add`: what a folder of a first run must have before its records open routes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from firstlight_lab import REDUCE, ROWS, TILE, asked, hfk, passed, quiet
from test_evidence import ROWS8, ask, digests, record

from hipfire_kernels.dispatch import evidence, runfolder, submitted
from hipfire_kernels.dispatch.record import dump, load
from hipfire_kernels.dispatch.runfolder import ABSENT, CARD, FAILED, HUNG, Folder, Result
from hipfire_kernels.errors import InputError, NotAdmitted

DEVICE = {"name": "A card", "arch": "gfx1201", "kind": CARD}
FAMILIES = (REDUCE, TILE, ROWS)
BASE = ("memory", "kernel", "compilers", "matrix", "canaries", "interpreter", "qualify", "bench")


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's evidence folder."""
    monkeypatch.setenv("HIPFIRE_EVIDENCE_DIR", str(tmp_path / "evidence"))
    monkeypatch.setattr(os, "fsync", lambda number: None)
    evidence.forget()
    yield tmp_path / "evidence"
    evidence.forget()


def made(path: Path, *records: dict[str, Any], device: dict[str, Any] = DEVICE, few: bool = False) -> Folder:
    """The folder of a run in which all was as it should be."""
    folder = Folder(path)
    folder.make(asked(names=FAMILIES, few=few))
    passed(folder, "machine", facts={"device": device})
    passed(folder, *BASE, *(step(name) for step in (runfolder.quick, runfolder.grid) for name in FAMILIES))
    (path / "evidence.json").write_text(json.dumps({"schema": 1, "records": list(records) or [record()]}))
    folder.summarize(quiet(folder).summary())
    return folder


def refused(path: Path, **how: Any) -> str:
    with pytest.raises(NotAdmitted) as error:
        submitted.add(path, **how)
    return str(error.value)


def becomes(folder: Folder, step: str, state: str) -> None:
    folder.keep(Result(step, state, ("made up",), runfolder.now(), 0.0))
    folder.summarize(quiet(folder).summary())


def test_it_opens_the_route(tmp_path: Path, own: Path) -> None:
    assert ask().route == "tile_batched"
    made(tmp_path / "run")
    records, file = submitted.add(tmp_path / "run")
    assert file == own / "gfx1201.json"
    assert [r.source for r in records] == [f"hfk firstlight of hipfire-kernels {asked().version}"]
    assert ask().route == "rows8"


def test_what_the_file_has_of_others_stays(tmp_path: Path, own: Path) -> None:
    own.mkdir()
    other = record(shape={"head_dim": 128, "n_heads": 24, "n_kv_heads": 4, "rows": [8]})
    old = record(device="An older card")
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"schema": 1, "records": [other, old]}))
    made(tmp_path / "run")
    submitted.add(tmp_path / "run", file)
    kept = load(file.read_text(), "mine")
    assert [(r.shape.head_dim, r.device) for r in kept] == [(128, "A card"), (256, "A card")]
    assert not (own / "gfx1201.json").exists()
    assert dump(kept) == file.read_text()


@pytest.mark.parametrize(
    "step",
    ["machine", "memory", "kernel", "canaries", "qualify", "interpreter", f"quick-{ROWS}", f"grid-{ROWS}",
     f"grid-{TILE}", f"grid-{REDUCE}"],
)  # fmt: skip
def test_a_step_that_must_be_right(step: str, tmp_path: Path, own: Path) -> None:
    folder = made(tmp_path / "run")
    for state in (FAILED, HUNG):
        becomes(folder, step, state)
        assert f"step {step} is {state}: " in refused(tmp_path / "run")
    folder.forget(step)
    folder.summarize(quiet(folder).summary())
    assert f"step {step} was not run" in refused(tmp_path / "run")
    assert not own.exists()


def test_what_the_record_does_not_rest_on(tmp_path: Path, own: Path) -> None:
    """No kernel of rows8 has the matrix vocabulary; an interpreter may be absent; times of a table are not evidence."""
    folder = made(tmp_path / "run")
    for step, state in (("matrix", FAILED), ("interpreter", ABSENT), ("bench", FAILED), ("compilers", FAILED)):
        becomes(folder, step, state)
    submitted.add(tmp_path / "run")
    assert ask().route == "rows8"


def test_a_record_that_says_no_needs_no_grid(tmp_path: Path, own: Path) -> None:
    no = record(verdict={"admitted": False, "why": "not faster here"}, crossover=None)
    folder = made(tmp_path / "run", no)
    becomes(folder, f"grid-{ROWS}", FAILED)
    submitted.add(tmp_path / "run")
    assert "not faster here" in ask().explain()


def test_another_source_than_the_one_that_was_measured(tmp_path: Path, own: Path) -> None:
    made(tmp_path / "run", record(digests={**digests("gfx1201"), ROWS8: "0" * 64}))
    assert f"the source of {ROWS8} is another one here than the one that was measured" in refused(tmp_path / "run")


def test_another_arch(tmp_path: Path, own: Path) -> None:
    made(tmp_path / "run", record("gfx1101"))
    assert "it is of gfx1101, the device of the folder is gfx1201" in refused(tmp_path / "run")


def test_few_cases(tmp_path: Path, own: Path) -> None:
    made(tmp_path / "run", few=True)
    assert "it is a run of few variants and cases" in refused(tmp_path / "run")


def test_no_card(tmp_path: Path, own: Path) -> None:
    made(tmp_path / "run", device={**DEVICE, "kind": "stand-in"})
    said = refused(tmp_path / "run")
    assert "it is from no card: hip:0 is stand-in; pass --not-a-card" in said
    (one,), _ = submitted.add(tmp_path / "run", not_a_card=True)
    assert one.source.startswith("NOT FROM A CARD (stand-in): hfk firstlight")
    assert one.device == "A card (no card: stand-in)"
    assert "evidence" in ask().explain()


def test_a_file_that_is_not_the_one_of_the_summary(tmp_path: Path, own: Path) -> None:
    folder = made(tmp_path / "run")
    becomes(folder, "canaries", FAILED)
    passed(folder, "canaries")
    put = tmp_path / "run" / "evidence.json"
    put.write_text(put.read_text().replace("2.00x from 8192", "9.00x from 8192"))
    said = refused(tmp_path / "run")
    assert "the summary was made of others than lie here, of canaries, evidence.json; send all of a run" in said


def test_no_records(tmp_path: Path, own: Path) -> None:
    folder = made(tmp_path / "run")
    (tmp_path / "run" / "evidence.json").unlink()
    folder.summarize(quiet(folder).summary())
    assert "evidence.json is not there, or has no record" in refused(tmp_path / "run")


def test_all_reasons_at_once(tmp_path: Path, own: Path) -> None:
    folder = made(tmp_path / "run", record("gfx1101"), few=True, device={**DEVICE, "kind": "stand-in"})
    becomes(folder, "canaries", FAILED)
    said = refused(tmp_path / "run")
    assert len(said.splitlines()) == 5
    assert said.startswith(f"{tmp_path / 'run'} opens no route:")


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        ("run.json", None, r"run\.json cannot be read .*required: a folder that hfk firstlight wrote"),
        ("run.json", '{"schema": 2}', r"run\.json: schema is 2; required: 1"),
        ("run.json", '{"schema": 1, "asked": {}}', r"run\.json\.device is missing"),
        ("summary.json", "[]", r"summary\.json holds a list; required: an object"),
        ("summary.json", "{", r"summary\.json is no JSON"),
        ("summary.json", '{"schema": 1, "steps": 3}', r"summary\.json\.steps is 3; required: a list"),
        ("summary.json", '{"schema": 1, "steps": [{"step": "../x", "sha256": ""}]}', r"steps\[0\] is .*both strings"),
        ("steps/kernel.json", '{"facts": 1}', r"kernel\.json\.facts is 1; required: an object"),
        ("steps/kernel.json", '{"facts": {}}', r"kernel\.json\.step is missing"),
        ("evidence.json", "{}", r"schema is None; required: 1"),
    ],
)
def test_a_folder_that_is_none(file: str, text: str | None, says: str, tmp_path: Path, own: Path) -> None:
    made(tmp_path / "run")
    if text is None:
        (tmp_path / "run" / file).unlink()
    else:
        (tmp_path / "run" / file).write_text(text)
    with pytest.raises(InputError, match=says):
        submitted.add(tmp_path / "run")


def test_the_command(tmp_path: Path, own: Path) -> None:
    made(tmp_path / "run")
    environ = {"HIPFIRE_EVIDENCE_DIR": str(own)}
    done = hfk("evidence", "add", "run", cwd=tmp_path, **environ)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("gfx1201 rows8 d256: opens, 2.00x from 8192 keys on\n")
    shown = json.loads(hfk("evidence", "--json", cwd=tmp_path, **environ).stdout)
    assert {"arch": "gfx1201", "status": "fresh", "verdict": "admitted"}.items() <= next(
        one for one in shown if one["arch"] == "gfx1201"
    ).items()
    none = hfk("evidence", "add", "nowhere", cwd=tmp_path, **environ)
    assert none.returncode == 2
    assert "required: a folder that hfk firstlight wrote" in none.stderr
