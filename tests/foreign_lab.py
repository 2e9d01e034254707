"""Another library's arrays: every form that DLPack and `__cuda_array_interface__` allow, and some that they do not.

The structs are written down here a second time, from dlpack.h; `test_foreign.py` has numpy read them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

FLOAT, BOOL = 2, 6
READ_ONLY, COPIED = 1, 2


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p), ("byte_offset", ctypes.c_uint64),
    )  # fmt: skip


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p), ("flags", ctypes.c_uint64), ("tensor", _Tensor),
    )  # fmt: skip


_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)


class Described:
    """A DLPack producer that says of its memory what it is told to say.

    Args:
        pointer: of the memory, less `byte_offset`.
        strides: in elements; None says nothing.
        version: None for the unversioned struct, else (major, minor).
        keep: what must live as long.
    """

    def __init__(
        self,
        pointer: int,
        shape: Sequence[int],
        *,
        device: tuple[int, int] = (1, 0),
        code: int = FLOAT,
        bits: int = 32,
        lanes: int = 1,
        strides: Sequence[int] | None = None,
        byte_offset: int = 0,
        version: tuple[int, int] | None = None,
        flags: int = 0,
        keep: Any = None,
    ) -> None:
        extents, steps = ((ctypes.c_int64 * len(x))(*x) if x is not None else None for x in (shape, strides))
        tensor = _Tensor(
            pointer, *device, len(shape), code, bits, lanes, ctypes.addressof(extents),
            ctypes.addressof(steps) if steps is not None else None, byte_offset,
        )  # fmt: skip
        self._name = b"dltensor" if version is None else b"dltensor_versioned"
        self._managed = _Managed(tensor) if version is None else _Versioned(*version, None, None, flags, tensor)
        self._device, self._keep = device, (extents, steps, keep)
        self.asked: list[dict[str, Any]] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def __dlpack__(self, **options: Any) -> Any:
        self.asked.append(options)
        return _new(ctypes.addressof(self._managed), self._name, None)


class Old(Described):
    """A producer from before version 1: it knows no argument but the stream."""

    def __dlpack__(self, stream: Any = None) -> Any:  # type: ignore[override]
        return super().__dlpack__(stream=stream)


class Refusing(Described):
    """A producer that cannot export."""

    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("it requires a gradient")


class Consumed(Described):
    """A producer whose capsule somebody has consumed."""

    def __dlpack__(self, **options: Any) -> Any:
        return _new(ctypes.addressof(self._managed), b"used_dltensor", None)


SHAPE = (4, 6)
"""Of the float32 array that the forms below describe; it begins 64 bytes into its memory."""

OFFSET = 64

GOOD: dict[str, dict[str, Any]] = {
    "no strides": {},
    "strides": {"strides": (6, 1)},
    "an offset": {"byte_offset": OFFSET},
    "an offset and strides": {"byte_offset": OFFSET, "strides": (6, 1)},
    "an extent of 1": {"shape": (4, 1, 6), "strides": (6, 999, 1)},
    "an extent of 1, in front": {"shape": (1, 4, 6), "strides": (-7, 6, 1)},
    "version 1": {"version": (1, 0), "strides": (6, 1)},
    "version 1 and later": {"version": (1, 9), "strides": (6, 1), "byte_offset": OFFSET},
    "read-only": {"version": (1, 0), "flags": READ_ONLY},
    "a version that flags are unknown of": {"version": (1, 3), "flags": 4},
    "from before version 1": {"kind": Old},
    "no element": {"shape": (0, 6), "strides": (5, 3), "pointer": 0},
}
"""What can be read in place: what is said, beside float32 [4, 6] at the memory's address."""

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "transposed": ({"strides": (1, 4)}, r"x has strides \(1, 4\) for shape \(4, 6\); required: C-contiguous"),
    "a part": ({"strides": (12, 1)}, r"x has strides \(12, 1\)"),
    "broadcast": ({"strides": (0, 1)}, r"x has strides \(0, 1\)"),
    "reversed": ({"strides": (6, -1)}, r"x has strides \(6, -1\)"),
    "four lanes": (
        {"lanes": 4},
        r"x has DLPack dtype \(code 2, 32 bits, 4 lanes\), which no kernel takes; requ",
    ),
    "an 8-bit float": ({"bits": 8}, r"x has DLPack dtype \(code 2, 8 bits, 1 lanes\)"),
    "a 24-bit integer": ({"code": 0, "bits": 24}, r"x has DLPack dtype \(code 0, 24 bits, 1 lanes\)"),
    "bool": ({"code": BOOL, "bits": 8}, r"x has DLPack dtype \(code 6, 8 bits, 1 lanes\)"),
    "version 2": ({"version": (2, 0)}, r"x is a DLPack tensor of version 2; required: 1 or none"),
    "a copy": ({"version": (1, 0), "flags": COPIED}, r"x hands out a copy by DLPack, which ends with it"),
    "refuses": ({"kind": Refusing}, r"x cannot be read in place: it requires a gradient"),
    "consumed": ({"kind": Consumed}, r"x gives a PyCapsule for DLPack; required: a capsule nobody has consumed"),
}
"""What cannot, and how that is said of an array named x."""


def described(start: int, said: dict[str, Any], **more: Any) -> Described:
    """One of the forms above. `start`: address of the array."""
    how = {"pointer": start, "shape": SHAPE, "kind": Described, **said, **more}
    if how["pointer"]:
        how["pointer"] -= how.get("byte_offset", 0)
    return how.pop("kind")(how.pop("pointer"), how.pop("shape"), **how)
