"""From arrays to a launch: check them against the declaration, fill in the scalars, pack the kernel arguments."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from .builder import build
from .runtime import Device, View
from .errors import InputError
from .family import Scalar, Tensor, Variant

_CTYPES: dict[str, Any] = {"f32": ctypes.c_float, "i32": ctypes.c_int}


class KernelArgs:
    """Kernel arguments in signature order, and the array of pointers to them that every launch API takes."""

    def __init__(self, values: list[Any]) -> None:
        self.values = values
        self.pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))


@dataclass(frozen=True)
class BoundLaunch:
    """A launch with nothing left to decide. Holds no reference to the arrays: the caller keeps them alive."""

    variant: Variant
    grid: tuple[int, int, int]
    block: int
    args: KernelArgs


def bind(variant: Variant, device: Device, **values: Any) -> BoundLaunch:
    """Check every argument of a launch against the variant's declaration.

    Args:
        values: an array for each declared tensor, a number for each declared scalar and extent. A scalar that shares
            its name with a shape symbol need not be given.

    Raises:
        InputError: an argument is missing, unknown, of another dtype, rank, shape or device, read-only but written,
            or a scalar does not fit its type.
    """
    symbols: dict[str, tuple[int, str]] = {}
    pointers: dict[str, int] = {}
    for arg in variant.args:
        if isinstance(arg, Tensor):
            view = device.view(arg.name, _given(variant, values, arg.name))
            _check_tensor(arg, view, symbols)
            pointers[arg.name] = view.pointer
    scalars = _scalars(variant, values, symbols)
    known = {name: size for name, (size, _) in symbols.items()} | scalars
    packed: list[Any] = [
        ctypes.c_void_p(pointers[arg.name]) if isinstance(arg, Tensor) else _CTYPES[arg.dtype](known[arg.name])
        for arg in variant.args
    ]
    grid = variant.family.grid(variant, SimpleNamespace(**known))
    return BoundLaunch(variant, grid, variant.family.block, KernelArgs(packed))


def launch(variant: Variant, device: Device, *, stream: Any = None, **values: Any) -> None:
    """Check, build (or take from the cache), load and launch a variant. A grid with no block launches nothing.

    Raises:
        InputError: see `bind`.
        ToolchainError: the variant cannot be built for the device's arch.
        DeviceError: the launch failed.
    """
    bound = bind(variant, device, **values)
    if 0 in bound.grid:
        return
    kernel = device.load(build(variant, device.arch.name))
    device.launch(kernel, bound.grid, bound.block, bound.args, stream)


def _given(variant: Variant, values: dict[str, Any], name: str) -> Any:
    if name not in values:
        raise InputError(f"{variant.name} needs {name}=; it takes {', '.join(_names(variant))}")
    return values[name]


def _names(variant: Variant) -> list[str]:
    return [arg.name for arg in variant.args] + list(variant.family.extents)


def _check_tensor(arg: Tensor, view: View, symbols: dict[str, tuple[int, str]]) -> None:
    wanted = "".join(f"[{extent}]" for extent in arg.shape)
    if view.dtype != arg.dtype:
        raise InputError(f"{arg.name} has dtype {view.dtype}; required: {arg.dtype} {wanted}")
    if len(view.shape) != len(arg.shape):
        raise InputError(f"{arg.name} has shape {view.shape}; required: {len(arg.shape)} dimensions {wanted}")
    for extent, size in zip(arg.shape, view.shape, strict=True):
        legal, owner = symbols.setdefault(extent, (size, arg.name)) if isinstance(extent, str) else (extent, "")
        if size != legal:
            because = f" with {extent} = {legal}, as in {owner}" if owner else ""
            raise InputError(f"{arg.name} has shape {view.shape}; required: {wanted}{because}")
    if arg.writes and not view.writable:
        raise InputError(f"{arg.name} is read-only; the kernel writes it")


def _scalars(variant: Variant, values: dict[str, Any], symbols: dict[str, tuple[int, str]]) -> dict[str, Any]:
    unknown = sorted(set(values) - set(_names(variant)))
    if unknown:
        raise InputError(f"{variant.name} takes no {', '.join(unknown)}; it takes {', '.join(_names(variant))}")
    scalars: dict[str, Any] = {}
    for arg in variant.args:
        if not isinstance(arg, Scalar):
            continue
        if arg.name not in values and arg.name in symbols:
            scalars[arg.name] = symbols[arg.name][0]
        else:
            scalars[arg.name] = _given(variant, values, arg.name)
        _check_scalar(arg, scalars[arg.name])
    return scalars | {name: int(_given(variant, values, name)) for name in variant.family.extents}


def _check_scalar(arg: Scalar, value: Any) -> None:
    if arg.dtype == "i32" and not -(2**31) <= int(value) < 2**31:
        raise InputError(f"{arg.name} is {value}; required: a 32-bit integer")
    if arg.dtype == "f32" and not math.isfinite(value):
        raise InputError(f"{arg.name} is {value}; required: a finite number")
