"""The A/B experiment of any family with a reference: one variant against another on one drawn case."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from hipfire_kernels.authoring.family import Variant
from hipfire_kernels.bench import pinned
from hipfire_kernels.bench.ab import Arm, Taken, first_of
from hipfire_kernels.bench.pairs import ANCHOR, OFF, ON
from hipfire_kernels.checking import declared
from hipfire_kernels.checking.oracle import oracle_of
from hipfire_kernels.errors import InputError
from hipfire_kernels.running.devices import device as open_device


class CaseArms:
    """One launch of a variant on a case that both take: normal contents, the largest extents or those given. The
    anchor is the `off` variant on the least extents: what a launch costs that has hardly anything to do.

    Args:
        off, on: of families with a reference.
        extents: of symbols that are not to have their largest value.
        rounds: timed calls of a sample, whose median is its value.

    Raises:
        InputError: the variants take different arguments, or an extent is not what the declaration allows.
    """

    mode = "case"
    variable = "kernel"
    unit = "us a call"

    def __init__(self, off: Variant, on: Variant, extents: Mapping[str, int], device: str, rounds: int) -> None:
        apart = [name for name, shape in _shapes(off).items() if _shapes(on).get(name) != shape]
        if apart or len(_shapes(off)) != len(_shapes(on)):
            raise InputError(
                f"{off.name} and {on.name} take different arguments ({', '.join(apart) or 'one has more'}); required: "
                "two that compute the same of the same arrays"
            )
        self.device, self.rounds = device, rounds
        self._arch = open_device(device).arch.name
        self._variants = {OFF: off, ON: on, ANCHOR: off}
        largest = declared.sized(off, extents)
        least = declared.sized(off, {name: declared.bounds(off, name)[0] for name in largest.extents})
        self._cases = {OFF: largest, ON: largest, ANCHOR: least}

    @contextlib.contextmanager
    def arms(self) -> Iterator[Mapping[str, Arm]]:
        """See `ab.Experiment.arms`."""
        shown = {OFF: self._variants[OFF].name, ON: self._variants[ON].name, ANCHOR: self._case(ANCHOR)}
        yield {name: Arm(shown[name], self._job(name)) for name in (OFF, ON, ANCHOR)}

    def _job(self, arm: str) -> dict[str, Any]:
        fields = self._cases[arm].as_dict()
        entry = self._variants[arm].entry
        fields.pop("variant")
        return {"mode": self.mode, "device": self.device, "entry": entry, "case": fields, "rounds": self.rounds}

    def _case(self, arm: str) -> str:
        return " ".join(f"{name}={n}" for name, n in self._cases[arm].extents.items())

    def pinned(self) -> dict[str, Any]:
        """See `ab.Experiment.pinned`."""
        sources = {v.entry: pinned.sha256(v.source(self._arch).encode()) for v in self._variants.values()}
        return {"case": self._case(OFF), "rounds": self.rounds, "sources": sources}

    def unequal(self, taken: Taken) -> str:
        """Every result is within its limit of the reference; those of an arm have the same bits, unless the family
        says that they need not."""
        arm, sample = taken[-1]
        variant = self._variants[arm]
        if sample["wrong"]:
            return f"{variant.name} ({arm}): {sample['wrong']}"
        first = first_of(taken, arm)
        if first is None or not variant.family.deterministic or first["output"] == sample["output"]:
            return ""
        return f"two runs of {variant.name} ({arm}) give different bits"

    def facts(self, taken: Taken) -> dict[str, Any]:
        """See `ab.Experiment.facts`."""
        found = {arm: sample for arm in (OFF, ON) if (sample := first_of(taken, arm)) is not None}
        return {
            "case": self._case(OFF),
            "worst_error": {arm: sample["worst"] for arm, sample in found.items()},
            "same_bits": len({sample["output"] for sample in found.values()}) == 1,
        }

    def per_row(self, arm: str) -> float:
        """See `ab.Experiment.per_row`."""
        return 1


def _shapes(variant: Variant) -> dict[str, Any]:
    return {name: (arg.dtype, arg.shape, arg.writes) for name, arg in declared.tensors(variant).items()}


def of_reference(name: str, known: Mapping[str, Variant]) -> Variant | None:
    """The variant of that entry point, where its family has a reference."""
    found = known.get(name)
    return found if found is not None and isinstance(oracle_of(found), declared.Declared) else None
