"""Parity of an edited kernel in a process of its own: one that crashes or hangs is a failure, not the end of all."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any

from hipfire_kernels import families
from hipfire_kernels.authoring.family import Variant
from hipfire_kernels.building import scratch
from hipfire_kernels.building.builder import Artifact
from hipfire_kernels.building.processes import cpu_limit, end_descendants, starting, unheard
from hipfire_kernels.checking.parity import Result
from hipfire_kernels.errors import DeviceError, HipfireError
from hipfire_kernels.inspecting import compare
from hipfire_kernels.running import binding
from hipfire_kernels.running import devices as runtime
from hipfire_kernels.running.preparing import prepare

LIMIT_S = 20.0
"""CPU seconds that a case may take. It takes a tenth of one."""

WALL_S = 200.0
"""Seconds of one that waits for something, or of a machine that has hardly any time for it."""

BUILD_S = 2400.0
"""Seconds for what is built before the first case. Compilers have limits of their own."""


class Checker:
    """A process that runs parity cases on a device; replaced when it was lost. One caller at a time.

    Args:
        on: the device's name.
    """

    def __init__(self, on: str = "host") -> None:
        self._on = on
        self._start()

    def _start(self) -> None:
        spawning = multiprocessing.get_context("spawn")  # a fork would have the threads of this process half
        self._pipe, theirs = spawning.Pipe()
        self._process = spawning.Process(target=_serve, args=(theirs, self._on), daemon=True)
        resource_tracker.ensure_running()  # which it would do below, and unblock signals
        with starting(), unheard():
            self._process.start()
        theirs.close()

    def run(self, variant: Variant, artifact: Artifact, cases: Sequence[Any]) -> list[Result]:
        """`parity.check` on each case, with this artifact.

        Raises:
            DeviceError: the kernel crashes or hangs, with the case; or a launch failed.
        """
        wanted = (variant.entry, artifact, cases, LIMIT_S)
        try:
            self._pipe.send(wanted)
        except OSError:  # it ended since
            self._replace()
            self._pipe.send(wanted)
        if isinstance(refused := self._answer(BUILD_S), str):
            raise DeviceError(refused)
        results = []
        for case in cases:
            found = self._answer(WALL_S)
            if isinstance(found, str):
                raise DeviceError(f"{found}: {case.describe()}")
            results.append(Result(variant, case, *found))
        return results

    def _answer(self, limit_s: float) -> Any:
        """Nothing when all is built, then error, limit and fault of each case; a text where something went wrong."""
        if not self._pipe.poll(limit_s):
            self._replace()
            return f"hangs, no answer within {limit_s:g} s"
        try:
            return self._pipe.recv()
        except EOFError:
            self._process.join()
            code = self._process.exitcode or 0
            self._replace()
            if code == -signal.SIGXCPU:
                return f"hangs, no answer within {LIMIT_S:g} s of CPU time"
            return f"crashes, {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"

    def _replace(self) -> None:
        assert self._process.pid is not None  # it was started
        # The number of one that has ended may be somebody else's by now.
        below = end_descendants(self._process.pid) if self._process.is_alive() else set()
        self._process.kill()
        self._process.join()
        scratch.discard({self._process.pid, *below})
        self._pipe.close()
        self._start()


def _serve(pipe: Connection, on: str) -> None:
    """Answer until the other end is closed."""
    device = runtime.device(on).checking()
    variants = {v.entry: v for family in families().values() for v in family.variants()}
    while True:
        try:
            entry, artifact, cases, limit_s = pipe.recv()
        except EOFError:
            return
        binding.kernel.cache_clear()  # what is launched beside the kernel may share what was edited
        one = compare.Build(variants[entry], artifact)
        try:
            prepare(one.variant, device)
            pipe.send(None)
            for case in cases:
                with cpu_limit(limit_s):
                    (result,) = compare.parity(one, [case], device)
                pipe.send((result.error, result.limit, result.fault))
        except HipfireError as error:
            pipe.send(str(error))
