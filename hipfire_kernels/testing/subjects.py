"""What is tested: a variant on a device, or an engine's own kernel behind one function."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hipfire_kernels.authoring.args import Tensor
from hipfire_kernels.authoring.family import Variant
from hipfire_kernels.building.toolchains.sanitized import ADDRESS
from hipfire_kernels.checking.numbers import largest_of
from hipfire_kernels.checking.parity import GUARD, STALE, Guarded
from hipfire_kernels.layout import TILE, tiles
from hipfire_kernels.running.attention import check_verify, verify_plan, workspace_shape
from hipfire_kernels.running.binding import launch
from hipfire_kernels.running.devices.protocol import DTYPES, Device
from hipfire_kernels.running.draft import draft_attend_rows
from hipfire_kernels.testing.requests import AnyRequest, DraftRequest, Request

Array = npt.NDArray[Any]

Adapter = Callable[[Any], Array]
"""An engine's kernel: from a `Request` (or a `DraftRequest`) to the output, float32 [rows, n_heads, head_dim]."""


@dataclass(frozen=True)
class Arrangement:
    """How a call is laid out; nothing here may change a bit of the result.

    Attributes:
        partials_rows: rows of one sub-batch.
        spare_tiles: tiles the workspace covers beyond the context.
        offset: steps, of the least alignment that is legal, that each view starts behind its allocation.
        stream: `default`, or `side`: a stream of its own, on the host a thread of its own.
        covered: keys the launch covers; all by default. A row that sees more must come out as NaN.
    """

    partials_rows: int = 16
    spare_tiles: int = 0
    offset: int = 0
    stream: str = "default"
    covered: int | None = None


def least_weight(subject: Subject) -> float:
    """`Tolerance.least_weight` of a variant; an engine's kernel declares none."""
    return subject.variant.tolerance.least_weight if isinstance(subject, VariantSubject) else 0.0


class Running(Protocol):
    """A call that has been launched."""

    def result(self) -> tuple[Array, str]:
        """The output, and what the call did that it must not do; empty when nothing."""


class Subject(Protocol):
    """Something that computes attention.

    Attributes:
        name: for reports.
        tolerance: limit of the worst (row, head).
        largest: magnitudes of q, k and v above which the rows that read them need not be finite; see `Tensor.largest`.
    """

    @property
    def name(self) -> str: ...
    @property
    def tolerance(self) -> float: ...
    @property
    def largest(self) -> Mapping[str, float]: ...
    def start(self, request: AnyRequest, how: Arrangement) -> Running:
        """Launch, and return before the result is read."""


@dataclass(frozen=True)
class _Done:
    out: Array

    def result(self) -> tuple[Array, str]:
        return self.out, ""


@dataclass(frozen=True)
class EngineSubject:
    """An engine's kernel behind an adapter. How it lays out its own memory is its own affair."""

    name: str
    adapter: Adapter
    tolerance: float
    largest: Mapping[str, float] = field(default_factory=dict)

    def start(self, request: AnyRequest, how: Arrangement) -> Running:
        """See `Subject.start`. Runs at once."""
        return _Done(np.asarray(self.adapter(request)))


_SIDES = ThreadPoolExecutor(max_workers=2, thread_name_prefix="hipfire-side")
"""Threads that stand for streams on the host; they stay, since the stacks of its fibers stay with a thread."""


class _Placed:
    """A read-only input on a device, between regions of poison, starting at an offset."""

    def __init__(self, device: Device, array: Array, offset: int, poison: Any) -> None:
        # A runtime that watches the memory itself must have it end where the array does: poison may be read.
        behind = 0 if device.name == f"host+{ADDRESS}" else GUARD
        flat = np.full(array.size + offset + behind, poison, array.dtype)
        flat[offset : offset + array.size] = array.ravel()
        self._device = device
        self._sum = zlib.crc32(flat.tobytes())
        self._flat = device.to_device(flat)
        self.array = device.section(self._flat, offset, array.shape)

    def changed(self) -> bool:
        """Whether anything of it is not as it was."""
        return zlib.crc32(self._device.to_host(self._flat).tobytes()) != self._sum


class _Output:
    """A guarded array that starts at an offset; what lies before it is guarded as well."""

    def __init__(self, device: Device, shape: tuple[int, ...], offset: int, fill: float | None = None) -> None:
        size = int(np.prod(shape))
        self._guarded = Guarded(device, (offset + size,), fill=fill)
        self._offset, self._shape, self._fill = offset, shape, fill
        self.array = device.section(self._guarded.array, offset, shape)

    def read(self) -> tuple[Array, bool]:
        """The array on the host, and whether everything around it is as it was."""
        flat = self._guarded.read()
        before = flat[: self._offset]
        kept = np.isnan(before) if self._fill is None else before == self._fill
        return flat[self._offset :].reshape(self._shape).copy(), bool(kept.all()) and self._guarded.intact()


class VariantSubject:
    """A variant on a device, on the host under the memory check, with poison around its arrays."""

    def __init__(self, variant: Variant, device: Device) -> None:
        self.variant, self.device = variant, device.checking()
        self.name = variant.name
        self.tolerance = variant.tolerance.worst_row
        self.largest = largest_of(variant)

    def start(self, request: AnyRequest, how: Arrangement) -> Running:
        """See `Subject.start`."""
        return _Call(self.variant, self.device, request, how)


class _Call:
    def __init__(self, variant: Variant, device: Device, request: AnyRequest, how: Arrangement) -> None:
        self._device = device
        self._inputs = {name: _Placed(device, *args) for name, args in _inputs(variant, request, how.offset).items()}
        self._out = _Output(device, request.q.shape, _elements(variant, "out", how.offset))
        self._others: list[_Output] = []
        arrays = {name: placed.array for name, placed in self._inputs.items()}
        if isinstance(request, DraftRequest):
            launched = self._draft(variant, request, arrays)
        elif variant.family.records:
            launched = self._planned(variant, request, how, arrays)
        else:
            launched = self._direct(variant, request, how, arrays)
        self._wait = _on_stream(device, how.stream, launched)

    def _planned(
        self, variant: Variant, request: Request, how: Arrangement, arrays: Mapping[str, Any]
    ) -> Callable[[Any], None]:
        covered = request.ctx if how.covered is None else how.covered
        max_ctx = max(request.ctx, covered) + how.spare_tiles * TILE
        shape = check_verify(self._device, arrays["q"], arrays["k_cache"], arrays["v_cache"])
        records = workspace_shape(variant, self._device.multiprocessors, shape, max_ctx, how.partials_rows)
        partials = _Output(self._device, records, _elements(variant, "partials", how.offset), fill=STALE)
        self._others.append(partials)
        cols = 0 if request.tree_bias is None else request.tree_bias.shape[1]
        plan = verify_plan(
            variant,
            self._device,
            shape,
            max_ctx,
            block_cols=cols,
            partials_rows=how.partials_rows,
            partials=partials.array,
        )

        def launched(stream: Any) -> None:
            plan.run(
                arrays["q"],
                arrays["k_cache"],
                arrays["v_cache"],
                arrays["positions"],
                self._out.array,
                ctx=covered,
                scale=request.scale,
                tree_bias=arrays.get("tree_bias"),
                window=request.window,
                stream=stream,
            )

        return launched

    def _draft(self, variant: Variant, request: DraftRequest, arrays: Mapping[str, Any]) -> Callable[[Any], None]:
        def launched(stream: Any) -> None:
            draft_attend_rows(
                self._device,
                arrays["q"],
                arrays["k"],
                arrays["v"],
                self._out.array,
                variant=variant,
                scale=request.scale,
                window=request.window,
                causal=request.causal,
                stream=stream,
            )

        return launched

    def _direct(
        self, variant: Variant, request: Request, how: Arrangement, arrays: Mapping[str, Any]
    ) -> Callable[[Any], None]:
        """One launch, of a variant that writes no records: what it declares of all that a call can say."""
        names = {arg.name for arg in variant.args} | set(variant.family.extents)
        covered = request.ctx if how.covered is None else how.covered
        known = {"scale": request.factor, "ctx": covered, "live_tiles": tiles(covered)}
        known |= {"first_row": 0, "batch": len(request.q), **arrays, "out": self._out.array}
        values: dict[str, Any] = {name: value for name, value in known.items() if name in names}

        def launched(stream: Any) -> None:
            launch(variant, self._device, stream=stream, **values)

        return launched

    def result(self) -> tuple[Array, str]:
        """See `Running.result`."""
        self._wait()
        out, intact = self._out.read()
        if not intact or not all(other.read()[1] for other in self._others):
            return out, "wrote outside an array"
        changed = [name for name, placed in self._inputs.items() if placed.changed()]
        return out, f"changed its input {changed[0]}" if changed else ""


def _inputs(variant: Variant, request: AnyRequest, offset: int) -> dict[str, tuple[Array, int, Any]]:
    """Name to contents, offset in elements, and poison of the inputs that the variant declares."""
    poison = {"f32": np.nan, "f16": np.nan, "i32": 0x3FFFFFFF, "u8": 0x7E}
    found = {}
    for arg in variant.args:
        array = getattr(request, arg.name, None) if isinstance(arg, Tensor) and not arg.writes else None
        if array is not None:
            placed = np.asarray(array, DTYPES[arg.dtype])
            found[arg.name] = (placed, _elements(variant, arg.name, offset), poison[arg.dtype])
    return found


def _elements(variant: Variant, name: str, offset: int) -> int:
    """An offset in steps of the least alignment, in elements of a tensor; of the reducer's output where the variant has
    none."""
    declared = {arg.name: arg for arg in variant.args if isinstance(arg, Tensor)}
    arg = declared.get(name, Tensor(name, "f32", ()))
    return offset * max(arg.align // DTYPES[arg.dtype].itemsize, 1)


def _on_stream(device: Device, kind: str, launched: Callable[[Any], None]) -> Callable[[], None]:
    """Launch on a kind of stream; what waits for it. An error of the launch is raised here or by the wait."""
    if kind == "default":
        launched(None)
        return lambda: None
    make = getattr(device, "stream", None)
    if make is not None:
        stream = make()
        launched(stream)
        wait: Callable[[], None] = stream.synchronize
        return wait
    running = _SIDES.submit(launched, None)
    return lambda: running.result()
