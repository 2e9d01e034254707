"""The process of one step: signs of life as lines of JSON on stdout, what came of it in the run's folder.

`python -m hipfire_kernels.bench.firstlight.child FOLDER STEP`. A kernel that crashes takes this process with it, and so
does one that hangs; the parent knows which step it was, and what it said last.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path

from hipfire_kernels.bench.firstlight import steps
from hipfire_kernels.bench.firstlight.steps import ALIVE, Job, Outcome
from hipfire_kernels.building.processes import end_with_parent
from hipfire_kernels.dispatch import runfolder
from hipfire_kernels.dispatch.runfolder import FAILED, Folder, Result
from hipfire_kernels.errors import HipfireError


def work(job: Job) -> Outcome:
    """What the work comes to; an error is a finding like any other."""
    try:
        return job.step.run(job)
    except HipfireError as error:
        return Outcome(FAILED, [f"{type(error).__name__}: {error}"])
    except Exception as error:  # a stranger's machine has what nobody thought of
        return Outcome(FAILED, [f"raises {type(error).__name__}: {error}"], {"traceback": traceback.format_exc()})


def main(path: str, name: str) -> int:
    """Run a step, and keep what comes of it. 1 where it is not as it should be."""
    end_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a kernel or a driver prints must not end up among the answers

    def say(what: str) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    folder = Folder(Path(path))
    asked = folder.asked()
    step = next(one for one in (ALIVE, *steps.plan(asked)) if one.name == name)
    say("begins")
    began, start = runfolder.now(), time.monotonic()
    found = work(Job(step, asked, folder, say))
    if step is not ALIVE:
        seconds = round(time.monotonic() - start, 2)
        folder.keep(Result(name, found.state, tuple(found.found), began, seconds, found.facts))
    answers.flush()
    return int(found.state == FAILED)


if __name__ == "__main__":
    # Drivers that were left in a bad way have been seen to hang at the end of a process: what is to be said is said.
    code = main(sys.argv[1], sys.argv[2])
    sys.stderr.flush()
    os._exit(code)
