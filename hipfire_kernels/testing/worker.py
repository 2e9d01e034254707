"""The child process that runs cases: one JSON case a line on stdin, for each two lines of JSON on stdout.

The first says that its kernels are built and that it runs now; from there on the case has `LIMIT` seconds of this
process's CPU time. A kernel that crashes takes this process with it, and so does one that hangs; the parent knows which
case it was. `python -m hipfire_kernels.testing.worker DEVICE CORE LIMIT`: CORE pins the process, -1 does not.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from hipfire_kernels.building.processes import cpu_limit
from hipfire_kernels.checking.oracle import hold
from hipfire_kernels.errors import DeviceError, HipfireError, ToolchainUnavailable
from hipfire_kernels.running.devices.gpu import GpuDevice
from hipfire_kernels.running.preparing import prepare
from hipfire_kernels.testing.case import variant_of
from hipfire_kernels.testing.casefile import case_from


def answer(case: Any, on: Any, limit_s: float, running: Callable[[], None]) -> dict[str, Any]:
    """What a check gave, as the parent reads it.

    `broken`: the device may be unusable now, and with it the process. `refused`: nothing can be built here.

    Args:
        limit_s: CPU seconds that it may take; they end the process.
        running: called when all is built.
    """
    found: dict[str, Any] = {"error": None, "fault": "", "broken": False}
    try:
        variant = variant_of(case)
        prepare(variant, on.checking())
        running()
        with cpu_limit(limit_s):
            result = hold(variant, case, on)
    except ToolchainUnavailable as error:
        return {"refused": str(error)}
    except DeviceError as error:
        return {**found, "fault": f"{type(error).__name__}: {error}", "broken": not getattr(on, "survives", True)}
    except Exception as error:  # a legal case that is refused, or that a library trips over, is a fault like any other
        return {**found, "fault": f"raises {type(error).__name__}: {error}"}
    return {**found, "error": result.error, "limit": result.limit, "fault": result.fault}


def _about(on: Any) -> dict[str, Any]:
    """The device, and for a GPU which one, under which driver."""
    facts = on.describe() if isinstance(on, GpuDevice) else {}
    return {
        "device": on.name,
        "arch": on.arch.name,
        **{n: facts[n] for n in ("name", "driver", "driver_api") if n in facts},
    }


def main(device_name: str, core: int, limit_s: float) -> None:
    """Say of which arch the device is, or why there is none; then answer cases until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a kernel or a driver prints must not end up among the answers

    def say(what: dict[str, Any]) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    if core >= 0 and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})  # before the host device counts cores: it then runs blocks on this thread
    from threadpoolctl import threadpool_limits

    from hipfire_kernels.running.devices import device

    try:
        on = device(device_name)
    except HipfireError as error:
        return say({"refused": str(error)})
    say({"arch": on.arch.name, "device": _about(on)})
    with threadpool_limits(1):
        for line in sys.stdin:
            say(answer(case_from(json.loads(line)), on, limit_s, lambda: say({"running": True})))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
