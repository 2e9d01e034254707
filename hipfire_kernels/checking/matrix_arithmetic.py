"""What the matrix unit of a device does with numbers that no manual speaks of: subnormals, and how sums are rounded.

Facts, not faults: kernels must be right whatever they are. Each is asked with operands whose answers differ.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hipfire_kernels.checking import matrix_probe
from hipfire_kernels.running.devices.protocol import Device

Array = npt.NDArray[np.float64]

_ULP = 2.0**-23
"""Of a float32 that is 1 or a little more."""

KEPT, ZERO = "as it is", "as zero"


def arithmetic(device: Device) -> dict[str, str]:
    """What the device says, by what was asked, in words; a number where it is none of the words there are."""
    asked = [*_subnormal_questions(), *_rounding_questions()]
    a, b, c = (np.stack(matrices) for matrices in zip(*((q[1], q[2], q[3]) for q in asked), strict=True))
    maps = matrix_probe.lane_maps(device)
    answers = matrix_probe.multiply(device, maps, a, b, c)[:, 0]
    lane, element = (int(i[0]) for i in np.nonzero((maps["acc_row"][:, :8] == 0) & (maps["acc_col"][:, :8] == 0)))
    return {
        name: words.get(float(seen), f"{float(seen)!r}")
        for (name, _, _, _, words), seen in zip(asked, answers[:, lane, element], strict=True)
    }


Question = tuple[str, Array, Array, Array, dict[float, str]]
"""Its name, the matrices, of which row 0 and column 0 are used, and the words for each answer."""


def _question(name: str, a: list[float], b: list[float], c: float, words: dict[float, str]) -> Question:
    first, second, third = (np.zeros((16, 16)) for _ in range(3))
    first[0, : len(a)], second[: len(b), 0], third[0, 0] = a, b, c
    return name, first, second, third, words


def _subnormal_questions() -> list[Question]:
    low, tiny = 3 * 2.0**-24, 5 * 2.0**-149
    return [
        _question("subnormal f16 of A", [low], [1], 0, {low: KEPT, 0.0: ZERO}),
        _question("subnormal f16 of B", [1], [low], 0, {low: KEPT, 0.0: ZERO}),
        _question("subnormal f32 of C", [0], [0], tiny, {tiny: KEPT, 0.0: ZERO}),
    ]


def _rounding_questions() -> list[Question]:
    """Of 1, or 1 and a unit in the last place, and parts of such a unit."""
    tie, more = [2.0**-12], [1.5 * 2.0**-12]
    up = 1 + _ULP
    return [
        _question("1 and three quarters of a unit", more, tie, 1, {up: "to nearest", 1.0: "towards zero"}),
        _question("-1 and three quarters of a unit less", more, [-x for x in tie], -1,
                  {-up: "to nearest", -1.0: "towards zero"}),
        _question("1 and half a unit", tie, tie, 1, {1.0: "to even, or down", up: "away from zero"}),
        _question("1, a unit and half a unit", tie, tie, up, {1 + 2 * _ULP: "to even, or away", up: "down"}),
        _question("1 and sixteen quarters of a unit", [2.0**-13] * 16, tie * 16, 1,
                  {1 + 4 * _ULP: "all sixteen are added before 1 is", 1.0: "each sum is rounded",
                   1 + 2 * _ULP: "half of them are added before 1 is"}),
    ]  # fmt: skip
