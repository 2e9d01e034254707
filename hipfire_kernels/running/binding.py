"""From arrays to a launch: check them against the declaration, fill in the scalars, pack the kernel arguments.

`launch` does it all at once. A plan binds once and then only swaps pointers: `SharedArrays`.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

from hipfire_kernels.authoring.args import Scalar, Tensor
from hipfire_kernels.authoring.declaration import as_grid
from hipfire_kernels.authoring.family import Variant
from hipfire_kernels.building.builder import build
from hipfire_kernels.errors import InputError
from hipfire_kernels.running import devices
from hipfire_kernels.running.arguments import real, whole
from hipfire_kernels.running.devices.protocol import DTYPES, Argument, Device, KernelArgs, Launch, View
from hipfire_kernels.running.scalars import CTYPES, INTEGERS, in_words

MOST_BLOCKS = (2**31 - 1, 65_535, 65_535)
"""Blocks of a launch in x, y and z at most, by CUDA's and HIP's drivers. The host holds itself to the same."""

MOST_AMD_THREADS = 2**32 - 1
"""Threads of a launch in x at most on AMD, whose dispatch packet counts them in 32 bits."""


@dataclass(frozen=True)
class BoundLaunch:
    """A checked launch. Holds no reference to the arrays: the caller keeps them alive.

    Attributes:
        slots: the argument values by name, for `SharedArrays` and `set`.
        symbols: every extent and scalar, for the grid.
    """

    variant: Variant
    args: KernelArgs
    slots: dict[str, Any]
    symbols: SimpleNamespace

    def set(self, name: str, value: float) -> None:
        """Give another value to a scalar or an extent: one that has been through `arguments`."""
        setattr(self.symbols, name, value)
        if name in self.slots:
            self.slots[name].value = value


def bind(variant: Variant, views: Mapping[str, View], **scalars: Any) -> BoundLaunch:
    """Check every argument of a launch against the variant's declaration.

    Args:
        views: one for each declared tensor.
        scalars: a number for each declared scalar and extent. One that shares its name with a shape symbol need not
            be given, and may not differ from it.

    Raises:
        InputError: an argument is missing, unknown, of another dtype, rank or shape, read-only but written, or a
            scalar does not fit its type or the arrays.
    """
    symbols: dict[str, tuple[int, str]] = {}
    tensors = [arg for arg in variant.args if isinstance(arg, Tensor)]
    for arg in tensors:
        _check_tensor(arg, _given(variant, views, arg.name), symbols)
    known = {name: size for name, (size, _) in symbols.items()} | _numbers(variant, {**views, **scalars}, symbols)
    reason = variant.family.refuse(variant, SimpleNamespace(**known))
    if reason is not None:
        raise InputError(f"{variant.name}: {reason}")
    slots = {
        arg.name: ctypes.c_void_p(views[arg.name].pointer)
        if isinstance(arg, Tensor)
        else CTYPES[arg.dtype](known[arg.name])
        for arg in variant.args
    }
    for arg in tensors:
        check_aligned(variant.name, arg.name, views[arg.name], arg.align)
    args = KernelArgs(list(slots.values()), _arrays(variant, views))
    return BoundLaunch(variant, args, slots, SimpleNamespace(**known))


def _arrays(variant: Variant, views: Mapping[str, View]) -> tuple[Argument, ...]:
    """What a device is told of the arrays."""
    return tuple(
        Argument(slot, x.name, x.dtype, views[x.name].shape, x.writes, max(x.align, DTYPES[x.dtype].itemsize))
        for slot, x in enumerate(variant.args)
        if isinstance(x, Tensor)
    )


def check_aligned(needed_by: str, name: str, view: View, align: int) -> None:
    """Refuse an address that a variant's wide loads cannot start from."""
    if view.pointer % align and view.nbytes:
        raise InputError(
            f"{name} is at an address that is not a multiple of {align}, which {needed_by} needs; copy it to an "
            f"allocation of its own"
        )


class Rivals(NamedTuple):
    """A tensor that is written, and the others that must not share memory with it.

    Attributes:
        written: its name; `nbytes`: what it takes.
        others: name, bytes, and whether it may be the very same memory (`Tensor.over`).
    """

    written: str
    nbytes: int
    others: tuple[tuple[str, int, bool], ...]


def rivals(variants: Iterable[Variant | None], nbytes: Mapping[str, int]) -> tuple[Rivals, ...]:
    """What must lie apart in a call that launches these variants, of the tensors whose bytes are given."""
    every = (arg for v in variants if v for arg in v.args if isinstance(arg, Tensor))
    tensors = {arg.name: arg for arg in every if nbytes.get(arg.name)}
    found = []
    for arg in tensors.values():
        others = (b for b in tensors.values() if b is not arg and not (b.writes and b.name < arg.name))
        if arg.writes:
            beside = tuple((b.name, nbytes[b.name], b.name in arg.over) for b in others)
            found.append(Rivals(arg.name, nbytes[arg.name], beside))
    return tuple(found)


def check_apart(groups: Iterable[Rivals], views: Mapping[str, View]) -> None:
    """Refuse arrays that overlap where one of them is written: another block may read what is there no more."""
    for written, nbytes, others in groups:
        first = views[written].pointer
        end = first + nbytes
        for name, other_bytes, may_coincide in others:
            other = views[name].pointer
            if first < other + other_bytes and other < end:
                if may_coincide and first == other and nbytes == other_bytes:
                    continue
                shared = min(end, other + other_bytes) - max(first, other)
                but = f", or exactly the array {name}" if may_coincide else ""
                raise InputError(
                    f"{written} shares {shared:,} bytes with {name}, and is written; required: memory of its own{but}"
                )


class SharedArrays:
    """The arrays that the launches of a plan share: swapped for others of the same shapes, all of them or none.

    Args:
        launches: bound to views without addresses.
        planned: those views.
    """

    def __init__(self, launches: Sequence[BoundLaunch], planned: Mapping[str, View]) -> None:
        self._at: dict[str, View] = {}
        self._swapped = {name: _Swapped.of(name, view, launches) for name, view in planned.items()}
        self._rivals = rivals({bound.variant for bound in launches}, {n: view.nbytes for n, view in planned.items()})

    def point(self, views: dict[str, View]) -> None:
        """Have the launches use these arrays.

        Raises:
            InputError: one is not what was planned for, or shares memory with one that is written.
        """
        at = self._at
        if views == at:
            return
        changed = [name for name, view in views.items() if name not in at or view != at[name]]
        for name in changed:
            shape, dtype, written, align, needed_by, _ = self._swapped[name]
            view = views[name]
            if view.shape != shape or view.dtype != dtype:
                raise InputError(f"{name} has dtype {view.dtype} and shape {view.shape}; planned for {dtype} {shape}")
            if written and not view.writable:
                raise InputError(f"{name} is read-only; the kernel writes it")
            if align > 1:
                check_aligned(needed_by, name, view, align)
        check_apart(self._rivals, views)
        for name in changed:
            for slot in self._swapped[name].slots:
                slot.value = views[name].pointer
        self._at = views


class _Swapped(NamedTuple):
    """One of them: what it must be, what its address must be a multiple of and for whom, and where that goes."""

    shape: tuple[int, ...]
    dtype: str
    written: bool
    align: int
    needed_by: str
    slots: tuple[Any, ...]

    @classmethod
    def of(cls, name: str, planned: View, launches: Sequence[BoundLaunch]) -> _Swapped:
        using = [(b, arg) for b in launches for arg in b.variant.args if arg.name == name and isinstance(arg, Tensor)]
        bound, strictest = max(using, key=lambda pair: pair[1].align)
        slots = tuple(b.slots[name] for b, _ in using)
        written = any(arg.writes for _, arg in using)
        return cls(planned.shape, planned.dtype, written, strictest.align, bound.variant.name, slots)


def launch(variant: Variant, device: Device | str, *, stream: Any = None, checked: bool = False, **values: Any) -> None:
    """Check, build (or take from the cache), load and launch a variant. A grid with no block launches nothing.

    Args:
        device: from `device`, or its name.
        checked: on the host: an access outside of an array is an error that names array, thread and line; see
            `devices.memory_check`.
        values: an array of the device for each declared tensor, a number for each scalar and extent.

    Raises:
        InputError: see `bind`; or a tensor that is written shares memory with another, or the grid has more blocks
            than a launch can have; or `checked` on a device that has no such check.
        ToolchainError: the variant cannot be built for the device's arch.
        DeviceError: the launch failed.
        MemoryFault: a checked launch touches what it must not.
    """
    on = devices.resolve(device)
    if checked:
        on = on.checking(required=True)
    run(bound(variant, on, values), on, stream)


def bound(variant: Variant, device: Device, values: Mapping[str, Any]) -> BoundLaunch:
    """The launch of a variant with these arguments, checked.

    Raises:
        InputError: see `launch`.
    """
    names = [arg.name for arg in variant.args if isinstance(arg, Tensor)]
    views = {name: device.view(name, _given(variant, values, name)) for name in names}
    made = bind(variant, views, **{name: value for name, value in values.items() if name not in views})
    check_apart(rivals([variant], {name: view.nbytes for name, view in views.items()}), views)
    return made


def run(bound: BoundLaunch, device: Device, stream: Any = None) -> None:
    """Launch what is bound, on a device its arrays live on."""
    prepared = prepare(bound, device)
    if 0 not in prepared.grid:
        device.launch((prepared,), stream)


def prepare(bound: BoundLaunch, device: Device) -> Launch:
    """Everything a launch takes, with the grid as the symbols are now. Shares its arguments with `bound`.

    Raises:
        InputError: the grid has more blocks than a launch can have.
    """
    v = bound.variant
    threads = v.threads(device.arch.name)
    as_grid(v.name, v.family.grid(v, bound.symbols))
    grid = _grid(bound, device, threads)
    return Launch(kernel(v, device), grid, threads, bound.args, v.family.early(v))


def renew(launch: Launch, bound: BoundLaunch, device: Device) -> Launch:
    """What was prepared from `bound`, with the grid as the symbols are now."""
    function, _, threads, args, early = launch
    return Launch(function, _grid(bound, device, threads), threads, args, early)


def _grid(bound: BoundLaunch, device: Device, threads: int) -> tuple[int, int, int]:
    grid = bound.variant.family.grid(bound.variant, bound.symbols)
    x, y, z = MOST_BLOCKS
    if device.arch.dialect == "amd":
        x = min(x, MOST_AMD_THREADS // threads)
    if grid[0] > x or grid[1] > y or grid[2] > z:
        raise _too_many(bound.variant, grid, (x, y, z))
    return grid


def _too_many(variant: Variant, grid: tuple[int, int, int], most: tuple[int, int, int]) -> InputError:
    axis, blocks, limit = next(one for one in zip("xyz", grid, most, strict=True) if one[1] > one[2])
    return InputError(
        f"{variant.name}: the grid has {blocks:,} blocks in {axis}; required: at most {limit:,}, all that a launch can "
        f"have on the device. Split the call into several of fewer rows or keys"
    )


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


def _numbers(
    variant: Variant, values: Mapping[str, Any], symbols: Mapping[str, tuple[int, str]]
) -> dict[str, int | float]:
    """Every declared scalar and extent, converted. `symbols`: what the arrays say, and which one said it first."""
    unknown = sorted(set(values) - set(_names(variant)))
    if unknown:
        raise InputError(f"{variant.name} takes no {', '.join(unknown)}; it takes {', '.join(_names(variant))}")
    kinds = {arg.name: arg.dtype for arg in variant.args if isinstance(arg, Scalar)}
    found = {}
    for name in (*kinds, *variant.family.extents):
        said, owner = symbols.get(name, (None, ""))
        given = said if said is not None and name not in values else _given(variant, values, name)
        number = found[name] = _number(name, kinds.get(name), given)
        if said is not None and number != said:
            raise InputError(f"{name} is {number}; required: {said}, as the shape of {owner} has it, or leave it out")
    return found


def _number(name: str, dtype: str | None, value: Any) -> int | float:
    """A scalar of this dtype, or for None an extent of the grid."""
    if dtype is None:
        return whole(name, value, 0, legal="0 or more, a 32-bit integer")
    if dtype in INTEGERS:
        low, high = INTEGERS[dtype]
        return whole(name, value, low, high, in_words(dtype))
    return real(name, value, dtype)
