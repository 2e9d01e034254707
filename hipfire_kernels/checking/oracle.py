"""What holds a family's variants against what they must compute: where cases come from, and what one of them shows."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from hipfire_kernels.authoring.family import KernelFamily, Variant
from hipfire_kernels.checking.declared import Declared
from hipfire_kernels.checking.result import Checked, Finding
from hipfire_kernels.errors import InputError, ParityError
from hipfire_kernels.running.devices import device as open_device
from hipfire_kernels.running.devices.protocol import Device

T = TypeVar("T")


class Source(Protocol):
    """What picks for `Oracle.draw`."""

    def pick(self, axis: str, values: Sequence[T], *, small: bool) -> T:
        """One of the values. `small`: leaning to the first ones."""

    def seed(self) -> int:
        """A number below 2**32."""


class Case(Protocol):
    """One input, said in names and numbers."""

    def describe(self) -> str:
        """In one line."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON; with `variant`, the entry point. `Oracle.read` takes it back."""


class Oracle(Protocol):
    """The check of a family. Cases are the oracle's own; everybody else passes them on."""

    def grid(self, variant: Variant, *, quick: bool) -> Iterator[Any]:
        """The fixed cases of `hfk parity`."""

    def glance(self, variant: Variant) -> Iterator[Any]:
        """The few cases of the grid's kind that are run at each save of a template."""

    def timing(self, variant: Variant, rows: int, ctx: int) -> Any:
        """A case of the grid's kind that is worth timing: where the variant has query rows and keys, with so many.

        Raises:
            InputError: it has no such case.
        """

    def check(self, variant: Variant, case: Any, device: Device) -> Checked:
        """Run a case of the grid."""

    def draw(self, variant: Variant, source: Source, work: int) -> Any:
        """A case that costs about `work` steps at most."""

    def hold(self, variant: Variant, case: Any, device: Device) -> Checked:
        """Run a drawn case, with the exact invariant that it names."""

    def simpler(self, variant: Variant, case: Any) -> Iterator[Any]:
        """Drawn cases one step simpler than this one."""

    def read(self, variant: Variant, fields: Mapping[str, Any]) -> Any:
        """A drawn case from what its `as_dict` gave.

        Raises:
            InputError: a field is unknown or has a value that no draw gives; with what is legal.
        """

    def invariants(self, variant: Variant) -> tuple[str, ...]:
        """Names of the exact invariants that hold for a variant."""


def oracle_of(variant: Variant) -> Oracle:
    """The oracle of a variant's family.

    Raises:
        InputError: its declaration names none.
    """
    return _of(variant.family)


@functools.lru_cache(maxsize=256)
def _of(family: KernelFamily) -> Oracle:
    if family.reference is not None:
        return Declared(family.reference)
    found = family.oracle
    if found is None:
        raise InputError(
            f"{family.name} declares nothing to hold it against; give the family reference=, a function of its "
            "arguments by name that returns what it writes in float64"
        )
    if not isinstance(found, str):
        oracle: Oracle = found
        return oracle
    module, _, name = found.partition(":")
    try:
        imported: Oracle = getattr(importlib.import_module(module), name)
    except AttributeError:
        raise InputError(f"{family.name}: module {module} has no {name}, which its oracle {found!r} names") from None
    return imported


def check(variant: Variant, case: Any, device: Device) -> Checked:
    """Run a case of a variant's grid, on the host under the memory check, and compare with its oracle.

    Raises:
        DeviceError: a launch failed, or was broken off, say by a deadlock.
        InputError: the case does not fit the variant.
    """
    return oracle_of(variant).check(variant, case, device.checking())


def hold(variant: Variant, case: Any, device: Device) -> Checked:
    """Run a drawn case with the invariant that it names, on the host under the memory check. Errors: see `check`."""
    return oracle_of(variant).hold(variant, case, device.checking())


def parity(variant: Variant, device: Device | str = "host", *, quick: bool = False) -> Finding:
    """Hold a variant against its oracle on its fixed cases, as `hfk parity` does.

    Returns:
        The case with the largest error in units of its limit.

    Raises:
        ParityError: a case failed; with the finding.
        InputError: its family declares nothing to hold it against.
        DeviceError: a launch failed.
    """
    on = open_device(device) if isinstance(device, str) else device
    worst: Finding | None = None
    for case in oracle_of(variant).grid(variant, quick=quick):
        checked = check(variant, case, on)
        found = Finding(case, checked.error, checked.limit, checked.fault)
        if not found.ok:
            raise ParityError(checked.describe(), found)
        if worst is None or found.share > worst.share:
            worst = found
    if worst is None:
        raise InputError(f"{variant.name} has no case")
    return worst
