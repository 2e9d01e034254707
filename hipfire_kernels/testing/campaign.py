"""A fuzzing campaign: the ledger first, then drawn cases, over child processes; failures shrunk and kept."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from hipfire_kernels.authoring.family import Variant
from hipfire_kernels.checking.oracle import oracle_of
from hipfire_kernels.checking.result import Finding
from hipfire_kernels.errors import InputError
from hipfire_kernels.testing.axes import WORK, generate
from hipfire_kernels.testing.case import variant_of
from hipfire_kernels.testing.casefile import case_from, read_cases
from hipfire_kernels.testing.children import Child

SHRINK_STEPS, SHRINK_SECONDS = 300, 60.0
"""Cases tried to make one failure simpler, and for how long: of a kernel that hangs each takes the whole limit."""

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """What a campaign runs.

    Attributes:
        count: drawn cases over all shards, None for as many as `seconds` allow; the ledger comes on top.
        shard, shards: which part of them this is, from 0.
        limit_s: CPU seconds a case may take; see `Child`.
        work: multiply-adds of the scores that a case may take.
        most_failures: after so many the campaign ends: they have one cause, or the device is broken.
    """

    variants: tuple[Variant, ...]
    device: str = "host"
    seed: int = 0
    count: int | None = 1000
    seconds: float | None = None
    jobs: int = 1
    shard: int = 0
    shards: int = 1
    limit_s: float = 60.0
    work: int = WORK
    most_failures: int = 20


@dataclass(frozen=True)
class Failure:
    """A failing case as it was drawn, and the simplest one found that fails too."""

    found: Finding
    shrunk: Finding

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"found": self.found.as_dict(), "shrunk": self.shrunk.as_dict()}


@dataclass
class Outcome:
    """What a campaign, or several of them merged, gave.

    Attributes:
        worst: variant name to its largest error, in units of its limit.
        left_out: variants whose LDS the device's arch has not.
        devices: what it ran on, each once.
    """

    cases: int = 0
    ledger: int = 0
    seconds: float = 0.0
    worst: dict[str, float] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    devices: list[dict[str, Any]] = field(default_factory=list)

    def add(self, found: Finding) -> None:
        """Count a finding."""
        name = found.case.variant
        self.worst[name] = max(self.worst.get(name, 0.0), found.share)

    def as_dict(self) -> dict[str, Any]:
        """For JSON, and for `merged`."""
        return {**vars(self), "failures": [f.as_dict() for f in self.failures]}


def ledger() -> list[Any]:
    """The known cases that ship with the library: one for every fault found so far, run first by every campaign."""
    with resources.as_file(resources.files("hipfire_kernels.testing") / "ledger.jsonl") as file:
        return read_cases(file)


def run(settings: Settings, known: Sequence[Any], progress: Progress = lambda text: None) -> Outcome:
    """Run a campaign.

    Args:
        known: cases to run first, whatever the count; those of other variants are passed over. Only shard 0 runs them.
    """
    children = _children(settings)
    arch = children[0].arch()
    fitting = tuple(v for v in settings.variants if v.fits(arch))
    names = {v.name for v in fitting}
    first = [case for case in known if case.variant in names and settings.shard == 0]
    left_out = [v.name for v in settings.variants if v.name not in names]
    outcome = Outcome(ledger=len(first), left_out=left_out, devices=[children[0].device])
    began = time.perf_counter()
    deadline = None if settings.seconds is None else began + settings.seconds
    cases = _Shared(itertools.chain(first, _drawn(dataclasses.replace(settings, variants=fitting))))

    def work(child: Child) -> None:
        try:
            for number, case in cases.until(deadline, at_least=len(first)):
                found = child.run(case)
                if cases.abandoned:
                    return
                with cases.lock:
                    outcome.add(found)
                    outcome.cases += number >= len(first)
                if found.ok:
                    progress(case.variant)
                    continue
                progress(found.describe())
                failure = Failure(found, shrink(found, child))
                with cases.lock:
                    outcome.failures.append(failure)
                    cases.stopped |= len(outcome.failures) >= settings.most_failures
        finally:
            child.close()

    _on_threads(work, children, cases)
    outcome.seconds = time.perf_counter() - began
    return outcome


def _children(settings: Settings) -> list[Child]:
    """As many as jobs; several that use the CPU are pinned to a core each, so that their threads do not fight."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
    pinned = settings.jobs > 1 and settings.device.startswith(("host", "isa:"))
    at = [cores[i % len(cores)] if pinned else None for i in range(settings.jobs)]
    return [Child(settings.device, core, settings.limit_s) for core in at]


def _drawn(settings: Settings) -> Iterator[Any]:
    """The drawn cases of this shard: of a count, each shard has its part, the first ones one more."""
    s = settings
    cases = generate(s.variants, s.seed, shard=s.shard, shards=s.shards, work=s.work)
    if not s.variants:
        return
    if s.count is None:
        yield from cases
    else:
        for _ in range(s.count // s.shards + (s.shard < s.count % s.shards)):
            yield next(cases)


class _Shared:
    """Cases that several threads take in turn, with a number."""

    def __init__(self, cases: Iterable[Any]) -> None:
        self.lock = threading.Lock()
        self.stopped = self.abandoned = False
        self._cases = enumerate(cases)

    def until(self, deadline: float | None, *, at_least: int) -> Iterator[tuple[int, Any]]:
        """The next case, again and again, until there is none or, after the first `at_least`, the time is up."""
        while True:
            with self.lock:
                taken = None if self.stopped else next(self._cases, None)
            if taken is None or (deadline is not None and taken[0] >= at_least and time.perf_counter() > deadline):
                return
            yield taken


def _on_threads(work: Callable[[Child], None], children: Sequence[Child], cases: _Shared) -> None:
    """Work with each child; the first error of one stops the others and is raised. An interruption ends all at once."""
    errors: list[BaseException] = []

    def guarded(child: Child) -> None:
        try:
            work(child)
        except BaseException as error:
            errors.append(error)
            cases.stopped = True

    threads = [threading.Thread(target=guarded, args=(child,), daemon=True) for child in children]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException:
        cases.stopped = cases.abandoned = True
        for child in children:
            child.abandon()
        raise
    if errors:
        raise errors[0]


def shrink(found: Finding, child: Child) -> Finding:
    """The simplest failing case that single steps lead to. It may fail in another way than the first one did."""
    tried = {found.case}
    best, left, progress = found, SHRINK_STEPS, True
    deadline = time.perf_counter() + SHRINK_SECONDS
    while progress and left:
        progress = False
        variant = variant_of(best.case)
        for case in oracle_of(variant).simpler(variant, best.case):
            if case in tried or not left or time.perf_counter() > deadline:
                continue
            tried.add(case)
            left -= 1
            again = child.run(case)
            if not again.ok:
                best, progress = again, True
                break
    return best


def merged(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Results of several shards as one: cases and failures add up, seconds are those of the longest.

    Raises:
        InputError: a part is not what `Outcome.as_dict` gives.
    """
    whole = Outcome()
    failures: list[dict[str, Any]] = []
    for part in parts:
        try:
            whole.cases += int(part["cases"])
            whole.ledger += int(part["ledger"])
            whole.seconds = max(whole.seconds, float(part["seconds"]))
            whole.left_out = sorted({*whole.left_out, *part["left_out"]})
            whole.devices += [device for device in part["devices"] if device not in whole.devices]
            for name, worst in part["worst"].items():
                worst = float("inf") if worst is None else float(worst)
                whole.worst[name] = max(whole.worst.get(name, 0.0), worst)
            failures += part["failures"]
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise InputError(f"a part is no result of `hfk fuzz --json` ({error!r})") from error
    return {**whole.as_dict(), "failures": failures}


def failures_of(result: dict[str, Any]) -> list[Failure]:
    """The failures of a result that was read back."""

    def finding(found: dict[str, Any]) -> Finding:
        error = float("inf") if found["error"] is None else found["error"]
        return Finding(case_from(found["case"]), error, found["limit"], found["fault"])

    return [Failure(finding(f["found"]), finding(f["shrunk"])) for f in result["failures"]]


def write_failures(failures: Sequence[Failure], folder: Path) -> list[Path]:
    """One JSON file a failure: the shrunk case, with what was seen as a note. Equal cases are one file."""
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[Path, None] = {}
    for failure in failures:
        case = failure.shrunk.case
        file = folder / f"{case.variant}-{zlib.crc32(case.to_json().encode()):08x}.json"
        note = {"_fault": failure.shrunk.describe()}
        file.write_text(json.dumps({**case.as_dict(), **note}, indent=2) + "\n", encoding="utf-8")
        files[file] = None
    return list(files)
