"""What a saved template changed: source, builds and what they take, parity on the host, time on a device.

Templates are found changed by polling their times: two dozen files of one folder, which costs nothing, needs no
dependency and works on every file system. Declarations are Python, read once: editing those takes a new process.
"""

from __future__ import annotations

import difflib
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from . import binding, compare
from .builder import Artifact, build
from .errors import HipfireError
from .family import Variant
from .parity import Result, grid
from .resources import Change, diff
from .runtime import Device
from .runtime.host import HostDevice
from .timing import Times

CASES: dict[str, Any] = {"rows": (17,), "contexts": (1, 255)}
"""The part of the parity grid of one turn: full groups, a ragged one, a second sub-batch; one key, two tiles."""

POLL_S = 0.1

Key = tuple[Variant, str]
"""A variant and an arch."""


@dataclass
class Turn:
    """What one look at the templates found.

    Attributes:
        changed: variants whose source is another than at the last look.
        diff: the first of them against the last good version, as a unified diff of rendered source.
        failures: what was wrong, with the variant and the arch (`host` for parity).
        changes: resources that differ from the last good version's.
        results: of the parity cases.
        times: by variant, `before` (the last good version) and `after`, from one interleaved run.
        seconds: that all of it took.
    """

    changed: list[Variant] = field(default_factory=list)
    diff: str = ""
    failures: list[tuple[Variant, str, str]] = field(default_factory=list)
    changes: list[tuple[Variant, str, Change]] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    times: dict[Variant, dict[str, Times]] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        """Everything builds and every case is right."""
        return not self.failures


class Watch:
    """Looks at variants again and again, each time against the last version that was good.

    Args:
        variants: to look at; `outline.last` has few that stand for many.
        archs: to build for.
        timed: a device to time on; None for no timing.
    """

    def __init__(self, variants: Sequence[Variant], archs: Sequence[str], timed: Device | None = None) -> None:
        self.variants, self.archs, self.timed = tuple(variants), tuple(archs), timed
        self._seen: dict[Key, str] = {}
        self._good: dict[Key, Artifact] = {}

    def turn(self) -> Turn:
        """Render all, and do what there is to do for those that changed."""
        began, found = time.perf_counter(), Turn()
        binding.kernel.cache_clear()  # a parity check launches other kernels too, and they may share what was edited
        sources = self._render(found)
        found.changed = [
            v for v in self.variants if any(sources.get((v, a)) != self._seen.get((v, a)) for a in self._all)
        ]
        self._seen = sources
        found.diff = next(self._diffs(found.changed, sources), "")
        if found.good and found.changed:
            self._build_and_check(found)
        found.seconds = time.perf_counter() - began
        return found

    @property
    def _all(self) -> tuple[str, ...]:
        timed = () if self.timed is None else (self.timed.arch.name,)
        return tuple(dict.fromkeys([*self.archs, "host", *timed]))

    def _render(self, found: Turn) -> dict[Key, str]:
        sources: dict[Key, str] = {}
        for variant in self.variants:
            for arch in self._all:
                try:
                    sources[variant, arch] = variant.source(arch)
                except HipfireError as error:
                    found.failures.append((variant, arch, str(error)))
        return sources

    def _diffs(self, changed: Sequence[Variant], sources: dict[Key, str]) -> Iterator[str]:
        for variant, arch in ((v, a) for v in changed for a in self._all if (v, a) in self._good and (v, a) in sources):
            pair = (self._good[variant, arch].source.splitlines(), sources[variant, arch].splitlines())
            titles = (f"{variant.name} {arch}, last good", f"{variant.name} {arch}, now")
            if lines := list(difflib.unified_diff(*pair, *titles, lineterm="")):
                yield "\n".join(lines)

    def _build_and_check(self, found: Turn) -> None:
        from threadpoolctl import threadpool_limits

        built: dict[Key, Artifact] = {}
        with threadpool_limits(1), ThreadPoolExecutor(os.cpu_count()) as pool:
            sparse = max(1, len(found.changed) // 2)
            runs = {v: pool.submit(_check, v, sparse) for v in found.changed}
            builds = {(v, a): pool.submit(build, v, a) for v in found.changed for a in self.archs if a != "host"}
            for key, job in builds.items():
                self._collect(found, built, key, job)
            for variant, run in runs.items():
                self._collect_run(found, built, variant, run)
        if found.good and self.timed is not None:
            self._time(found, built, self.timed)
        if found.good:
            self._good |= built

    def _collect(self, found: Turn, built: dict[Key, Artifact], key: Key, job: Future[Artifact]) -> None:
        try:
            built[key] = job.result()
        except HipfireError as error:
            found.failures.append((*key, str(error)))
            return
        if key in self._good:
            changes = diff(self._good[key].resources, built[key].resources)
            found.changes += [(*key, change) for change in changes]

    def _collect_run(
        self, found: Turn, built: dict[Key, Artifact], variant: Variant, run: Future[tuple[Artifact, list[Result]]]
    ) -> None:
        try:
            built[variant, "host"], results = run.result()
        except HipfireError as error:
            found.failures.append((variant, "host", str(error)))
            return
        found.results += results
        found.failures += [(variant, "host", result.describe()) for result in results if not result.ok]

    def _time(self, found: Turn, built: dict[Key, Artifact], device: Device) -> None:
        on_host = isinstance(device, HostDevice)
        for variant in found.changed:
            key = (variant, device.arch.name)
            built[key] = build(variant, device.arch.name, device.toolchain)
            if key in self._good:
                sides = {"before": compare.Build(variant, self._good[key]), "after": compare.Build(variant, built[key])}
                case = compare.timing_case(variant, *((8, 256) if on_host else (16, 8192)))
                found.times[variant] = compare.times(sides, case, device, rounds=9 if on_host else 30)


def _check(variant: Variant, sparse: int) -> tuple[Artifact, list[Result]]:
    """Build for the host and run the cases; of many variants every `sparse`-th case each, for the sake of time."""
    artifact = build(variant, "host")
    cases = list(grid(variant, **CASES))[::sparse]
    return artifact, compare.parity(compare.Build(variant, artifact), cases, HostDevice())


Stamps = dict[str, tuple[int, int, int]]


def stamps() -> Stamps:
    """Time, size and identity of every template: another where one was saved."""
    found = {}
    for path in sorted(Path(str(resources.files("hipfire_kernels.templates"))).iterdir()):
        try:
            status = path.stat()
        except FileNotFoundError:  # an editor is replacing it
            continue
        if path.suffix in (".j2", ".h"):
            found[path.name] = (status.st_mtime_ns, status.st_size, status.st_ino)
    return found


def saves(known: Stamps) -> Iterator[list[str]]:
    """Wait for templates to be saved, for ever: yields the names of those that were, once they stay as they are.

    Args:
        known: the stamps from before they were first read, so that no save is missed meanwhile.
    """
    while True:
        now = stamps()
        if now == known:
            time.sleep(POLL_S)
            continue
        while now != (now := _later()):
            pass
        names = sorted(name for name in {*known, *now} if known.get(name) != now.get(name))
        known = now
        if names:
            yield names


def _later() -> Stamps:
    time.sleep(POLL_S / 2)
    return stamps()
