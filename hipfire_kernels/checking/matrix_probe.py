"""What the matrix vocabulary of a device really does: its lane maps, derived by running one-hot fragments.

The maps that templates use are claims, the operation is the fact. `probe` runs `templates/matrix_probe.hip.j2` on any
device and returns what disagrees: maps, products, reductions, conversions, loads, asynchronous copies.

It also asks what no manual says: whether subnormal f16 operands are read as they are (`keeps_subnormals`).

What cannot be seen: which k of the hardware an element has. A product is the same in any order of k that A and B share,
so the probe finds rows, columns and the agreement of A with B. The order on gfx12 is one such free choice.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from hipfire_kernels.authoring.args import Lds, Scalar, Tensor
from hipfire_kernels.authoring.family import KernelFamily, Tolerance
from hipfire_kernels.errors import DeviceError
from hipfire_kernels.running.binding import launch
from hipfire_kernels.running.devices.protocol import Device

Array = npt.NDArray[Any]

MAPS = (
    "a_row",
    "a_k",
    "b_k",
    "b_col",
    "acc_row",
    "acc_col",
    "acct_row",
    "acct_col",
    "slot_row",
    "slot_col",
    "pair_col",
)
"""The lane maps as a kernel sees them, each [lane][element]; what a lane does not have is -1."""

PROBE = KernelFamily(
    name="matrix_probe",
    doc="one case of the matrix operation",
    params={},
    entry=lambda v: "matrix_probe",
    args=lambda v: (
        Tensor("a", "i32", ("cases", 32, 8)),
        Tensor("b", "i32", ("cases", 32, 8)),
        Tensor("c", "f32", ("cases", 32, 8)),
        Tensor("source", "i32", (64, 32)),
        Tensor("floats", "f32", (128,)),
        Tensor("d", "f32", ("cases", 6, 32, 8), writes=True),
        Tensor("maps", "i32", (len(MAPS), 32, 16), writes=True),
        Tensor("loaded", "i32", (4, 32, 8), writes=True),
        Tensor("codes", "i32", (128,), writes=True),
        Tensor("terms", "i32", (2, 64), writes=True),
        Tensor("claims", "i32", (2,), writes=True),
        Scalar("cases", "i32"),
    ),
    grid=lambda v, s: (s.cases, 1, 1),
    lds=lambda v, arch: (Lds("tile", "Chunk", 64 * 8),),
    tolerance=Tolerance(0),
)

_ANY = "gfx1100"
"""An arch to render for: all have the same vocabulary."""

_TILE = np.arange(64 * 64).astype(np.float16).reshape(64, 64)
_FLOATS = (np.random.default_rng(3).standard_normal(128) * 10.0 ** np.linspace(-7, 4, 128)).astype(np.float32)
_SUBNORMALS = (np.arange(1, 257) * np.where(np.arange(256) % 2, 3, -1)).reshape(16, 16) * 2.0**-24
"""Up to 768 of the 1,024 steps below the smallest normal f16, of either sign."""


@functools.cache
def used_by(family: KernelFamily) -> bool:
    """Whether a family's kernels have the matrix vocabulary, which headers that they include may bring."""
    variant = next((v for v in family.variants() if v.fits(_ANY)), None)
    return variant is not None and "FragA" in variant.source(_ANY)


def lane_maps(device: Device) -> dict[str, Array]:
    """The lane maps by name, see `MAPS`."""
    nothing = np.zeros((1, 32, 8), np.int32)
    return dict(zip(MAPS, _launch(device, nothing, nothing, nothing)["maps"], strict=True))


def probe(device: Device) -> list[str]:
    """Run the probe: a sentence for each thing that is not as the lane maps say, none when all is."""
    maps = lane_maps(device)
    found = [*_accumulators(device, maps), *_operands(device, maps), *_products(device, maps), *_memory(device, maps)]
    return found or _subnormal_claims(device)  # which are asked by way of the maps


def keeps_subnormals(device: Device) -> tuple[bool, bool]:
    """Whether the operation reads subnormal f16 as they are, in A and in B; not so where they count as zero.

    Raises:
        DeviceError: it makes neither of them.
    """
    maps, numbers = lane_maps(device), _SUBNORMALS[None]
    one = np.eye(16)[None]
    row, column = maps["acc_row"][:, :8], maps["acc_col"][:, :8]
    kept = []
    for side, (a, b) in (("A", (numbers, one)), ("B", (one, numbers))):
        seen = _multiply(device, maps, a, b)[0, 0]
        wrong = np.count_nonzero(seen != numbers[0, row, column])
        if wrong and seen.any():
            raise DeviceError(
                f"{wrong} of 256 subnormal f16 of {side} times 1 are something else; required: all as they are, or all "
                "zeros. What kernels with f16 factors compute on this device is not known"
            )
        kept.append(bool(seen.any()))
    return kept[0], kept[1]


def _subnormal_claims(device: Device) -> list[str]:
    """Kernels of a dialect that relies on subnormal operands need them; one that does not is right either way."""
    nothing = np.zeros((1, 32, 8), np.int32)
    relies = bool(_launch(device, nothing, nothing, nothing)["claims"][0])
    sides = [side for side, kept in zip("AB", keeps_subnormals(device), strict=True) if relies and not kept]
    return [f"subnormal f16 of {side} count as zero, and READS_SUBNORMALS of this dialect is true" for side in sides]


def _launch(device: Device, a: Array, b: Array, c: Array) -> dict[str, Array]:
    """One launch: the words of a and b and the f32 of c, each [cases][32][8]; all that the kernel writes, by name."""
    source = np.ascontiguousarray(_TILE).view(np.int32)
    given = {"a": a, "b": b, "c": np.ascontiguousarray(c, np.float32), "source": source, "floats": _FLOATS}
    made = {}
    for arg in PROBE.variant().args:
        if isinstance(arg, Tensor) and arg.writes:
            shape = [len(a) if extent == "cases" else int(extent) for extent in arg.shape]
            made[arg.name] = device.empty(shape, np.int32 if arg.dtype == "i32" else np.float32)
    launch(PROBE.variant(), device, **{name: device.to_device(x) for name, x in given.items()}, **made)
    return {name: np.array(device.to_host(array)) for name, array in made.items()}


def _words(matrices: Array, row: Array, column: Array) -> Array:
    """Operand words [cases][32][8] of matrices [cases][16][16]: element i of lane l is [row[l, i], column[l, i]]."""
    halves = np.where(row >= 0, matrices[:, row, column], 0).astype(np.float16)
    return np.ascontiguousarray(halves).view(np.int32)


def _multiply(device: Device, maps: dict[str, Array], a: Array, b: Array, c: Array | None = None) -> Array:
    """[cases][6][32][8], what the kernel makes of matrices a, b, c [cases][16][16]; c is dealt out as an Acc."""
    dealt = np.zeros((len(a), 32, 8)) if c is None else c[:, maps["acc_row"][:, :8], maps["acc_col"][:, :8]]
    a_words, b_words = _words(a, maps["a_row"], maps["a_k"]), _words(b, maps["b_k"], maps["b_col"])
    return _launch(device, a_words, b_words, dealt)["d"]


multiply = _multiply
"""The same, for who asks other questions than `probe`: of the second axis, 0 is a b + c dealt out as an Acc."""


def _accumulators(device: Device, maps: dict[str, Array]) -> list[str]:
    """C maps: the product 16 row + column tells where each lane's elements lie."""
    a, b = np.zeros((1, 16, 16)), np.zeros((1, 16, 16))
    a[0, :, 0], a[0, :, 1] = 16 * np.arange(16), 1
    b[0, 0], b[0, 1] = 1, np.arange(16)
    found = []
    codes = _multiply(device, maps, a, b)[0].astype(int)
    for name, code in (("acc", codes[0]), ("acct", codes[1])):
        for axis, seen in (("row", code // 16), ("col", code % 16)):
            found += _differences(f"{name}_{axis}", seen, maps[f"{name}_{axis}"][:, :8])
    for slot, line in (("slot_row", "acc_row"), ("slot_col", "acct_col")):
        found += _differences(slot, maps[slot][:, :8], maps[line][:, :8])
    return found


def _operands(device: Device, maps: dict[str, Array]) -> list[str]:
    """A and B maps: one element of one operand is 1, the other operand's elements tell its row or column, and which of
    theirs it meets: what A and B call the same k."""
    found = []
    ones = np.eye(256).reshape(256, 16, 16)
    codes = np.tile(np.arange(1, 257.0).reshape(1, 16, 16), (256, 1, 1))  # B[k][n] is 16 k + n + 1
    for side in ("a", "b"):
        d = _multiply(device, maps, ones, codes) if side == "a" else _multiply(device, maps, codes.swapaxes(1, 2), ones)
        row, column = maps["acc_row"][:, :8], maps["acc_col"][:, :8]
        result = np.zeros((256, 16, 16))
        result[:, row, column] = d[:, 0]
        result = (
            result if side == "a" else result.swapaxes(1, 2)
        )  # then a line of `result` is the operand's row or column
        lines, ks = np.divmod(np.arange(256), 16) if side == "a" else np.divmod(np.arange(256), 16)[::-1]
        for case in range(256):
            seen = np.unique(np.nonzero(result[case])[0])
            k = (result[case, seen, 0] - 1) // 16
            if seen.tolist() != [lines[case]] or k.tolist() != [ks[case]]:
                found.append(f"{side}: the element of line {lines[case]}, k {ks[case]} acts on lines {seen}, k {k}")
    return found


def _products(device: Device, maps: dict[str, Array]) -> list[str]:
    """Products of small whole numbers, which are exact in any order, and what is made of them."""
    rng = np.random.default_rng(7)
    a, b, c = rng.integers(-8, 9, (3, 20, 16, 16)).astype(float)
    d = _multiply(device, maps, a, b, c)
    lane = {axis: maps[f"acc_{axis}"][:, :8] for axis in ("row", "col")}
    turned = {axis: maps[f"acct_{axis}"][:, :8] for axis in ("row", "col")}
    dealt = c[:, lane["row"], lane["col"]]
    c_turned = np.zeros_like(c)
    c_turned[:, turned["row"], turned["col"]] = dealt
    want, want_turned = a @ b + c, a @ b + c_turned
    expected = {
        "mma of an Acc": want[:, lane["row"], lane["col"]],
        "mma of an AccT": want_turned[:, turned["row"], turned["col"]],
        "a_of": dealt,
        "b_of": dealt,
        "row_max": want.max(axis=2)[:, lane["row"]],
        "col_sum": want_turned.sum(axis=1)[:, turned["col"]],
    }
    return [
        f"{name}: {np.count_nonzero(d[:, i] != wanted)} of {wanted.size} values differ"
        for i, (name, wanted) in enumerate(expected.items())
        if not np.array_equal(d[:, i], wanted)
    ]


def _memory(device: Device, maps: dict[str, Array]) -> list[str]:
    """Loads from a tile that asynchronous copies have filled, and the conversions."""
    nothing = np.zeros((1, 32, 8), np.int32)
    seen = _launch(device, nothing, nothing, nothing)
    tile = _TILE.copy()
    tile[63] = 0  # copied as not valid
    a, b = (maps["a_row"], maps["a_k"]), (maps["b_col"], maps["b_k"])
    pair = maps["pair_col"].T  # [fragment][column]: the same for every lane of a column
    columns = [np.array([pair[f, np.flatnonzero(np.arange(32) % 16 == n)[0]] for n in range(16)]) for f in range(2)]
    wanted = [tile[32 + a[0], 16 + a[1]], tile[16 + b[0], 32 + b[1]]]
    wanted += [tile[np.minimum(48 + b[1], 63), 32 + columns[f][b[0]]] for f in range(2)]
    held = [a[0], b[0], b[0], b[0]]
    found = []
    for name, words, want, have in zip(("a", "b", "b pair 0", "b pair 1"), seen["loaded"], wanted, held, strict=True):
        halves = np.ascontiguousarray(words).view(np.float16)
        found += _differences(f"load of {name}", np.where(have >= 0, halves, 0), np.where(have >= 0, want, 0))
    codes = seen["codes"].view(np.float16)
    found += _differences("codes_to_f16", codes, np.arange(256).astype(np.uint8).view(np.int8))
    hi, lo = (seen["terms"][i].view(np.float16) for i in range(2))
    relies, low = (int(claim) for claim in seen["claims"])
    high = np.where(relies | (abs(_FLOATS) >= 2.0**-14), _FLOATS, 0).astype(np.float16)
    found += _differences("split_f16 hi", hi, high)
    found += _differences("split_f16 lo", lo, ((_FLOATS - high.astype(np.float32)) * low).astype(np.float16))
    return found


def _differences(name: str, seen: Array, claimed: Array) -> list[str]:
    wrong = np.argwhere(seen != claimed)
    if not len(wrong):
        return []
    at = tuple(int(i) for i in wrong[0])
    return [f"{name}: {len(wrong)} differ, the first at {at}: {seen[at]} where {claimed[at]} is claimed"]
