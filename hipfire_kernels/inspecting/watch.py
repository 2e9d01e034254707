"""What a saved template changed: source, builds and what they take, parity on the host, time on a device.

Templates are found changed by polling their times: two dozen files of one folder, which costs nothing, needs no
dependency and works on every file system. Declarations are Python, read once: editing those takes a new process.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import queue
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

from hipfire_kernels.authoring import places
from hipfire_kernels.authoring.family import Variant
from hipfire_kernels.authoring.templates import LIBRARY
from hipfire_kernels.building.builder import Artifact, build
from hipfire_kernels.building.processes import pool
from hipfire_kernels.building.resources import Change, diff
from hipfire_kernels.checking.oracle import oracle_of
from hipfire_kernels.checking.parity import Result
from hipfire_kernels.errors import HipfireError
from hipfire_kernels.inspecting import compare, outline
from hipfire_kernels.inspecting.revision import Pinned
from hipfire_kernels.inspecting.watch_child import Checker
from hipfire_kernels.running import binding
from hipfire_kernels.running import devices as runtime
from hipfire_kernels.running.devices.host import HostDevice
from hipfire_kernels.running.devices.protocol import Device
from hipfire_kernels.running.timing import Times

POLL_S = 0.1

Key = tuple[Variant, str]
"""A variant and an arch."""


@dataclass
class Turn:
    """What one look at the templates found.

    Attributes:
        changed: variants whose source is not that of the last good version.
        checked: the few of them that stand for all, see `outline.few`. All that follows is of these.
        diff: the first against the last good version, as a unified diff of rendered source.
        failures: what was wrong, with the variant and the arch; of parity, that of the device.
        changes: resources that differ from the last good version's.
        results: of the parity cases.
        times: by variant, `before` (the last good version) and `after`, from one interleaved run.
        seconds: that all of it took.
    """

    changed: list[Variant] = field(default_factory=list)
    checked: list[Variant] = field(default_factory=list)
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
        sets: of variants. Which few of a set stand for all that changed is found anew each time: an edit may bring a
            branch that none of the last ones has.
        archs: to build for.
        timed: a device to time on; None for no timing.
        on: where parity is checked: `host`, or an `isa:` device.
    """

    def __init__(
        self, sets: Sequence[Sequence[Variant]], archs: Sequence[str], timed: Device | None = None, on: str = "host"
    ) -> None:
        self.sets, self.archs, self.timed = tuple(sets), tuple(archs), timed
        self._checked_for = runtime.arch_of(on)
        self._good: dict[Key, str] = {}
        self._checkers: queue.SimpleQueue[Checker] = queue.SimpleQueue()
        for _ in range(os.cpu_count() or 1):
            self._checkers.put(Checker(on))

    def turn(self) -> Turn:
        """Render all, and do what there is to do for those that changed."""
        began, found = time.perf_counter(), Turn()
        binding.kernel.cache_clear()  # what the timed device launches besides may share what was edited
        sources = self._render(found)
        found.changed = [
            v for v in self._variants if any(_text(sources, (v, a)) != _text(self._good, (v, a)) for a in self._all)
        ]
        found.checked = self._few(found.changed, sources)
        found.diff = next(self._diffs(found.checked, sources), "")
        if found.good:
            self._build_and_check(found)
        if found.good:
            self._good = sources
        found.seconds = time.perf_counter() - began
        return found

    @property
    def _variants(self) -> tuple[Variant, ...]:
        return tuple(dict.fromkeys(v for variants in self.sets for v in variants))

    @property
    def _all(self) -> tuple[str, ...]:
        timed = () if self.timed is None else (self.timed.arch.name,)
        return tuple(dict.fromkeys([*self.archs, self._checked_for, *timed]))

    def _render(self, found: Turn) -> dict[Key, str]:
        sources: dict[Key, str] = {}
        refused: dict[tuple[str, str], Variant] = {}  # an error of a template is one for all its variants
        for variant in self._variants:
            for arch in self._all:
                try:
                    sources[variant, arch] = variant.source(arch)
                except HipfireError as error:
                    refused.setdefault((arch, str(error)), variant)
        found.failures += [(variant, arch, message) for (arch, message), variant in refused.items()]
        return sources

    def _few(self, changed: Sequence[Variant], sources: dict[Key, str]) -> list[Variant]:
        left = set(changed)
        texts = [{v: [sources.get((v, a), "") for a in self._all] for v in each if v in left} for each in self.sets]
        return list(dict.fromkeys(v for each in texts for v in outline.few(each)))

    def _diffs(self, variants: Sequence[Variant], sources: dict[Key, str]) -> Iterator[str]:
        for variant, arch in ((v, a) for v in variants for a in self._all):
            old, new = _text(self._good, (variant, arch)), _text(sources, (variant, arch))
            if old is None or new is None or old == new:
                continue
            titles = (f"{variant.name} {arch}, last good", f"{variant.name} {arch}, now")
            yield "\n".join(difflib.unified_diff(old.splitlines(), new.splitlines(), *titles, lineterm=""))

    def _build_and_check(self, found: Turn) -> None:
        from threadpoolctl import threadpool_limits

        with threadpool_limits(1), pool() as threads:
            runs = {v: threads.submit(self._check, v) for v in found.checked}
            keys = [(v, a) for v in found.checked for a in self.archs if a != "host"]
            builds = {key: threads.submit(self._changes, key) for key in keys}
            wait(runs.values())
            wait(builds.values())
        for key, changes in builds.items():
            with _noted(found, *key):
                found.changes += [(*key, change) for change in changes.result()]
        for variant, run in runs.items():
            with _noted(found, variant, self._checked_for):
                results = run.result()
                found.results += results
                wrong = [result.describe() for result in results if not result.ok]
                found.failures += [(variant, self._checked_for, text) for text in wrong]
        if found.good and self.timed is not None:
            self._time(found, self.timed)

    def _check(self, variant: Variant) -> list[Result]:
        """Build for where parity is checked and run the cases."""
        artifact, checker = build(variant, self._checked_for), self._checkers.get()
        try:
            return checker.run(variant, artifact, list(oracle_of(variant).glance(variant)))
        finally:
            self._checkers.put(checker)

    def _changes(self, key: Key) -> tuple[Change, ...]:
        """Build, and hold what it takes against the last good version."""
        now = build(*key).resources
        return diff(self._before(key).resources, now) if key in self._good else ()

    def _before(self, key: Key, toolchain: str | None = None) -> Artifact:
        """The last good version: in the cache, unless another variant stood for this one."""
        variant, arch = key
        lds, threads = {arch: variant.lds_bytes(arch)}, {arch: variant.threads(arch)}
        return build(Pinned(variant.entry, {arch: self._good[key]}, threads, lds, launch=""), arch, toolchain)

    def _time(self, found: Turn, device: Device) -> None:
        on_host = isinstance(device, HostDevice)
        for variant in found.checked:
            key = (variant, device.arch.name)
            now = build(*key, device.toolchain)
            if key in self._good:
                before = self._before(key, device.toolchain)
                sides = {"before": compare.Build(variant, before), "after": compare.Build(variant, now)}
                case = compare.timing_case(variant, *((8, 256) if on_host else (16, 8192)))
                found.times[variant] = compare.times(sides, case, device, rounds=9 if on_host else 30)


def _text(sources: Mapping[Key, str], key: Key) -> str | None:
    """A source as it counts: one whose lines have moved is the same."""
    found = sources.get(key)
    return None if found is None else places.without(found)


@contextlib.contextmanager
def _noted(found: Turn, variant: Variant, arch: str) -> Iterator[None]:
    try:
        yield
    except HipfireError as error:
        found.failures.append((variant, arch, str(error)))


Stamps = dict[str, tuple[int, int, int]]


def folders(variants: Iterable[Variant]) -> tuple[Path, ...]:
    """Where the templates of variants lie, and the headers they may include."""
    own = (variant.template.folder for variant in variants)
    return tuple(dict.fromkeys([Path(str(resources.files(LIBRARY))), *(folder for folder in own if folder)]))


def stamps(watched: Sequence[Path]) -> Stamps:
    """Time, size and identity of every template of some folders: another where one was saved."""
    found = {}
    for path in sorted(path for folder in watched for path in folder.iterdir()):
        try:
            status = path.stat()
        except FileNotFoundError:  # an editor is replacing it
            continue
        if path.suffix in (".j2", ".h"):
            found[path.name] = (status.st_mtime_ns, status.st_size, status.st_ino)
    return found


def saves(watched: Sequence[Path], known: Stamps) -> Iterator[list[str]]:
    """Wait for templates to be saved, for ever: yields the names of those that were, once they stay as they are.

    Args:
        watched: the folders.
        known: the stamps from before they were first read, so that no save is missed meanwhile.
    """
    while True:
        now = stamps(watched)
        if now == known:
            time.sleep(POLL_S)
            continue
        while now != (now := _later(watched)):
            pass
        names = sorted(name for name in {*known, *now} if known.get(name) != now.get(name))
        known = now
        if names:
            yield names


def _later(watched: Sequence[Path]) -> Stamps:
    time.sleep(POLL_S / 2)
    return stamps(watched)
