"""Arrays and numbers of every dtype, from numpy and DLPack to the kernel and back."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from dtype_lab import DTYPES, HIGHEST, LOWEST, SMALLEST, STORED, N, inputs, wanted

import hipfire_kernels as hk
from hipfire_kernels.authoring.args import C_TYPES, Arg, Scalar, Tensor
from hipfire_kernels.building.resources import read_args
from hipfire_kernels.errors import InputError
from hipfire_kernels.running.binding import bind
from hipfire_kernels.running.devices import dlpack, protocol
from hipfire_kernels.running.devices.host import HostDevice
from hipfire_kernels.running.devices.protocol import Device

Array = np.ndarray[Any, Any]
EACH = pytest.mark.parametrize("name", list(STORED))


def launched(numbers: Mapping[str, Any], **arrays: Any) -> dict[str, Array]:
    """Run the kernel on the host with a number of each dtype; what it leaves of its inputs, or of these instead."""
    given = {f"x_{name}": inputs(name) for name in STORED} | arrays
    hk.launch(DTYPES.variant(), HostDevice(), **given, **{f"s_{name}": number for name, number in numbers.items()})
    return given


@pytest.fixture(scope="module")
def results() -> dict[str, list[tuple[Any, Array]]]:
    """Of each dtype, the numbers that were passed and what came out."""
    runs = [(numbers, launched(numbers)) for numbers in (LOWEST, HIGHEST, SMALLEST)]
    return {name: [(numbers[name], out[f"x_{name}"]) for numbers, out in runs] for name in STORED}


def test_the_tables_name_the_same_dtypes() -> None:
    assert list(STORED) == list(C_TYPES) == list(protocol.DTYPES)
    assert {name: np.dtype(code) for name, code in STORED.items()} == protocol.DTYPES


@EACH
def test_arrays_and_numbers_at_their_ends(name: str, results: dict[str, list[tuple[Any, Array]]]) -> None:
    for number, out in results[name]:
        want = wanted(name, inputs(name), number)
        assert out.dtype == np.dtype(STORED[name])
        for row, what in enumerate(("given", "copied", "the number", "half")):
            assert out[row].tobytes() == want[row].tobytes(), (what, number, out[row], want[row])


def test_the_compiled_arguments_are_as_wide() -> None:
    compiled = read_args(hk.build(DTYPES.variant(), "gfx1100").code, "dtypes")
    offset = 0
    for declared, found in zip(DTYPES.variant().args, compiled, strict=True):
        size = 8 if isinstance(declared, Tensor) else np.dtype(STORED[declared.dtype]).itemsize
        offset = -(-offset // size) * size
        assert (found.offset, found.size) == (offset, size), declared.name
        offset += size


# ---- numbers --------------------------------------------------------------------------------------------------------

BEYOND: dict[str, tuple[Any, ...]] = {
    "f32": (3.4028235677973366e38, float("inf"), float("nan")),
    "f16": (65520.0, -65520.0, float("nan")),
    "bf16": (3.3961775292304957e38, float("-inf")),
    "f64": (float("inf"), float("nan")),
    "i8": (128, -129),
    "u8": (256, -1),
    "i16": (2**15, -(2**15) - 1),
    "i32": (2**31, -(2**31) - 1),
    "u32": (2**32, -1),
    "i64": (2**63, -(2**63) - 1),
}
"""The nearest numbers that a dtype has not."""


@EACH
def test_a_number_beyond_its_dtype_is_refused(name: str) -> None:
    for number in BEYOND[name]:
        with pytest.raises(
            InputError, match=rf"s_{name} is .*; required: .*(\d-bit integer|finite number of b?float\d\d)"
        ):
            launched({**SMALLEST, name: number})


ROUNDED = [
    (1 + 2.0**-8, 0x3F80),  # a tie, to even
    (1 + 3 * 2.0**-8, 0x3F82),
    (1 + 2.0**-8 + 2.0**-40, 0x3F81),  # above the tie by less than float32 has
    (1 + 3 * 2.0**-8 - 2.0**-40, 0x3F81),
    (-1 - 2.0**-8 - 2.0**-40, 0xBF81),
    (2.0**-134, 0x0000),  # half of the smallest
    (2.0**-134 + 2.0**-180, 0x0001),
    (-0.0, 0x8000),
    (1e39, 0x7F80),
    (float("inf"), 0x7F80),
    (float("nan"), 0x7FC0),
]


@pytest.mark.parametrize(("number", "bits"), ROUNDED)
def test_bf16_is_rounded_once(number: float, bits: int) -> None:
    assert int(hk.to_bf16(number)) == bits
    assert hk.to_bf16(np.full((2, 3), number)).tolist() == [[bits] * 3] * 2


def test_bf16_there_and_back() -> None:
    bits = np.arange(2**16, dtype=np.uint16).reshape(256, 256)
    numbers = hk.from_bf16(bits)
    assert numbers.dtype == np.float32
    assert np.array_equal(numbers.view(np.uint32), bits.astype(np.uint32) << 16)
    back, finite = hk.to_bf16(numbers), ~np.isnan(numbers)
    assert np.array_equal(back[finite], bits[finite])
    assert np.isnan(hk.from_bf16(back[~finite])).all()
    low = np.array([0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0xFF80FFFF], np.uint32).view(np.float32)  # payloads lost
    assert hk.to_bf16(low).tolist() == [0x7FC0, 0x7FC0, 0xFFC0, 0xFFC0]


def test_a_bound_number_is_packed_anew() -> None:
    views = {f"x_{name}": HostDevice().view(name, inputs(name)) for name in STORED}
    bound = bind(DTYPES.variant(), views, **{f"s_{name}": LOWEST[name] for name in STORED})
    for name in STORED:
        bound.set(f"s_{name}", HIGHEST[name])
        slot = bound.slots[f"s_{name}"]
        assert slot.value == HIGHEST[name]
        assert (
            ctypes.string_at(ctypes.addressof(slot), ctypes.sizeof(slot))
            == wanted(name, inputs(name), HIGHEST[name])[2, :1].tobytes()
        )


# ---- arrays ---------------------------------------------------------------------------------------------------------


class Producer:
    """Somebody's array on the CPU: numpy's own DLPack, or with another dtype written into its tensor."""

    def __init__(self, array: Array, code: int | None = None) -> None:
        self._array, self._code = array, code

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __dlpack__(self, **how: Any) -> Any:
        capsule = self._array.__dlpack__()
        if self._code is not None:
            managed = ctypes.cast(
                dlpack._capsule_pointer(capsule, b"dltensor"), ctypes.POINTER(dlpack._DLManagedTensor)
            )
            managed.contents.tensor.code = self._code
        return capsule


BFLOAT = 4  # kDLBfloat of dlpack.h


@EACH
def test_arrays_by_dlpack(name: str, host: Device) -> None:
    array = inputs(name)
    producer = Producer(array, BFLOAT if name == "bf16" else None)
    assert host.view("x", producer).dtype == name
    launched(SMALLEST, **{f"x_{name}": producer})
    assert array.tobytes() == wanted(name, inputs(name), SMALLEST[name]).tobytes()
    assert host.to_host(Producer(array)).tobytes() == array.tobytes()


@pytest.mark.parametrize(
    ("code", "kind"), [(5, np.float64), (6, np.uint8), (4, np.uint8), (4, np.uint32), (2, np.uint8)]
)
def test_dlpack_dtypes_that_no_kernel_takes(code: int, kind: Any, host: Device) -> None:
    """Complex, bool, a bfloat of 8 and of 32 bits, a float of 8."""
    with pytest.raises(
        InputError, match=r"x has DLPack dtype .*, which no kernel takes; required: one of f32, f16, bf16"
    ):
        host.view("x", Producer(np.zeros(4, kind), code))


@EACH
def test_what_is_handed_out_by_dlpack(name: str) -> None:
    array = inputs(name)
    capsule = dlpack.export(array, array.ctypes.data, array.shape, array.dtype, (1, 0))
    tensor = ctypes.cast(
        dlpack._capsule_pointer(capsule, b"dltensor"), ctypes.POINTER(dlpack._DLManagedTensor)
    ).contents.tensor
    code = BFLOAT if name == "bf16" else {"i": 0, "u": 1, "f": 2}[array.dtype.kind]
    assert (tensor.code, tensor.bits, tensor.lanes) == (code, 8 * array.itemsize, 1)


def test_a_bfloat16_of_numpys(host: Device) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = inputs("bf16").view(ml_dtypes.bfloat16)
    launched(SMALLEST, x_bf16=array)
    assert array.tobytes() == wanted("bf16", inputs("bf16"), SMALLEST["bf16"]).tobytes()
    assert np.array_equal(hk.from_bf16(array), array.astype(np.float32))


class Registered:
    """What numpy says of a dtype that somebody registered."""

    name = "bfloat16"


def test_a_registered_bfloat16_goes_by_its_name() -> None:
    assert protocol.dtype_name(Registered()) == "bf16"  # type: ignore[arg-type]
    assert protocol.dtype_name(np.dtype(np.longlong)) == "i64"
    assert protocol.dtype_name(np.dtype(">f4")) == ">f4"
    assert protocol.dtype_name(np.dtype(np.uint64)) == "uint64"


@EACH
def test_an_address_within_an_element_is_refused(name: str, host: Device) -> None:
    dtype = np.dtype(STORED[name])
    if dtype.itemsize == 1:
        return
    raw = np.zeros(4 * dtype.itemsize + 1, np.uint8)
    at = raw[1 - raw.ctypes.data % 2 :][: 2 * dtype.itemsize].view(dtype)
    assert at.ctypes.data % 2
    with pytest.raises(
        InputError, match=f"x is at an address that is not a multiple of {dtype.itemsize}, which {name}"
    ):
        host.view("x", at)
    assert host.view("x", at[:0]).shape == (0,)


@EACH
def test_another_dtype_is_refused_by_name(name: str) -> None:
    other = "f64" if name == "f32" else "f32"
    with pytest.raises(InputError, match=f"x_{name} has dtype {other}; required: {name}"):
        launched(SMALLEST, **{f"x_{name}": np.zeros((4, N), STORED[other])})


# ---- what a declaration asks for beyond an element ------------------------------------------------------------------


def family(*args: Arg) -> hk.KernelFamily:
    return hk.KernelFamily(
        name="aligned",
        doc="nothing",
        params={},
        entry=lambda v: "aligned",
        args=lambda v: args,
        grid=lambda v, s: (1, 1, 1),
        tolerance=hk.Tolerance(0),
        body="{{ signature }} {}",
    )


@pytest.mark.parametrize("align", [0, 3, -4, 2.0, "16"])
def test_an_alignment_that_is_none(align: Any) -> None:
    with pytest.raises(InputError, match=f"aligned: x has align={align!r}; required: a power of two"):
        family(Tensor("x", "u8", ("n",), writes=True, align=align))


@pytest.mark.parametrize("align", [2, 4, 8, 16, 64])
def test_a_declared_alignment(align: int, host: Device) -> None:
    variant = family(Tensor("x", "u8", ("n",), writes=True, align=align)).variant()
    raw = np.zeros(256, np.uint8)
    first = -raw.ctypes.data % 128
    bind(variant, {"x": host.view("x", raw[first + align :][:9])})
    with pytest.raises(InputError, match=f"x is at an address that is not a multiple of {align}, which aligned needs"):
        bind(variant, {"x": host.view("x", raw[first + align // 2 :][:9])})


def test_what_the_declarations_here_ask_for() -> None:
    """A Q8_0 cache is read two bytes at a time, f16 eight elements at once."""
    asked = {
        (arg.dtype, arg.align)
        for one in hk.families().values()
        for variant in one.variants()
        for arg in variant.args
        if isinstance(arg, Tensor) and arg.dtype in ("u8", "f16")
    }
    assert asked == {("u8", 2), ("f16", 16)}


def test_scalars_of_a_name_that_no_dtype_has() -> None:
    for wrong in ("float", "u16", "u64", "F32"):
        with pytest.raises(
            InputError, match=f"s has dtype '{wrong}'; required: one of f32, f16, bf16, f64, i8, u8, i16"
        ):
            family(Tensor("x", "u8", ("n",), writes=True), Scalar("s", wrong))
