"""DLPack both ways, without copying: look at a producer's tensor, and hand out a device array as one.

The struct layout is DLPack's unversioned `DLManagedTensor` (dlpack.h); every producer still speaks it.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hipfire_kernels.errors import InputError
from hipfire_kernels.running.devices.protocol import DTYPES, dtype_name

CPU, CUDA, CUDA_HOST, ROCM, ROCM_HOST = 1, 2, 3, 10, 11
_NAME = b"dltensor"
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

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


@dataclass(frozen=True)
class Peek:
    """What a DLPack tensor says of itself. Strides are in elements, None for C-contiguous."""

    pointer: int
    device_type: int
    device_id: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: np.dtype[Any] | None


def peek(capsule: Any) -> Peek:
    """Read a capsule without consuming it: its producer frees what it holds when the capsule goes."""
    address = _capsule_pointer(capsule, _NAME)
    t = ctypes.cast(address, ctypes.POINTER(_DLManagedTensor)).contents.tensor
    return Peek(
        pointer=(t.data or 0) + t.byte_offset,
        device_type=t.device_type,
        device_id=t.device_id,
        shape=tuple(t.shape[i] for i in range(t.ndim)),
        strides=tuple(t.strides[i] for i in range(t.ndim)) if t.strides else None,
        dtype=_DTYPES.get((t.code, t.bits)) if t.lanes == 1 else None,
    )


def as_numpy(name: str, found: Peek) -> npt.NDArray[Any]:
    """Host memory that a capsule describes, as a writable numpy array. The producer must outlive it."""
    if found.dtype is None:
        raise InputError(f"{name} has a DLPack dtype that no kernel takes; required: one of {', '.join(DTYPES)}")
    strides = found.strides or tuple(np.cumprod((1, *found.shape[:0:-1]))[::-1])
    spans = [(extent - 1) * stride for extent, stride in zip(found.shape, strides, strict=True) if extent]
    count = sum(spans) + 1 if 0 not in found.shape else 0
    raw = (ctypes.c_uint8 * (count * found.dtype.itemsize)).from_address(found.pointer or 1)
    flat = np.ctypeslib.as_array(raw).view(found.dtype) if count else np.empty(0, found.dtype)
    return np.lib.stride_tricks.as_strided(flat, found.shape, [s * found.dtype.itemsize for s in strides])


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
    code = _BFLOAT if dtype_name(dtype) == "bf16" else _CODES[dtype.kind]
    tensor = _DLTensor(
        data=pointer,
        device_type=device[0],
        device_id=device[1],
        ndim=len(shape),
        code=code,
        bits=8 * dtype.itemsize,
        lanes=1,
        shape=ctypes.cast(extents, ctypes.POINTER(ctypes.c_int64)),
        strides=None,
        byte_offset=0,
    )
    managed = _DLManagedTensor(tensor=tensor, context=None, deleter=_release)
    address = ctypes.addressof(managed)
    _alive[address] = (managed, extents, owner)
    return _new_capsule(address, _NAME, ctypes.cast(_drop_unused, ctypes.c_void_p))
