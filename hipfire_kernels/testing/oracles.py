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
from hipfire_kernels.errors import InputError
from hipfire_kernels.running.devices.protocol import Device
from hipfire_kernels.testing import axes, casefile, checking
from hipfire_kernels.testing.case import FuzzCase
from hipfire_kernels.testing.invariants import invariants_of
from hipfire_kernels.testing.subjects import VariantSubject

QUICK: dict[str, Any] = {"rows": (1, 5, 8, 17), "contexts": (1, 128, 255)}
"""The part of the grid for a quick look: groups full, ragged, beyond one sub-batch; one tile, its edge, two."""


GLANCE: dict[str, Any] = {"rows": (17,), "contexts": (1, 390)}
"""The part of the grid for one look: full groups, a ragged one, a second sub-batch; one key, and so many that a window
hides the whole first tile, that a split has several steps, and that the first rows see nothing of the last."""


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

    def glance(self, variant: Variant) -> Iterator[parity.Case]:
        """See `Oracle.glance`."""
        return parity.grid(variant, **GLANCE)

    def timing(self, variant: Variant, rows: int, ctx: int) -> parity.Case:
        """See `Oracle.timing`: the widest such case of the grid, most query heads on a KV head."""
        cases = parity.grid(variant, rows=(rows,), contexts=(ctx,))
        fitting = [case for case in cases if (case.rows, case.ctx) == (rows, ctx)]
        if not fitting:
            raise InputError(f"the grid of {variant.name} has no case of {rows} rows and {ctx} keys")
        return max(fitting, key=lambda case: case.n_heads)

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
