"""The oracle of a family that declares a reference: cases drawn from the declaration, results compared by row.

A result is right where it is within the tolerance of the reference, which is computed in float64: max|difference| over
max|reference| of the worst row (the last axis; an array of one axis is one row). Whole numbers must be equal. Where the
reference is not finite, or beyond what the output's dtype can hold, the result must not be finite; which of NaN and the
infinities it is, is not compared.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hipfire_kernels.authoring.args import FLOATS, Scalar, Tensor
from hipfire_kernels.authoring.declaration import named_by
from hipfire_kernels.authoring.family import Variant
from hipfire_kernels.bf16 import from_bf16
from hipfire_kernels.checking import contents
from hipfire_kernels.checking.result import Finding
from hipfire_kernels.errors import InputError
from hipfire_kernels.running.binding import launch
from hipfire_kernels.running.devices.protocol import DTYPES, Device, Ordered

Array = npt.NDArray[Any]

EXTENT = (1, 67)
"""Bounds of a symbol that the declaration gives none for: over two waves, ragged."""

INVARIANTS = ("repeat", "thread_order", "neighbours")
"""Exact invariants: the same bits again; in any order of a block's threads; whatever bytes lie beside the arrays."""

GUARD = 64
"""Elements of poison on either side of an array."""


@dataclass(frozen=True)
class DeclaredCase:
    """One input of one variant: names and numbers, never the arrays.

    Attributes:
        variant: entry point.
        extents: symbols of the shapes, and names that shape the grid alone.
        scalars: those that are no symbol.
        contents: of each array that is read.
        invariant: the exact invariant that is checked besides; none when empty.
    """

    variant: str
    extents: Mapping[str, int]
    scalars: Mapping[str, float]
    contents: Mapping[str, str]
    seed: int = 0
    invariant: str = ""

    def __hash__(self) -> int:
        return hash(self.to_json())

    def describe(self) -> str:
        """In one line."""
        parts = {**self.extents, **self.scalars, **self.contents}
        text = " ".join(f"{name}={value}" for name, value in parts.items())
        return f"{self.variant} {text} seed={self.seed}" + (f" invariant={self.invariant}" if self.invariant else "")

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        found: dict[str, Any] = {"variant": self.variant, "seed": self.seed, "invariant": self.invariant}
        found |= {name: dict(getattr(self, name)) for name in ("extents", "scalars", "contents")}
        return {name: value for name, value in found.items() if value not in ("", {})}

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(self.as_dict())


# ---- what a declaration leaves open ---------------------------------------------------------------------------------


def tensors(variant: Variant) -> dict[str, Tensor]:
    """The array arguments by name."""
    return {arg.name: arg for arg in variant.args if isinstance(arg, Tensor)}


def _symbols(variant: Variant) -> tuple[str, ...]:
    """Symbols of the shapes, then the names that shape the grid alone."""
    shapes = (extent for arg in tensors(variant).values() for extent in arg.shape if isinstance(extent, str))
    scalars = {arg.name for arg in variant.args if isinstance(arg, Scalar)}
    found = dict.fromkeys(shapes)
    return (*found, *(name for name in variant.family.extents if name not in found and name not in scalars))


def _scalars(variant: Variant) -> dict[str, Scalar]:
    """The by-value arguments that no shape gives."""
    known = set(_symbols(variant))
    return {arg.name: arg for arg in variant.args if isinstance(arg, Scalar) and arg.name not in known}


def bounds(variant: Variant, name: str) -> tuple[int, int]:
    """Least and greatest value of a symbol in drawn cases."""
    return variant.family.extents.get(name, EXTENT)


def _range(variant: Variant, arg: Scalar) -> tuple[float, float]:
    return variant.family.extents.get(arg.name, arg.between)


def _ladder(low: int, high: int) -> tuple[int, ...]:
    """Extents worth drawing, the least first: around powers of two, and both ends."""
    near = {n + d for n in (1 << k for k in range(high.bit_length() + 1)) for d in (-1, 0, 1)}
    return tuple(sorted({low, high} | {n for n in near if low <= n <= high}))


def _read(variant: Variant) -> dict[str, Tensor]:
    return {name: arg for name, arg in tensors(variant).items() if arg.read}


def cost(variant: Variant, extents: Mapping[str, int]) -> int:
    """Elements of all arrays."""
    return sum(math.prod(_shape(arg, extents)) for arg in tensors(variant).values())


def _shape(arg: Tensor, extents: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(extents[extent] if isinstance(extent, str) else extent for extent in arg.shape)


# ---- the arrays of a case -------------------------------------------------------------------------------------------


def arrays(variant: Variant, case: DeclaredCase) -> dict[str, Array]:
    """What each argument holds before a launch: named contents where it is read, 0xff bytes (NaN) where it is not."""
    rng = np.random.default_rng(case.seed)
    made: dict[str, Array] = {}
    for name, arg in tensors(variant).items():
        shape, dtype = _shape(arg, case.extents), DTYPES[arg.dtype]
        if not arg.read:
            made[name] = np.full(math.prod(shape) * dtype.itemsize, 0xFF, np.uint8).view(dtype).reshape(shape)
            continue
        bound = arg.between[1] if arg.between is not None else 0
        top = case.extents[bound] if isinstance(bound, str) else bound
        made[name] = contents.fill(arg, case.contents[name], rng, shape, dtype, top)
    return made


def expected(variant: Variant, reference: Callable[..., Any], case: DeclaredCase) -> dict[str, Array]:
    """What the reference returns for a case, by the names of the written arrays.

    Raises:
        InputError: it returns something else: other names, or another shape.
    """
    held = arrays(variant, case)
    given: dict[str, Any] = {name: _numbers(arg, held[name]).copy() for name, arg in tensors(variant).items()}
    given |= {arg.name: _value(case, arg.name) for arg in variant.args if isinstance(arg, Scalar)}
    with np.errstate(all="ignore"):
        found = reference(**{name: given[name] for name in named_by(reference)})
    written = [name for name, arg in tensors(variant).items() if arg.writes]
    results = dict(found) if isinstance(found, Mapping) else {written[0]: found}
    who = f"the reference of {variant.family.name}"
    if set(results) != set(written):
        raise InputError(f"{who} returns {', '.join(results)}; required: {', '.join(written)}")
    for name in written:
        results[name] = np.asarray(results[name])
        shape = _shape(tensors(variant)[name], case.extents)
        if results[name].shape != shape:
            raise InputError(f"{who} returns {name} of shape {results[name].shape}; required: {shape}")
    return results


def _numbers(arg: Tensor, array: Array) -> Array:
    """What an array holds, as numbers: of bf16, which numpy has not, float32."""
    return from_bf16(array) if arg.dtype == "bf16" else array


def _value(case: DeclaredCase, name: str) -> float:
    return case.scalars[name] if name in case.scalars else case.extents[name]


class _Placed:
    """An array on a device, between regions of the same bytes that nobody may change."""

    def __init__(self, device: Device, array: Array, beside: int) -> None:
        guard = np.full(GUARD * array.dtype.itemsize, beside, np.uint8).view(array.dtype)
        flat = np.concatenate([guard, array.reshape(-1), guard])
        self._device, self._shape, self._before = device, array.shape, flat.tobytes()
        self._flat = device.to_device(flat.copy())
        self._inside = slice(GUARD, GUARD + array.size)
        self.array = device.section(self._flat, GUARD, array.shape)

    def read(self) -> Array:
        """The array as it is now."""
        return np.array(self._device.to_host(self._flat)[self._inside]).reshape(self._shape)

    def changed(self, *, inside: bool) -> bool:
        """Whether a byte is not as it was: of the guards, or of the array as well."""
        now = np.array(self._device.to_host(self._flat))
        if not inside:
            now[self._inside] = np.frombuffer(self._before, now.dtype)[self._inside]
        return now.tobytes() != self._before


def run(variant: Variant, case: DeclaredCase, device: Device, beside: int = 0xFF) -> tuple[dict[str, Array], str]:
    """Launch a case. What the written arrays hold then, and what the kernel did that it must not do.

    Args:
        beside: the byte that lies beside the arrays.

    Raises:
        DeviceError: the launch failed.
    """
    placed = {
        # What a kernel makes of the bytes beside its inputs must not be what lies beside its outputs.
        name: _Placed(device, array, beside ^ 0x5A if tensors(variant)[name].writes else beside)
        for name, array in arrays(variant, case).items()
    }
    given: dict[str, Any] = {name: one.array for name, one in placed.items()}
    given |= {name: value for name, value in {**case.extents, **case.scalars}.items() if _given(variant, name)}
    launch(variant, device, **given)
    fault = ""
    for name, arg in tensors(variant).items():
        if placed[name].changed(inside=not arg.writes):
            fault = f"wrote beside {name}" if arg.writes else f"changed {name}, or wrote beside it"
    return {name: placed[name].read() for name, arg in tensors(variant).items() if arg.writes}, fault


def _given(variant: Variant, name: str) -> bool:
    """Whether a launch must be told: scalars that no shape gives, names that shape the grid alone."""
    shapes = {extent for arg in tensors(variant).values() for extent in arg.shape}
    return name not in shapes


# ---- comparing ------------------------------------------------------------------------------------------------------


def difference(arg: Tensor, got: Array, want: Array, tolerance: float) -> tuple[float, str]:
    """Error of the worst row, and what is wrong besides. A result so near to where its dtype rounds to infinity that
    the tolerance reaches across may be on either side."""
    if arg.dtype not in FLOATS:
        apart = np.argwhere(got != want)
        if not len(apart):
            return 0.0, ""
        at = tuple(int(i) for i in apart[0])
        return math.inf, f"{arg.name}{list(at)} is {got[at]} instead of {want[at]:g} ({len(apart)} differ)"
    end, size = FLOATS[arg.dtype], np.abs(want.astype(np.float64))
    exact = np.where(size >= end, np.inf, want.astype(np.float64))
    with np.errstate(invalid="ignore"):  # a NaN that signals
        mine = _numbers(arg, got).astype(np.float64)
    finite, number = np.isfinite(exact), np.isfinite(mine)
    either = (size > end * (1 - tolerance)) & (size < end * (1 + tolerance)) & ~np.isnan(mine)
    wrong = np.argwhere((finite != number) & ~either)
    if len(wrong):
        at = tuple(int(i) for i in wrong[0])
        return math.inf, f"{arg.name}{list(at)} is {mine[at]:g} instead of {exact[at]:g} ({len(wrong)} such)"
    exact, mine = np.where(finite & number, exact, 0.0), np.where(finite & number, mine, 0.0)
    apart, size = _by_row(np.abs(mine - exact)), _by_row(np.abs(exact))
    # Below the least normal number a dtype has no more relative precision to give.
    return float((apart / np.maximum(size, contents.NORMAL[arg.dtype])).max(initial=0.0)), ""


def _by_row(values: Array) -> Array:
    """The largest value of each row; an array of one axis is one row."""
    largest: Array = values.reshape(-1, values.shape[-1] if values.ndim else 1).max(axis=1, initial=0.0)
    return largest


def _bits(results: Mapping[str, Array]) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in results.items()}


def sized(variant: Variant, extents: Mapping[str, int]) -> DeclaredCase:
    """A case of normal contents with these extents and the greatest of all others.

    Raises:
        InputError: a name is no symbol of the variant, or its extent is not within the declared bounds.
    """
    symbols = _symbols(variant)
    for name, n in extents.items():
        if name not in symbols:
            raise InputError(f"{variant.name} has no extent {name!r}; its extents are {', '.join(symbols)}")
        low, high = bounds(variant, name)
        if not low <= n <= high:
            raise InputError(f"extent {name} of {variant.name} is {n}; declared: {low} .. {high}")
    return _plain(variant, {name: extents.get(name, bounds(variant, name)[1]) for name in symbols})


def _plain(variant: Variant, extents: Mapping[str, int]) -> DeclaredCase:
    """Normal contents and scalars that are typical."""
    scalars = {name: _typical(_range(variant, arg), arg) for name, arg in _scalars(variant).items()}
    held = {name: contents.names(arg)[0] for name, arg in _read(variant).items()}
    return DeclaredCase(variant.entry, dict(extents), scalars, held)


# ---- the oracle -----------------------------------------------------------------------------------------------------


class Declared:
    """`checking.oracle.Oracle` of a family with a reference."""

    def __init__(self, reference: Callable[..., Any]) -> None:
        self._reference = reference

    def invariants(self, variant: Variant) -> tuple[str, ...]:
        """All, or with floats added by atomics none that asks for the same bits."""
        return INVARIANTS if variant.family.deterministic else ()

    def grid(self, variant: Variant, *, quick: bool) -> Iterator[DeclaredCase]:
        """Every content once at an extent in between, then normal values at the ends and around powers of two."""
        ladders = {name: _ladder(*bounds(variant, name)) for name in _symbols(variant)}
        middle = {name: steps[len(steps) // 2] for name, steps in ladders.items()}
        plain = {name: contents.names(arg)[0] for name, arg in _read(variant).items()}
        others = [(name, other) for name, arg in _read(variant).items() for other in contents.names(arg)[1:]]
        chosen = [(middle, plain), *((middle, {**plain, name: other}) for name, other in others)]
        for name, steps in ladders.items():
            ends = (steps[0], steps[-1]) if quick else steps
            chosen += [({**middle, name: n}, plain) for n in ends if n != middle[name]]
        for seed, (extents, held) in enumerate(chosen):
            kept = self._within(variant, extents, WORK)
            scalars = {name: _typical(_range(variant, arg), arg) for name, arg in _scalars(variant).items()}
            yield DeclaredCase(variant.entry, kept, scalars, held, seed)

    def glance(self, variant: Variant) -> Iterator[DeclaredCase]:
        """See `Oracle.glance`."""
        return self.grid(variant, quick=True)

    def timing(self, variant: Variant, rows: int, ctx: int) -> DeclaredCase:
        """See `Oracle.timing`: the largest extents that fit, normal values."""
        return _plain(variant, self._within(variant, sized(variant, {}).extents, WORK))

    def draw(self, variant: Variant, source: Any, work: int) -> DeclaredCase:
        """See `Oracle.draw`."""
        extents = {n: source.pick(n, _ladder(*bounds(variant, n)), small=True) for n in _symbols(variant)}
        scalars = {}
        for name, arg in _scalars(variant).items():
            low, high = _range(variant, arg)
            scalars[name] = source.pick(name, _steps(low, high, arg), small=False)
        held = {name: source.pick(name, contents.names(arg), small=True) for name, arg in _read(variant).items()}
        invariant = source.pick("invariant", ("", *self.invariants(variant)), small=False)
        return DeclaredCase(
            variant.entry, self._within(variant, extents, min(work, WORK)), scalars, held, source.seed(), invariant
        )

    def _within(self, variant: Variant, extents: Mapping[str, int], work: int) -> dict[str, int]:
        """The extents, the largest halved until the arrays are small enough."""
        kept = dict(extents)
        while cost(variant, kept) > work:
            largest = max(kept, key=lambda name: kept[name] / max(1, bounds(variant, name)[0]))
            low = bounds(variant, largest)[0]
            if kept[largest] <= low:
                break
            kept[largest] = max(low, kept[largest] // 2)
        return kept

    def check(self, variant: Variant, case: DeclaredCase, device: Device) -> Finding:
        """See `Oracle.check`."""
        got, fault = run(variant, case, device)
        want = expected(variant, self._reference, case)
        error = 0.0
        for name, arg in tensors(variant).items():
            if arg.writes:
                apart, wrong = difference(arg, got[name], want[name], variant.tolerance.worst_row)
                error, fault = max(error, apart), fault or wrong
        limit = variant.tolerance.worst_row
        if error > limit and not fault:
            fault = self._hint(variant, case)
        if case.invariant and not fault and error <= limit:
            fault = self._violated(variant, case, device, got)
        return Finding(case, error, limit, fault)

    hold = check

    def _hint(self, variant: Variant, case: DeclaredCase) -> str:
        """What may be said of an error besides its size: magnitudes that a kernel may not be made for."""
        wild = [n for n, held in case.contents.items() if held == "foreign" and math.isinf(tensors(variant)[n].largest)]
        floats = [n for n in wild if tensors(variant)[n].dtype in FLOATS]
        if not floats:
            return ""
        return f"({floats[0]} holds numbers of any magnitude: where that is beyond the kernel, declare its `largest`)"

    def _violated(self, variant: Variant, case: DeclaredCase, device: Device, first: dict[str, Array]) -> str:
        if case.invariant == "thread_order":
            if not isinstance(device, Ordered):
                return ""  # a card has its own order; the case is a repetition of the first there
            before, device.thread_order = device.thread_order, case.seed
            try:
                again, _ = run(variant, case, device)
            finally:
                device.thread_order = before
        else:
            again, _ = run(variant, case, device, 0xFF if case.invariant == "repeat" else 0x3C)
        one, other = _bits(first), _bits(again)
        apart = next((name for name in one if one[name] != other[name]), None)
        return "" if apart is None else f"{case.invariant}: {apart} has other bits"

    def simpler(self, variant: Variant, case: DeclaredCase) -> Iterator[DeclaredCase]:
        """See `Oracle.simpler`."""
        for name, now in case.extents.items():
            low = bounds(variant, name)[0]
            for fewer in dict.fromkeys((low, (now + low) // 2, now - 1)):
                if low <= fewer < now:
                    yield dataclasses.replace(case, extents={**case.extents, name: fewer})
        for name, held in case.contents.items():
            for plainer in contents.names(tensors(variant)[name]):
                if plainer == held:
                    break
                yield dataclasses.replace(case, contents={**case.contents, name: plainer})
        for name, arg in _scalars(variant).items():
            first = _steps(*_range(variant, arg), arg)[0]
            if case.scalars[name] != first:
                yield dataclasses.replace(case, scalars={**case.scalars, name: first})
        if case.invariant:
            yield dataclasses.replace(case, invariant="")
        if case.seed:
            yield dataclasses.replace(case, seed=case.seed // 2)

    def read(self, variant: Variant, fields: Mapping[str, Any]) -> DeclaredCase:
        """See `Oracle.read`."""
        legal = {field.name for field in dataclasses.fields(DeclaredCase)}
        if unknown := sorted(set(fields) - legal):
            raise InputError(f"a case of {variant.name} has {', '.join(unknown)}; its fields are {', '.join(legal)}")
        case = DeclaredCase(
            variant.entry,
            dict(fields.get("extents", {})),
            dict(fields.get("scalars", {})),
            dict(fields.get("contents", {})),
            fields.get("seed", 0),
            fields.get("invariant", ""),
        )
        wanted = {
            "extents": set(_symbols(variant)),
            "scalars": set(_scalars(variant)),
            "contents": set(_read(variant)),
        }
        for field, names in wanted.items():
            given = set(getattr(case, field))
            if given != names:
                raise InputError(
                    f"{field} of a case of {variant.name} are {', '.join(sorted(given)) or 'none'}; required: "
                    f"{', '.join(sorted(names)) or 'none'}"
                )
        for name, value in case.extents.items():
            low, high = bounds(variant, name)
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                raise InputError(f"extent {name} is {value!r}; required: {low} .. {high}")
        for name, held in case.contents.items():
            known = contents.names(tensors(variant)[name])
            if held not in known:
                raise InputError(f"contents of {name} are {held!r}; required: one of {', '.join(known)}")
        if not isinstance(case.seed, int) or isinstance(case.seed, bool) or case.seed < 0:
            raise InputError(f"seed is {case.seed!r}; required: a whole number, at least 0")
        if case.invariant not in ("", *self.invariants(variant)):
            raise InputError(f"invariant is {case.invariant!r}; required: {', '.join(self.invariants(variant))}")
        return case


WORK = 1 << 20
"""Elements that the arrays of a case may have."""


def _typical(bounds: tuple[float, float], arg: Scalar) -> float:
    """Not an end: a factor of 1 would hide that it is forgotten."""
    steps = _steps(*bounds, arg)
    return steps[len(steps) // 2]


def _steps(low: float, high: float, arg: Scalar) -> tuple[float, ...]:
    """Values of a scalar worth drawing: whole numbers like extents, others at both ends and between."""
    if arg.dtype not in contents.MAX:
        return _ladder(int(low), int(high))
    return tuple(dict.fromkeys((low, (low + high) / 2, high)))
