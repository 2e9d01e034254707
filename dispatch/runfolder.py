"""The folder that `hfk firstlight` leaves: its files, and what each of them says.

run.json has what was asked for. Of each step there is in steps/ a mark, written before it starts (STEP.begun.json),
notes of how far it came (STEP.progress.jsonl), and what came of it (STEP.json). A mark with nothing beside it is a step
that took the machine, or its process, with it. summary.json has all of them, with the digests of those files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from hipfire_kernels.building.storage import replacing
from hipfire_kernels.dispatch.record import typed
from hipfire_kernels.errors import InputError

SCHEMA = 1
"""Version of the format. A folder of another version is refused."""

PASSED, FAILED, HUNG, CRASHED, LOST, SKIPPED, ABSENT = (
    "passed", "failed", "hung", "crashed", "lost", "skipped", "absent",
)  # fmt: skip
STATES = {
    PASSED: "as it should be",
    FAILED: "something is wrong, see what was found",
    HUNG: "no sign of life for too long; its process was ended",
    CRASHED: "its process ended without a result",
    LOST: "begun, and never ended: the machine, or the whole run, went down with it",
    SKIPPED: "not run, for a step that it needs is not as it should be",
    ABSENT: "cannot be had here",
}
"""What a step can have come to. `skipped` is looked at anew at each run."""

MACHINE, MEMORY, KERNEL, MATRIX, CANARIES, INTERPRETER, QUALIFY = (
    "machine", "memory", "kernel", "matrix", "canaries", "interpreter", "qualify",
)  # fmt: skip
"""Names of the steps that evidence depends on, beside `quick` and `grid` of each family."""

CARD, STANDIN, INTERPRETED = "card", "stand-in", "interpreter"
"""What a device can be."""

EVIDENCE, SUMMARY, PAGE = "evidence.json", "summary.json", "index.html"


def quick(family: str) -> str:
    """The name of the step that has a family's small grid."""
    return f"quick-{family}"


def grid(family: str) -> str:
    """The name of the step that has a family's full grid."""
    return f"grid-{family}"


def now() -> str:
    """The time, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


@dataclass(frozen=True)
class Asked:
    """What a run was asked for.

    Attributes:
        device: by name.
        few: one variant of each family and few cases: quick, and no ground for evidence.
        families: those that are looked at, the simplest first.
        version: of the library.
        templates: digest of all kernel sources, unrendered.
    """

    device: str
    few: bool
    families: tuple[str, ...]
    version: str
    templates: str


@dataclass(frozen=True)
class _Head:
    step: str
    state: str
    found: tuple[str, ...]
    began: str
    seconds: float


@dataclass(frozen=True)
class Result(_Head):
    """What came of a step.

    Attributes:
        found: sentences.
        facts: figures, in the step's own words.
    """

    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Mark:
    """That a step has begun: when, and in which life of the machine."""

    step: str
    began: str
    boot: str


def boot() -> str:
    """Which life of the machine this is; empty where it does not say."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


class Folder:
    """The files of a run."""

    def __init__(self, path: Path) -> None:
        self.path, self._steps = path, path / "steps"
        self._read: dict[str, tuple[tuple[int, ...], Result, str]] = {}

    def make(self, asked: Asked) -> None:
        """Begin a run, or go on with one that was asked for the same.

        Raises:
            InputError: it is of another run, or cannot be written.
        """
        try:
            self._steps.mkdir(parents=True, exist_ok=True)
            if not (self.path / "run.json").exists():
                self._write(self.path / "run.json", {"schema": SCHEMA, "asked": dataclasses.asdict(asked)})
        except OSError as error:
            raise InputError(f"{self.path} cannot be written ({error.strerror}); name another folder") from error
        before = self.asked()
        for one in dataclasses.fields(Asked):
            seen, wanted = getattr(before, one.name), getattr(asked, one.name)
            if seen != wanted:
                what = "its kernels have changed since" if one.name == "templates" else f"{one.name} was {seen!r}"
                raise InputError(
                    f"{self.path} is of another run: {what}; name another folder, or ask for the same to go on"
                )

    def asked(self) -> Asked:
        """What the run was asked for.

        Raises:
            InputError: this is no folder of a run.
        """
        name = str(self.path / "run.json")
        document = read(self.path / "run.json")
        if document.get("schema") != SCHEMA:
            raise InputError(f"{name}: schema is {document.get('schema')!r}; required: {SCHEMA}")
        asked: Asked = typed(Asked, document.get("asked"), name)
        return asked

    # -- of a step --

    def begin(self, step: str) -> None:
        """Mark that a step begins, on disk before it does."""
        self._write(self._file(step, "begun.json"), dataclasses.asdict(Mark(step, now(), boot())))

    def mark(self, step: str) -> Mark | None:
        """The mark of a step that has begun."""
        file = self._file(step, "begun.json")
        if not file.exists():
            return None
        found: Mark = typed(Mark, read(file), str(file))
        return found

    def unmark(self, step: str) -> None:
        """A step that was broken off on purpose may begin again."""
        self._file(step, "begun.json").unlink(missing_ok=True)

    def result(self, step: str) -> Result | None:
        """What came of a step; None where nothing has yet."""
        found = self._current(step)
        return found[1] if found is not None else None

    def _current(self, step: str) -> tuple[tuple[int, ...], Result, str] | None:
        """What came of a step with the digest of its file, which is read where it is not the one that was."""
        file = self._file(step, "json")
        try:
            now = file.stat()
        except FileNotFoundError:
            return None
        which = (now.st_ino, now.st_mtime_ns, now.st_size)
        if step not in self._read or self._read[step][0] != which:
            data = file.read_bytes()
            self._read[step] = which, parsed(read(file), str(file)), hashlib.sha256(data).hexdigest()
        return self._read[step]

    def keep(self, result: Result) -> None:
        """Write what came of a step."""
        self._write(self._file(result.step, "json"), dataclasses.asdict(result))

    def forget(self, step: str) -> None:
        """Have a step begin anew."""
        for end in ("json", "begun.json", "progress.jsonl"):
            self._file(step, end).unlink(missing_ok=True)

    def note(self, step: str, entry: Mapping[str, Any]) -> None:
        """Note how far a step has come, on disk before it goes on."""
        with self._file(step, "progress.jsonl").open("ab") as file:
            file.write(b"\n" + json.dumps(entry).encode())  # a newline first: the last line may have been cut off
            file.flush()
            os.fsync(file.fileno())

    def notes(self, step: str) -> list[dict[str, Any]]:
        """How far a step came."""
        found = []
        file = self._file(step, "progress.jsonl")
        for line in file.read_bytes().split(b"\n") if file.exists() else ():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return [entry for entry in found if isinstance(entry, dict)]

    def brought_down(self, step: str) -> str:
        """The family whose kernel a step was at work on when it hung, crashed or took the machine with it; empty where
        it did not, or nobody knows."""
        found = self.result(step)
        if found is None or found.state not in (HUNG, CRASHED, LOST):
            return ""
        begun = [note for note in self.notes(step) if "begins" in note]
        return str(begun[-1].get("family", "")) if begun else ""

    def digest(self, step: str) -> str:
        """SHA-256 of what came of a step, as it lies here."""
        found = self._current(step)
        return found[2] if found is not None else ""

    def evidence_digest(self) -> str:
        """SHA-256 of the records that the card has earned; empty where it has none."""
        file = self.path / EVIDENCE
        return hashlib.sha256(file.read_bytes()).hexdigest() if file.exists() else ""

    # -- of all --

    def summarize(self, document: Mapping[str, Any]) -> None:
        """Write the summary."""
        self._write(self.path / SUMMARY, document)

    def _file(self, step: str, end: str) -> Path:
        return self._steps / f"{step}.{end}"

    def _write(self, path: Path, document: Mapping[str, Any]) -> None:
        """Whole or not at all, and there after a reset: a name is on disk when its folder is."""
        with replacing(path) as file:
            file.write((json.dumps(document, indent=1) + "\n").encode())
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def read(file: Path) -> dict[str, Any]:
    """A file of the folder.

    Raises:
        InputError: it is not there, or no JSON object.
    """
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file} cannot be read ({error}); required: a folder that hfk firstlight wrote") from error
    except ValueError as error:
        raise InputError(f"{file} is no JSON ({error}); required: a folder that hfk firstlight wrote") from error
    if not isinstance(document, dict):
        raise InputError(f"{file} holds a {type(document).__name__}; required: an object")
    return document


def parsed(document: dict[str, Any], name: str) -> Result:
    """A result from its JSON.

    Raises:
        InputError: it is none; the message names the field.
    """
    facts = document.get("facts")
    if not isinstance(facts, dict):
        raise InputError(f"{name}.facts is {facts!r}; required: an object")
    head: _Head = typed(_Head, {key: value for key, value in document.items() if key != "facts"}, name)
    if head.state not in STATES:
        raise InputError(f"{name}.state is {head.state!r}; required: one of {', '.join(STATES)}")
    return Result(**vars(head), facts=facts)
