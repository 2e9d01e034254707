"""The steps of a first run, in order: what each is for, what it needs, how long it may be silent."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module, resources
from typing import Any

from hipfire_kernels.authoring.family import Variant
from hipfire_kernels.checking.matrix_probe import used_by
from hipfire_kernels.dispatch import runfolder
from hipfire_kernels.dispatch.runfolder import Asked, Folder
from hipfire_kernels.kernels import families
from hipfire_kernels.running.devices import device as open_device
from hipfire_kernels.running.devices.gpu import GpuDevice

SIMPLEST_FIRST = (
    "kv_cache_write_q8_0_batched",
    "attention_flash_reduce_batched",
    "attention_flash_q8_0_tile_batched",
    "attention_flash_q8_0_rows",
    "attention_dflash_f32",
    "attention_verify_gqa_q8",
    "attention_q8_0_flash_prefill_wmma",
    "attention_dflash_wmma_f32",
    "attention_dflash_wmma_m32_f32",
    "attention_dflash_wmma_n64_f32",
    "attention_verify_mma_q8",
)
"""Of the library's families. Others come behind them."""

REDUCE, TILE = SIMPLEST_FIRST[1:3]


@dataclass(frozen=True)
class Outcome:
    """What the work of a step came to: a state of `runfolder`, sentences, figures."""

    state: str
    found: list[str]
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """What the work of a step has at hand.

    Attributes:
        say: a sign of life, with what is done now.
    """

    step: Step
    asked: Asked
    folder: Folder
    say: Callable[[str], None]

    @functools.cached_property
    def device(self) -> GpuDevice:
        """The card."""
        found = open_device(self.asked.device)
        assert isinstance(found, GpuDevice)  # others are refused before a run
        return found

    def note(self, **entry: Any) -> None:
        """See `Folder.note`."""
        self.folder.note(self.step.name, entry)

    def begins(self, what: str, variant: Variant) -> None:
        """Note, and say, what is done next: should it not come back, its family is known."""
        self.note(begins=what, family=variant.family.name)
        self.say(what)

    def left_out(self, family: str) -> str:
        """Why a step of many families keeps from one; empty where it does not."""
        if used_by(families()[family]) and not self.passed(runfolder.MATRIX):
            return f"{family} is left out: the matrix unit is not as it should be"
        for step in plan(self.asked):
            if self.folder.brought_down(step.name) == family:
                return f"{family} is left out: a kernel of it has brought down step {step.name}"
        return ""

    def passed(self, step: str) -> bool:
        """Whether another step is as it should be."""
        found = self.folder.result(step)
        return found is not None and found.state == runfolder.PASSED


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        title: what it finds out.
        work: where its function is, as module:name below this package.
        needs: steps without which it tells nothing.
        silent_s: seconds without a sign of life that are a hang.
        risky: it makes the card work: behind one that went wrong the card is asked whether it still does.
        family: that it is about.
    """

    name: str
    title: str
    work: str
    needs: tuple[str, ...] = ()
    silent_s: float = 120.0
    risky: bool = True
    family: str = ""

    def run(self, job: Job) -> Outcome:
        """Do the work."""
        module, _, name = self.work.partition(":")
        work: Callable[[Job], Outcome] = getattr(import_module(f"hipfire_kernels.bench.firstlight.{module}"), name)
        return work(job)


ALIVE = Step("alive", "whether the card still works", "early:alive", silent_s=60.0)
"""Run behind a step that went wrong; leaves no result."""


def in_order(names: Sequence[str]) -> tuple[str, ...]:
    """Families, the simplest first."""
    known = [name for name in SIMPLEST_FIRST if name in names]
    return (*known, *(name for name in names if name not in known))


def variants(family: str, arch: str, *, few: bool) -> list[Variant]:
    """What is held of a family on an arch: all of it, or the last at head_dim 128."""
    fitting = [v for v in families()[family].variants() if v.fits(arch)]
    if not few or not fitting:
        return fitting
    return [v for v in fitting if dict(v.params).get("head_dim") == 128][-1:] or fitting[-1:]


def plan(asked: Asked) -> list[Step]:
    """All steps of a run."""
    found = [
        Step("machine", "versions, clocks, the card", "early:machine", risky=False),
        Step("memory", "allocation and copies", "early:memory", (runfolder.MACHINE,)),
        Step("kernel", "a trivial kernel", "early:kernel", (runfolder.MEMORY,)),
        Step("compilers", "the runtime compiler against the offline one", "early:compilers", (runfolder.MACHINE,),
             900.0, risky=False),
        Step("matrix", "the matrix unit: lane maps, subnormals, rounding", "early:matrix", (runfolder.KERNEL,)),
        Step("canaries", "nothing is written beside an array", "checks:canaries", (runfolder.KERNEL,), 300.0),
        Step("interpreter", "the card against the interpreter, bit for bit", "compared:interpreter",
             (runfolder.KERNEL,), 600.0),
    ]  # fmt: skip
    held = "a few cases of the grid of" if asked.few else "the full grid of"
    found += [_family_step(runfolder.quick(name), "quick parity of", name, asked) for name in asked.families]
    found += [
        _family_step(runfolder.grid(name), held, name, asked, (runfolder.quick(name),)) for name in asked.families
    ]
    established = tuple(runfolder.grid(name) for name in (TILE, REDUCE) if name in asked.families)
    timed = (runfolder.KERNEL, *established)
    found += [
        Step("qualify", "which fast routes are right and faster", "timed:qualify", timed, 600.0),
        Step("bench", "how long a verify call takes on each route", "timed:bench", timed, 600.0),
    ]
    return found


def _family_step(name: str, what: str, family: str, asked: Asked, needs: tuple[str, ...] = ()) -> Step:
    """A family needs the trivial kernel; the matrix unit where it uses it; the reducer where it leaves records."""
    given = families()[family]
    needed = [runfolder.KERNEL, *([runfolder.MATRIX] if used_by(given) else ())]
    if given.records and REDUCE in asked.families:
        needed.append(runfolder.quick(REDUCE))
    return Step(name, f"{what} {family}", "checks:parity", (*needed, *needs), 300.0, family=family)


def templates_digest() -> str:
    """Of all kernel sources as they lie: a run goes on with those that it began with."""
    folder = resources.files("hipfire_kernels.templates")
    files = sorted((f for f in folder.iterdir() if f.name.endswith((".h", ".j2"))), key=lambda f: f.name)
    whole = hashlib.sha256()
    for file in files:
        whole.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return whole.hexdigest()
