"""Hold builds of a kernel against each other: the parity and the time of one that is not the installed one.

A parity check brings arrays and arguments of the right shape for any family. What it launches is caught at the device
and run with another build in the place of the kernel: of another revision, or of a template as it was before an edit.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hipfire_kernels.authoring.family import Variant
from hipfire_kernels.building.builder import Artifact
from hipfire_kernels.checking.oracle import oracle_of
from hipfire_kernels.checking.result import Checked
from hipfire_kernels.running.binding import kernel
from hipfire_kernels.running.devices.protocol import Device, Launch
from hipfire_kernels.running.timing import Times, timer

Launches = tuple[Launch, ...]


@dataclass(frozen=True)
class Build:
    """A variant and the artifact to run for it. The artifact must take the arguments and the grid of the variant."""

    variant: Variant
    artifact: Artifact


def parity(one: Build, cases: Sequence[Any], device: Device) -> list[Checked]:
    """`oracle.check` on each case, with this build, under the memory check where `device` has one: a build of an older
    revision may know none.

    Raises:
        DeviceError: a launch failed.
    """
    on = device.checking()
    with _caught(one, on, lambda launches, plain: plain(launches)):
        return [oracle_of(one.variant).check(one.variant, case, on) for case in cases]


def times(sides: Mapping[str, Build], case: Any, device: Device, rounds: int = 15) -> dict[str, Times]:
    """Time the calls of builds on the same case in one interleaved run, each with what it launches beside it (an
    attention kernel's reducer).

    Raises:
        InputError: a variant does not take the case.
        DeviceError: a launch failed.
    """
    calls: dict[str, Callable[[], Any]] = {}
    measured: dict[str, Times] = {}

    def enter(left: Sequence[str]) -> None:
        # Each check is still under way while the next begins: its arrays must live until all are timed.
        if not left:
            measured.update(timer(device).interleaved(calls, rounds))
            raise _Timed

        def queue(launches: Launches, plain: Callable[[Launches], None]) -> None:
            calls[left[0]] = functools.partial(plain, launches)
            enter(left[1:])

        one = sides[left[0]]
        with _caught(one, device, queue):
            oracle_of(one.variant).check(one.variant, case, device)

    with contextlib.suppress(_Timed):
        enter(list(sides))
    return measured


def timing_case(variant: Variant, rows: int, ctx: int) -> Any:
    """The case of a variant that is timed: where it has query rows and keys, with so many.

    Raises:
        InputError: it has none.
    """
    return oracle_of(variant).timing(variant, rows, ctx)


class _Timed(Exception):
    """The times are taken; what the checks would do next is not wanted."""


@contextlib.contextmanager
def _caught(one: Build, device: Device, run: Callable[[Launches, Callable[[Launches], None]], None]) -> Iterator[None]:
    """Hand launches of the variant's kernel to `run`, with this build in its place, and a way to launch them."""
    before = device.__dict__.get("launch")
    plain = functools.partial(type(device).launch, device)  # also while another build's launches are caught
    installed, build = kernel(one.variant, device), device.load(one.artifact)

    def launch(launches: Sequence[Launch], stream: Any = None) -> None:
        if all(each.kernel != installed for each in launches):
            plain(launches, stream)
            return
        swap = (x._replace(kernel=build) if x.kernel == installed else x for x in launches)
        run(tuple(swap), functools.partial(plain, stream=stream))

    device.__dict__["launch"] = launch  # the instance's own name hides the method
    try:
        yield
    finally:
        del device.__dict__["launch"]
        if before is not None:
            device.__dict__["launch"] = before
