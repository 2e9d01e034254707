"""DLPack both ways, without copying: look at a producer's tensor, and hand out a device array as one.

Struct layouts are dlpack.h's: the unversioned `DLManagedTensor`, which is handed out and which every consumer takes,
and version 1's `DLManagedTensorVersioned`, which alone can say that memory is read-only.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hipfire_kernels.errors import InputError
from hipfire_kernels.running.devices.protocol import DTYPES, dtype_name

CPU, CUDA, CUDA_HOST, ROCM, ROCM_HOST, EXTENSION = 1, 2, 3, 10, 11, 12
_NAME, _VERSIONED = b"dltensor", b"dltensor_versioned"
_NEWEST = (1, 0)
_READ_ONLY, _COPIED = 1, 2
_CODES = {"i": 0, "u": 1, "f": 2}
_BFLOAT = 4
_DTYPES = {
    (_CODES[kind], 8 * size): np.dtype(f"{kind}{size}")
    for kind in "iuf"
    for size in (1, 2, 4, 8)
    if (kind, size) != ("f", 1)
} | {(_BFLOAT, 16): DTYPES["bf16"]}


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensor(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_DLManagedTensor))
_DLManagedTensor._fields_ = [("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", _Deleter)]


class _DLManagedTensorVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DLTensor),
    )


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_capsule_is = ctypes.pythonapi.PyCapsule_IsValid
_capsule_is.restype = ctypes.c_int
_capsule_is.argtypes = [ctypes.py_object, ctypes.c_char_p]


@dataclass(frozen=True)
class Peek:
    """What a DLPack tensor says of itself. Strides are in elements, None for C-contiguous."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: np.dtype[Any]
    writable: bool


def peek(name: str, array: Any, **how: Any) -> Peek:
    """Look at a producer's tensor without consuming it: what its capsule holds is freed when the capsule goes.

    Args:
        name: of the array, for errors.
        how: what `array.__dlpack__` is asked beside the newest version known here: a stream.

    Raises:
        InputError: it hands out nothing that can be read in place, or a dtype that numpy has not.
    """
    capsule = _capsule(name, array, how)
    if _capsule_is(capsule, _NAME):
        t, flags = _at(_DLManagedTensor, capsule, _NAME).tensor, 0
    elif _capsule_is(capsule, _VERSIONED):
        versioned = _at(_DLManagedTensorVersioned, capsule, _VERSIONED)
        if versioned.major != _NEWEST[0]:
            raise InputError(f"{name} is a DLPack tensor of version {versioned.major}; required: {_NEWEST[0]} or none")
        t, flags = versioned.tensor, versioned.flags
    else:
        raise InputError(f"{name} gives a {type(capsule).__name__} for DLPack; required: a capsule nobody has consumed")
    if flags & _COPIED:
        raise InputError(
            f"{name} hands out a copy by DLPack, which ends with it; pass an array that can be read in place"
        )
    dtype = _DTYPES.get((t.code, t.bits)) if t.lanes == 1 else None
    if dtype is None:
        raise InputError(
            f"{name} has DLPack dtype (code {t.code}, {t.bits} bits, {t.lanes} lanes), which no kernel takes; "
            f"required: one of {', '.join(DTYPES)}, as the argument asks"
        )
    return Peek(
        pointer=(t.data or 0) + t.byte_offset,
        shape=tuple(t.shape[i] for i in range(t.ndim)),
        strides=tuple(t.strides[i] for i in range(t.ndim)) if t.strides else None,
        dtype=dtype,
        writable=not flags & _READ_ONLY,
    )


def _capsule(name: str, array: Any, how: dict[str, Any]) -> Any:
    try:
        try:
            return array.__dlpack__(**how, max_version=_NEWEST)
        except TypeError:  # a producer from before version 1
            return array.__dlpack__(**how)
    except BufferError as error:
        raise InputError(f"{name} cannot be read in place: {error}") from error


def _at(kind: Any, capsule: Any, name: bytes) -> Any:
    return ctypes.cast(_capsule_pointer(capsule, name), ctypes.POINTER(kind)).contents


def as_numpy(found: Peek) -> npt.NDArray[Any]:
    """C-contiguous host memory as a numpy array. The producer must outlive it."""
    count = math.prod(found.shape)
    if not count:
        return np.empty(found.shape, found.dtype)
    raw = (ctypes.c_uint8 * (count * found.dtype.itemsize)).from_address(found.pointer)
    array = np.ctypeslib.as_array(raw).view(found.dtype).reshape(found.shape)
    array.flags.writeable = found.writable
    return array


_alive: dict[int, Any] = {}
"""Managed tensors handed out, and the arrays they keep alive, until their consumer calls the deleter."""


def _let_go(managed: Any) -> None:
    _alive.pop(ctypes.addressof(managed.contents), None)


_release = _Deleter(_let_go)


_is_named = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def _let_go_unused(capsule: int) -> None:
    """A capsule that nobody consumed still has its first name; a consumer renames it and calls the deleter itself."""
    if _is_named(capsule, _NAME):
        _alive.pop(_pointer_of(capsule, _NAME), None)


_drop_unused = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(_let_go_unused)


def export(owner: Any, pointer: int, shape: tuple[int, ...], dtype: np.dtype[Any], device: tuple[int, int]) -> Any:
    """A capsule over memory that `owner` keeps alive. What is bf16 here is that for the consumer."""
    extents = (ctypes.c_int64 * max(1, len(shape)))(*shape)
    strides = (ctypes.c_int64 * max(1, len(shape)))(*(math.prod(shape[i + 1 :]) for i in range(len(shape))))
    tensor = _DLTensor(
        data=pointer,
        device_type=device[0],
        device_id=device[1],
        ndim=len(shape),
        code=_BFLOAT if dtype_name(dtype) == "bf16" else _CODES[dtype.kind],
        bits=8 * dtype.itemsize,
        lanes=1,
        shape=ctypes.cast(extents, ctypes.POINTER(ctypes.c_int64)),
        strides=ctypes.cast(strides, ctypes.POINTER(ctypes.c_int64)),
        byte_offset=0,
    )
    managed = _DLManagedTensor(tensor=tensor, context=None, deleter=_release)
    address = ctypes.addressof(managed)
    _alive[address] = (managed, extents, strides, owner)
    return _new_capsule(address, _NAME, ctypes.cast(_drop_unused, ctypes.c_void_p))
