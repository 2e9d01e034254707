"""From arrays to a launch: check them against the declaration, fill in the scalars, pack the kernel arguments.

`launch` does it all at once. A plan binds once and then only swaps pointers: `BoundLaunch.point`.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from hipfire_kernels.authoring.args import Scalar, Tensor
from hipfire_kernels.authoring.family import Variant
from hipfire_kernels.building.builder import build
from hipfire_kernels.errors import InputError
from hipfire_kernels.running.devices.protocol import Device, KernelArgs, Launch, View
from hipfire_kernels.running.scalars import CTYPES, check_scalar


@dataclass(frozen=True)
class BoundLaunch:
    """A checked launch. Holds no reference to the arrays: the caller keeps them alive.

    Attributes:
        slots: the argument values by name, for `point` and `set`.
        shapes: what each tensor had, and must have again, in `point`.
        symbols: every extent and scalar, for the grid.
        aligned: what the address of each tensor must be a multiple of.
        seen: the view each tensor was last pointed at.
    """

    variant: Variant
    args: KernelArgs
    slots: dict[str, Any]
    shapes: dict[str, tuple[str, tuple[int, ...]]]
    symbols: SimpleNamespace
    aligned: dict[str, int]
    seen: dict[str, View] = field(default_factory=dict)

    @property
    def grid(self) -> tuple[int, int, int]:
        """Blocks in x, y, z, from the symbols as they are now."""
        return self.variant.family.grid(self.variant, self.symbols)

    def point(self, name: str, view: View) -> None:
        """Use another array of the same dtype and shape for a tensor."""
        if view is self.seen.get(name):
            return
        if (view.dtype, view.shape) != self.shapes[name]:
            dtype, shape = self.shapes[name]
            raise InputError(f"{name} has dtype {view.dtype} and shape {view.shape}; planned for {dtype} {shape}")
        check_aligned(self.variant, name, view, self.aligned[name])
        self.slots[name].value = view.pointer
        self.seen[name] = view

    def set(self, name: str, value: Any) -> None:
        """Give another value to a scalar or an extent."""
        setattr(self.symbols, name, value)
        if name in self.slots:
            self.slots[name].value = value


def bind(variant: Variant, views: Mapping[str, View], **scalars: Any) -> BoundLaunch:
    """Check every argument of a launch against the variant's declaration.

    Args:
        views: one for each declared tensor.
        scalars: a number for each declared scalar and extent. One that shares its name with a shape symbol need not
            be given.

    Raises:
        InputError: an argument is missing, unknown, of another dtype, rank or shape, read-only but written, or a
            scalar does not fit its type.
    """
    symbols: dict[str, tuple[int, str]] = {}
    tensors = [arg for arg in variant.args if isinstance(arg, Tensor)]
    for arg in tensors:
        _check_tensor(arg, _given(variant, views, arg.name), symbols)
    sizes = {name: size for name, (size, _) in symbols.items()}
    known = sizes | _scalars(variant, {**views, **scalars}, sizes)
    reason = variant.family.refuse(variant, SimpleNamespace(**known))
    if reason is not None:
        raise InputError(f"{variant.name}: {reason}")
    slots = {
        arg.name: ctypes.c_void_p(views[arg.name].pointer)
        if isinstance(arg, Tensor)
        else CTYPES[arg.dtype](known[arg.name])
        for arg in variant.args
    }
    shapes = {arg.name: (arg.dtype, views[arg.name].shape) for arg in tensors}
    aligned = {arg.name: arg.align for arg in tensors}
    for name, align in aligned.items():
        check_aligned(variant, name, views[name], align)
    return BoundLaunch(variant, KernelArgs(list(slots.values())), slots, shapes, SimpleNamespace(**known), aligned)


def check_aligned(variant: Variant, name: str, view: View, align: int) -> None:
    """Refuse an address that the variant's wide loads cannot start from."""
    if view.pointer % align and math.prod(view.shape):
        raise InputError(
            f"{name} is at an address that is not a multiple of {align}, which {variant.name} needs; copy it to an "
            f"allocation of its own"
        )


def launch(variant: Variant, device: Device, *, stream: Any = None, **values: Any) -> None:
    """Check, build (or take from the cache), load and launch a variant. A grid with no block launches nothing.

    Args:
        values: an array of the device for each declared tensor, a number for each scalar and extent.

    Raises:
        InputError: see `bind`.
        ToolchainError: the variant cannot be built for the device's arch.
        DeviceError: the launch failed.
    """
    names = [arg.name for arg in variant.args if isinstance(arg, Tensor)]
    views = {name: device.view(name, _given(variant, values, name)) for name in names}
    bound = bind(variant, views, **{name: value for name, value in values.items() if name not in views})
    run(bound, device, stream)


def run(bound: BoundLaunch, device: Device, stream: Any = None) -> None:
    """Launch what is bound, on a device its arrays live on."""
    prepared = prepare(bound, device)
    if 0 not in prepared.grid:
        device.launch((prepared,), stream)


def prepare(bound: BoundLaunch, device: Device) -> Launch:
    """Everything a launch takes, with the grid as the symbols are now. Shares its arguments with `bound`."""
    v = bound.variant
    return Launch(kernel(v, device), bound.grid, v.threads(device.arch.name), bound.args, v.family.early(v))


@functools.lru_cache(maxsize=1024)
def kernel(variant: Variant, device: Device) -> Any:
    """The variant, built and loaded. Once a process: a template edited later is seen by `build`, not by this."""
    return device.load(build(variant, device.arch.name, device.toolchain))


def _given(variant: Variant, values: Mapping[str, Any], name: str) -> Any:
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


def _scalars(variant: Variant, values: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
    unknown = sorted(set(values) - set(_names(variant)))
    if unknown:
        raise InputError(f"{variant.name} takes no {', '.join(unknown)}; it takes {', '.join(_names(variant))}")
    scalars: dict[str, Any] = {}
    for arg in variant.args:
        if isinstance(arg, Scalar):
            derived = arg.name not in values and arg.name in sizes
            scalars[arg.name] = sizes[arg.name] if derived else _given(variant, values, arg.name)
            check_scalar(arg.name, arg.dtype, scalars[arg.name])
    return scalars | {name: int(_given(variant, values, name)) for name in variant.family.extents}
