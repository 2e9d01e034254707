"""One run: each step in a process of its own, what became of it written before the next begins."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

from hipfire_kernels.bench.firstlight import process, steps
from hipfire_kernels.bench.firstlight.steps import ALIVE, Step
from hipfire_kernels.dispatch import runfolder
from hipfire_kernels.dispatch.runfolder import (
    ABSENT,
    CRASHED,
    FAILED,
    LOST,
    PASSED,
    SKIPPED,
    Folder,
    Result,
)
from hipfire_kernels.errors import InputError

OnStep = Callable[[Step, Result, bool], None]
"""Called with each step that has come to something, what that is, and whether it was so before this run."""

GOOD = (PASSED, ABSENT)


class Runner:
    """Goes through the steps of a folder.

    Args:
        on_begin: called before a step starts.
        on_step: called behind each.
        limit_s: seconds without a sign of life that are a hang; 0 for each step's own.
    """

    def __init__(self, folder: Folder, on_begin: Callable[[Step], None], on_step: OnStep, limit_s: float = 0.0) -> None:
        self._folder, self._on_begin, self._on_step, self._limit_s = folder, on_begin, on_step, limit_s
        self._asked = folder.asked()
        self.plan = steps.plan(self._asked)
        self._again: frozenset[str] = frozenset()

    def run(self, *, until: str = "", again: Sequence[str] = ()) -> str:
        """Run what has not come to something yet.

        Args:
            until: the last step to run; all where it is empty.
            again: steps to run anew, whatever became of them.

        Returns:
            Why it stopped before its end; empty where it did not.

        Raises:
            InputError: there is no such step.
        """
        names = [step.name for step in self.plan]
        for name in (*again, *([until] if until else ())):
            if name not in names:
                raise InputError(f"there is no step {name!r}; the steps of this run: {', '.join(names)}")
        self._again = frozenset(again)
        for name in again:
            self._folder.forget(name)
        for step in self.plan:
            if stopped := self._step(step):
                return stopped
            if step.name == until:
                break
        return ""

    def _step(self, step: Step) -> str:
        """One step, if it is to be run; why no other may be run behind it, or nothing."""
        known = self._known(step)
        if known is not None:
            self._on_step(step, known, True)
            return ""
        if said := self._kept_from(step):
            self._end(step, Result(step.name, SKIPPED, (said,), runfolder.now(), 0.0))
            return ""
        self._on_begin(step)
        result, gone = self._work(step)
        self._end(step, result)
        if result.state in GOOD or not step.risky:
            return ""
        return "" if gone and self._alive() else self._dead(step)

    def _kept_from(self, step: Step) -> str:
        """Why a step is not run; empty where it is."""
        wanting = [name for name in step.needs if not self._good(name)]
        if wanting:
            which = "which are not as they should be" if len(wanting) > 1 else "which is not as it should be"
            return f"needs {' and '.join(wanting)}, {which}"
        if step.name in self._again:
            return ""
        for other in self.plan if step.family else ():
            if self._folder.brought_down(other.name) == step.family:
                return f"a kernel of it has brought down step {other.name}; ask for it: --again {step.name}"
        return ""

    def _known(self, step: Step) -> Result | None:
        """What a step has come to before, or that it took the machine with it."""
        found = self._folder.result(step.name)
        if found is not None:
            return None if found.state == SKIPPED else found
        mark = self._folder.mark(step.name)
        if mark is None:
            return None
        took = "the machine was started anew" if mark.boot != runfolder.boot() else "the run was killed"
        said = [f"begun at {mark.began}, and never ended: {took} while it ran", *self._came_to(step)]
        said.append(f"it is not run again unless you ask for it: --again {step.name}")
        lost = Result(step.name, LOST, tuple(said), mark.began, 0.0)
        self._folder.keep(lost)
        self._folder.summarize(self.summary())
        return lost

    def _good(self, name: str) -> bool:
        found = self._folder.result(name)
        return found is not None and found.state in GOOD

    def _work(self, step: Step) -> tuple[Result, bool]:
        """Run a step in its process: what came of it, and whether the process is gone."""
        began, start = runfolder.now(), time.monotonic()
        self._folder.begin(step.name)
        ended = process.run(
            self._folder.path, step.name, self._limit_s or step.silent_s, lambda: self._folder.unmark(step.name)
        )
        kept = self._folder.result(step.name)
        if kept is not None:  # a process that hangs or crashes at its end has done its work
            return kept, ended.gone
        state = ended.state or CRASHED
        said = [f"{ended.why}; the last it said: {ended.last_words or 'nothing'}", *self._came_to(step)]
        if not ended.gone:
            said.append("its process cannot be ended: it sits in the driver")
        return Result(step.name, state, tuple(said), began, round(time.monotonic() - start, 2)), ended.gone

    def _came_to(self, step: Step) -> list[str]:
        """How far a step came that has no result."""
        notes = self._folder.notes(step.name)
        done = {note["variant"] for note in notes if "variant" in note}
        begun = [str(note["begins"]) for note in notes if "begins" in note and note["begins"] not in done]
        others = f"; finished before: {', '.join(sorted(done))}" if done else ""
        return [f"at work on {begun[-1]}{others}"] if begun else []

    def _end(self, step: Step, result: Result) -> None:
        self._folder.keep(result)
        self._folder.summarize(self.summary())
        self._on_step(step, result, False)

    def _alive(self) -> bool:
        """Whether the card still works. It is asked in a process too."""
        ended = process.run(self._folder.path, ALIVE.name, ALIVE.silent_s)
        return ended.state == "" and ended.code == 0

    def _dead(self, step: Step) -> str:
        return (
            f"behind {step.name} the card does no work any more. Restart the machine (or reload its driver), and run "
            f"the same command again: it goes on behind {step.name}"
        )

    # -- what it comes to --

    def results(self) -> list[tuple[Step, Result]]:
        """What there is, in order."""
        found = ((step, self._folder.result(step.name)) for step in self.plan)
        return [(step, result) for step, result in found if result is not None]

    def summary(self) -> dict[str, Any]:
        """All steps in short, with the digests of their files."""
        done = self.results()
        machine = next((r.facts for s, r in done if s.name == runfolder.MACHINE), {})
        return {
            "schema": runfolder.SCHEMA,
            "asked": dataclasses.asdict(self._asked),
            "device": machine.get("device", {}),
            "written": runfolder.now(),
            "evidence": self._folder.evidence_digest(),
            "complete": len(done) == len(self.plan),
            "good": all(result.state in GOOD for _, result in done),
            "steps": [
                {
                    "step": step.name,
                    "title": step.title,
                    "state": result.state,
                    "found": list(result.found),
                    "seconds": result.seconds,
                    "sha256": self._folder.digest(step.name),
                }
                for step, result in done
            ],
        }

    def opened(self) -> bool:
        """Whether there is a card at all."""
        found = self._folder.result(runfolder.MACHINE)
        return found is None or found.state != FAILED
