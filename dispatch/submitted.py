"""From the folder of a first run to the records that open routes: only where everything that they rest on is there.

What a folder lacks is said all at once, for whoever has to go back to the card.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hipfire_kernels.building.storage import evidence_root, replacing
from hipfire_kernels.checking.matrix_probe import used_by
from hipfire_kernels.dispatch import evidence, runfolder
from hipfire_kernels.dispatch.record import Evidence, dump
from hipfire_kernels.dispatch.runfolder import ABSENT, CARD, PASSED, SCHEMA, STATES, Asked, Folder
from hipfire_kernels.errors import InputError, NotAdmitted
from hipfire_kernels.kernels import families

NEEDED = (runfolder.MACHINE, runfolder.MEMORY, runfolder.KERNEL, runfolder.CANARIES, runfolder.QUALIFY)
"""Steps that must be as they should be for any record."""


@dataclasses.dataclass(frozen=True)
class Submitted:
    """A folder that has been read.

    Attributes:
        kind, arch, name: of the device, as it said.
        states: of each step, its state.
        records: that its card has earned; what they say of themselves is not yet believed.
        changed: steps, and files, that are not those that the summary was made of.
    """

    asked: Asked
    kind: str
    arch: str
    name: str
    states: dict[str, str]
    records: tuple[Evidence, ...]
    changed: tuple[str, ...]


def read(path: Path) -> Submitted:
    """Read a folder.

    Raises:
        InputError: it is none of `hfk firstlight`, or of another version of its format.
    """
    folder = Folder(path)
    asked = folder.asked()
    file = path / runfolder.SUMMARY
    summary = runfolder.read(file)
    if summary.get("schema") != SCHEMA:
        raise InputError(f"{file}: schema is {summary.get('schema')!r}; required: {SCHEMA}")
    digests = dict(_digests(summary.get("steps"), str(file)))
    results = {step: folder.result(step) for step in digests}
    changed = tuple(step for step, was in digests.items() if results[step] is None or folder.digest(step) != was)
    if summary.get("evidence") != folder.evidence_digest():
        changed = (*changed, runfolder.EVIDENCE)
    machine = results.get(runfolder.MACHINE)
    device = machine.facts.get("device", {}) if machine is not None else {}
    if not isinstance(device, dict):
        raise InputError(f"{path}: the device of step machine is {device!r}; required: an object")
    earned = path / runfolder.EVIDENCE
    return Submitted(
        asked,
        str(device.get("kind", "")),
        str(device.get("arch", "")),
        str(device.get("name", "")),
        {step: result.state for step, result in results.items() if result is not None},
        evidence.read_file(earned) if earned.exists() else (),
        changed,
    )


def _digests(listed: Any, name: str) -> Iterator[tuple[str, str]]:
    if not isinstance(listed, list):
        raise InputError(f"{name}.steps is {listed!r}; required: a list")
    for i, one in enumerate(listed):
        step, digest = (one.get(key) if isinstance(one, dict) else None for key in ("step", "sha256"))
        if not (isinstance(step, str) and isinstance(digest, str)) or "/" in step:
            raise InputError(f"{name}.steps[{i}] is {one!r}; required: an object with step and sha256, both strings")
        yield step, digest


def refusals(found: Submitted, *, not_a_card: bool = False) -> list[str]:
    """Why no route may open by a folder; nothing where they may.

    Args:
        not_a_card: what comes from no card is not refused for that.
    """
    said = []
    if found.kind != CARD and not not_a_card:
        said.append(
            f"it is from no card: {found.asked.device} is {found.kind or 'nothing that opened'}"
            + ("; pass --not-a-card for records that are marked as such" if found.kind else "")
        )
    if found.asked.few:
        said.append("it is a run of few variants and cases; required: a run without --few")
    if found.changed:
        said.append(f"the summary was made of others than lie here, of {', '.join(found.changed)}; send all of a run")
    said += _missing(found)
    if not found.records and found.states.get(runfolder.QUALIFY) == PASSED:
        said.append(f"{runfolder.EVIDENCE} is not there, or has no record")
    for record in found.records:
        said += [f"{record.route} d{record.shape.head_dim}: {why}" for why in _of_record(record, found)]
    return said


def _missing(found: Submitted) -> list[str]:
    """Steps that every record rests on."""
    wanting = [name for name in NEEDED if found.states.get(name) != PASSED]
    if found.states.get(runfolder.INTERPRETER) not in (PASSED, ABSENT):
        wanting.append(runfolder.INTERPRETER)
    return [_state(name, found) for name in wanting]


def _state(step: str, found: Submitted) -> str:
    state = found.states.get(step)
    return f"step {step} was not run" if state is None else f"step {step} is {state}: {STATES[state]}"


def _of_record(record: Evidence, found: Submitted) -> Iterator[str]:
    """What keeps one record from counting."""
    if record.arch != found.arch:
        yield f"it is of {record.arch}, the device of the folder is {found.arch}"
    if record.kind != "measured":
        yield f"it is {record.kind}; required: measured"
    if stale := evidence.changed(record):
        yield f"the source of {', '.join(stale)} is another one here than the one that was measured"
    if not record.verdict.admitted:
        return  # it opens nothing
    owner = {v.entry: family for family in families().values() for v in family.variants()}
    held = {owner[entry] for entry in record.digests or {} if entry in owner}
    steps = [step for family in held for step in (runfolder.quick(family.name), runfolder.grid(family.name))]
    if any(map(used_by, held)):
        steps.append(runfolder.MATRIX)
    for step in sorted(steps):
        if found.states.get(step) != PASSED:
            yield _state(step, found)


def add(path: Path, out: Path | None = None, *, not_a_card: bool = False) -> tuple[tuple[Evidence, ...], Path]:
    """Put the records of a folder into force: into a file of the user's evidence folder, or another one.

    Args:
        out: the file; what it has of other archs, routes and head_dims stays.
        not_a_card: take what comes from no card, marked as such.

    Returns:
        The records, and the file.

    Raises:
        InputError: the folder is none, or a file cannot be read or written.
        NotAdmitted: something that the records rest on is missing; with all of it.
    """
    found = read(path)
    said = refusals(found, not_a_card=not_a_card)
    if said:
        raise NotAdmitted("\n  ".join([f"{path} opens no route:", *said]))
    records = tuple(_signed(record, found) for record in found.records)
    file = out or evidence_root() / f"{found.arch}.json"
    replaced = {record.key for record in records}
    kept = [r for r in (evidence.read_file(file) if file.exists() else ()) if r.key not in replaced]
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as written:
            written.write(dump([*kept, *records]).encode())
    except OSError as error:
        raise InputError(f"{file} cannot be written ({error.strerror}); pass --out") from error
    evidence.forget()
    return records, file


def _signed(record: Evidence, found: Submitted) -> Evidence:
    """The record with where it comes from; what is from no card says so wherever it is shown."""
    source = f"hfk firstlight of hipfire-kernels {found.asked.version}"
    if found.kind == CARD:
        return dataclasses.replace(record, source=source)
    return dataclasses.replace(
        record, source=f"NOT FROM A CARD ({found.kind}): {source}", device=f"{record.device} (no card: {found.kind})"
    )
