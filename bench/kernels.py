"""The kernel table: every route over contexts, rows and head_dims, in one interleaved run per shape.

`hfk bench` prints it. Each row has the time, the share of KV bytes over a read-only kernel's bandwidth in the same run,
the ratio to the established route, and the worst error against the float64 oracle on the buffers that were timed.
"""

from __future__ import annotations

import datetime
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hipfire_kernels import __version__
from hipfire_kernels.authoring.family import Variant
from hipfire_kernels.authoring.render import source_digest
from hipfire_kernels.building.builder import build
from hipfire_kernels.checking import reference
from hipfire_kernels.checking.numbers import worst_row
from hipfire_kernels.dispatch import tuning
from hipfire_kernels.dispatch.request import AttendRequest
from hipfire_kernels.dispatch.routes import route
from hipfire_kernels.kernels import families
from hipfire_kernels.layout import kv_cache_shape
from hipfire_kernels.q8_0 import random_q8_0
from hipfire_kernels.running.attention import VerifyPlan, check_verify, reducer, verify_plan
from hipfire_kernels.running.devices.gpu import GpuDevice
from hipfire_kernels.running.timing import Stopwatch, Times, ratio

CONTEXTS = (2048, 4096, 20676, 32768, 131072)
ROWS = (4, 8, 16, 32)
HEAD_DIMS = (128, 256)
BASE = "tile_batched"


@dataclass(frozen=True)
class Shape:
    """One row group of the table."""

    ctx: int
    rows: int
    head_dim: int
    n_heads: int = 24
    n_kv_heads: int = 4

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that the context has: what has to be read at least once."""
        return 2 * int(np.prod(kv_cache_shape(self.ctx, self.n_kv_heads, self.head_dim), dtype=np.int64))


ROUTES = (BASE, "rows4", "rows8", "verify_gqa", "verify_mma")


def route_variants(arch: str, shape: Shape, routes: Sequence[str] = ROUTES) -> dict[str, Variant]:
    """The variants that routes of a verify block run for a shape, by route name."""
    request = AttendRequest(
        arch=arch, head_dim=shape.head_dim, n_heads=shape.n_heads, n_kv_heads=shape.n_kv_heads, rows=shape.rows
    )
    return {name: route(name).variant(request) for name in routes}


def choices(device: GpuDevice, shape: Shape) -> dict[str, tuning.Choice]:
    """What the plans of a shape's routes take of their free choices, by route name."""
    request = AttendRequest(
        device.arch.name, "verify", "q8_0", shape.head_dim, shape.n_heads, shape.n_kv_heads, shape.rows, shape.ctx,
        "chain", capturing=False, recording=False, multiprocessors=device.multiprocessors,
    )  # fmt: skip
    return {name: tuning.find(families()[route(name).family], request) or tuning.DEFAULT for name in ROUTES}


def random_cache(rng: np.random.Generator, shape: Shape) -> npt.NDArray[np.uint8]:
    """A K or V cache full of random blocks."""
    return random_q8_0(rng, kv_cache_shape(shape.ctx, shape.n_kv_heads, shape.head_dim))


def measure(
    device: GpuDevice,
    watch: Stopwatch,
    shape: Shape,
    rounds: int,
    check: bool = True,
    routes: Sequence[str] = ROUTES,
) -> list[dict[str, Any]]:
    """The table's rows for one shape: a row of each route, `BASE` among them."""
    rng = np.random.default_rng(shape.ctx + shape.rows)
    q = rng.standard_normal((shape.rows, shape.n_heads, shape.head_dim), np.float32)
    k, v = random_cache(rng, shape), random_cache(rng, shape)
    positions = np.arange(shape.ctx - shape.rows, shape.ctx, dtype=np.int32)
    arrays = [device.to_device(a) for a in (q, k, v, positions)]
    out = device.empty(q.shape, np.float32)
    extents = check_verify(device, *arrays[:3])
    taken = choices(device, shape)
    plans = {
        n: verify_plan(taken[n].of(x), device, extents, shape.ctx, splits=taken[n].splits)
        for n, x in route_variants(device.arch.name, shape, routes).items()
    }
    calls: dict[str, Any] = {name: _caller(plan, arrays, out) for name, plan in plans.items()}
    floats = device.empty((shape.kv_bytes // 4,), np.float32)
    calls["read"] = watch.reader(floats)
    times = watch.interleaved(calls, rounds)
    want = reference.attend(q, k, v, positions) if check else None
    rows = []
    for name in plans:
        device.write(out, np.full(q.shape, np.nan, np.float32))
        calls[name]()
        error = worst_row(device.to_host(out), want) if want is not None else None
        rows.append({**_row(shape, name, times, error), "choice": dict(taken[name].values)})
    return rows


def _caller(plan: VerifyPlan, arrays: Sequence[Any], out: Any) -> Any:
    q, k_cache, v_cache, positions = arrays
    return lambda: plan.run(q, k_cache, v_cache, positions, out)


def _row(shape: Shape, name: str, times: dict[str, Times], error: float | None) -> dict[str, Any]:
    middle, low, high = ratio(times[BASE], times[name])
    return {
        "ctx": shape.ctx,
        "rows": shape.rows,
        "head_dim": shape.head_dim,
        "heads": f"{shape.n_heads}/{shape.n_kv_heads}",
        "route": name,
        **times[name].as_dict(),
        "kv_gb_per_s": round(shape.kv_bytes / times[name].median / 1e3, 1),
        "read_us": round(times["read"].median, 3),
        "share_of_read": round(times["read"].median / times[name].median, 4),
        "over_base": round(middle, 3),
        "over_base_quartiles": [round(low, 3), round(high, 3)],
        "worst_error": error,
    }


def provenance(device: GpuDevice) -> dict[str, Any]:
    """What the figures are bound to: device, driver, compiler, date, digests of the rendered sources."""
    shapes = [Shape(CONTEXTS[0], rows, head_dim) for rows in ROWS for head_dim in HEAD_DIMS]
    timed = dict.fromkeys(v for shape in shapes for v in route_variants(device.arch.name, shape).values())
    variants = [*timed, *dict.fromkeys(merging for v in timed if (merging := reducer(v)) is not None)]
    return {
        **device.describe(),
        "date": datetime.date.today().isoformat(),
        "version": __version__,
        "python": platform.python_version(),
        "compiler": build(variants[0], device.arch.name, device.toolchain).compiler,
        "sources": {v.name: source_digest(v.source(device.arch.name)) for v in variants},
    }


def table(
    device: GpuDevice,
    shapes: Iterable[Shape],
    rounds: int,
    check: bool = True,
    step: Callable[[str], None] = lambda shape: None,
    routes: Sequence[str] = ROUTES,
) -> list[dict[str, Any]]:
    """Measure every shape; `step` is called with each one's description when it is done."""
    watch = Stopwatch(device)
    rows: list[dict[str, Any]] = []
    for shape in shapes:
        rows += measure(device, watch, shape, rounds, check, routes)
        step(f"d{shape.head_dim} B{shape.rows} ctx {shape.ctx}")
    return rows


def describe(row: dict[str, Any]) -> str:
    """One line of the table."""
    error = "" if row["worst_error"] is None else f"  error {row['worst_error']:.1e}"
    return (
        f"d{row['head_dim']} B{row['rows']:<2} ctx {row['ctx']:<6} {row['route']:<12} {row['us']:9.1f} us "
        f"(spread {row['spread']:.1%})  {row['over_base']:5.2f}x  {row['share_of_read']:6.1%} of read{error}"
    )
