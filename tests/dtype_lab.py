"""A kernel that takes an array and a number of every dtype."""

from __future__ import annotations

from typing import Any

import numpy as np

from hipfire_kernels.authoring.args import C_TYPES, Scalar, Tensor
from hipfire_kernels.authoring.family import KernelFamily, Tolerance

N = 64
_HALF = {
    "f16": "f32_to_f16(0.5f * f16_to_f32({x}))",
    "bf16": "f32_to_bf16(0.5f * bf16_to_f32({x}))",
}
"""Half of a number; by other types it is another one."""

DTYPES = KernelFamily(
    name="dtypes",
    doc="32 elements: of each array the first row copied, the number, half of the first row",
    params={},
    entry=lambda v: "dtypes",
    args=lambda v: (
        *(Tensor(f"x_{name}", name, (4, "n"), writes=True) for name in C_TYPES),
        *(Scalar(f"s_{name}", name) for name in sorted(C_TYPES)),  # 8 bytes beside 1 beside 2
        Scalar("n", "i32"),
    ),
    grid=lambda v, s: (s.n // 32, 1, 1),
    tolerance=Tolerance(0),
    body="{{ signature }} {\n    const int i = block_x() * 32 + thread();\n"
    + "".join(
        f"    x_{name}[n + i] = x_{name}[i];\n"
        f"    x_{name}[2 * n + i] = s_{name};\n"
        f"    x_{name}[3 * n + i] = {_HALF.get(name, f'({ctype})({{x}} / 2)').format(x=f'x_{name}[i]')};\n"
        for name, ctype in C_TYPES.items()
    )
    + "}\n",
)
"""Both tests here and those on the stand-in for ROCm launch it: a wrong offset of any argument moves all behind it."""

LOWEST: dict[str, Any] = {
    "f32": -3.4028234663852886e38,
    "f16": -65504.0,
    "bf16": -3.3895313892515355e38,
    "f64": -1.7976931348623157e308,
    "i8": -128,
    "u8": 0,
    "i16": -(2**15),
    "i32": -(2**31),
    "u32": 0,
    "i64": -(2**63),
}
HIGHEST: dict[str, Any] = {
    **{name: -number for name, number in LOWEST.items() if "f" in name},
    "i8": 127,
    "u8": 255,
    "i16": 2**15 - 1,
    "i32": 2**31 - 1,
    "u32": 2**32 - 1,
    "i64": 2**63 - 1,
}
SMALLEST: dict[str, Any] = {
    **dict.fromkeys(LOWEST, 1),
    "f32": 2.0**-149,
    "f16": 2.0**-24,
    "bf16": 2.0**-133,
    "f64": 2.0**-1074,
}
STORED = {"f32": "f4", "f16": "f2", "bf16": "u2", "f64": "f8", "i8": "i1", "u8": "u1", "i16": "i2", "i32": "i4"}
STORED |= {"u32": "u4", "i64": "i8"}
"""numpy's dtypes, written down once more: the library's table is what is tested."""


def bits_of(name: str, numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Numbers of a dtype as numpy has them: of bf16 the upper half of float32, where they are exact."""
    if name != "bf16":
        return numbers.astype(STORED[name])
    return (numbers.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def inputs(name: str) -> np.ndarray[Any, Any]:
    """[4, N]: the first row has numbers of the whole range, or floats whose half is one too; the rest is not read."""
    rng = np.random.default_rng(sorted(STORED).index(name))
    array = np.full((4, N), 77, STORED[name])
    if "f" in name:
        array[0] = bits_of(name, rng.integers(-120, 120, N) / 16)
    else:
        array[0] = rng.integers(LOWEST[name], HIGHEST[name], N, dtype=STORED[name], endpoint=True)
    return array


def wanted(name: str, given: np.ndarray[Any, Any], number: Any) -> np.ndarray[Any, Any]:
    """What the kernel leaves of `given`."""
    result = given.copy()
    result[1] = given[0]
    result[2] = bits_of(name, np.array([number], np.float64 if "f" in name else object))[0]
    if name == "bf16":
        result[3] = bits_of(name, (given[0].astype(np.uint32) << 16).view(np.float32) / 2)
    elif "f" in name:
        result[3] = given[0] / 2
    else:
        result[3] = [abs(x) // 2 * (1 if x > 0 else -1) for x in given[0].tolist()]
    return result
