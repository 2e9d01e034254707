"""The oracles of the library's own families, by the names that their declarations give.

An attention call takes more than one launch, so that its check plans and merges; the cache write must also leave alone
what it does not write. Families that declare a reference need nothing of this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hipfire_kernels.authoring.family import Variant
from hipfire_kernels.checking import parity, parity_split
from hipfire_kernels.checking.oracle import Source
from hipfire_kernels.checking.result import Finding
from hipfire_kernels.running.devices.protocol import Device
from hipfire_kernels.testing import axes, casefile, checking
from hipfire_kernels.testing.case import FuzzCase
from hipfire_kernels.testing.invariants import invariants_of
from hipfire_kernels.testing.subjects import VariantSubject

QUICK: dict[str, Any] = {"rows": (1, 5, 8, 17), "contexts": (1, 128, 255)}
"""The part of the grid for a quick look: groups full, ragged, beyond one sub-batch; one tile, its edge, two."""


@dataclass(frozen=True)
class Library:
    """`checking.oracle.Oracle` of families whose cases are attention calls, or parts of one.

    Attributes:
        run: the check of a case of the grid.
    """

    run: Callable[[Variant, parity.Case, Device], parity.Result]

    def grid(self, variant: Variant, *, quick: bool) -> Iterator[parity.Case]:
        """See `Oracle.grid`."""
        return parity.grid(variant, **(QUICK if quick else {}))

    def check(self, variant: Variant, case: parity.Case, device: Device) -> parity.Result:
        """See `Oracle.check`."""
        return self.run(variant, case, device)

    def draw(self, variant: Variant, source: Source, work: int) -> FuzzCase:
        """See `Oracle.draw`."""
        return axes.draw(variant, source, work)

    def hold(self, variant: Variant, case: FuzzCase, device: Device) -> Finding:
        """See `Oracle.hold`."""
        return checking.check(case, VariantSubject(variant, device))

    def simpler(self, variant: Variant, case: FuzzCase) -> Iterator[FuzzCase]:
        """See `Oracle.simpler`."""
        return axes.simpler(case)

    def read(self, variant: Variant, fields: Mapping[str, Any]) -> FuzzCase:
        """See `Oracle.read`."""
        return casefile.fuzz_case(fields)

    def invariants(self, variant: Variant) -> tuple[str, ...]:
        """See `Oracle.invariants`."""
        return tuple(invariants_of(variant))


ATTEND = Library(parity.check_attend)
SPLIT = Library(parity_split.check_split)
MERGE = Library(parity.check_merge)
QUANTIZE = Library(parity.check_quantize)
DRAFT = Library(parity.check_draft)
