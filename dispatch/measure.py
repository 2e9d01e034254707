"""The three things `hfk qualify` finds out about a route: what it takes, whether it is right, how fast it is.

Each gives a plain JSON object, which the journal of a run keeps.
"""

from __future__ import annotations

import functools
import math
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..attention import TilePlan, check_verify
from ..builder import build
from ..errors import CompileError, DeviceError, RenderError
from ..family import Variant
from ..layout import TILE, kv_cache_shape
from ..parity import VALUES, Case, check, worst_row
from ..q8_0 import random_q8_0
from ..runtime import Device
from ..runtime.gpu import GpuDevice
from ..timing import Timer, ratio, timer
from ..toolchains.registry import choose

MAX_ROWS = 32


@dataclass(frozen=True)
class Settings:
    """How much is measured.

    Attributes:
        contexts: keys at which routes are timed.
        rounds: pairs of timed calls at each.
        n_heads, n_kv_heads: of the timed calls.
        parity_cases: random cases for each route and head_dim.
        parity_ctx: longest context of those.
        parity_long: context of one more case; 0 for none.
    """

    contexts: tuple[int, ...] = (2048, 4096, 8192, 20676, 32768)
    rounds: int = 15
    n_heads: int = 24
    n_kv_heads: int = 4
    parity_cases: int = 40
    parity_ctx: int = 4096
    parity_long: int = 20676


QUICK = Settings(contexts=(2048, 4096, 32768), rounds=9, parity_cases=12, parity_long=0)
HOST = Settings((512, 1024, 2048, 4096), rounds=7, n_heads=6, n_kv_heads=1, parity_ctx=1024, parity_long=0)
HOST_QUICK = Settings((512, 2048), rounds=5, n_heads=6, n_kv_heads=1, parity_cases=8, parity_ctx=512, parity_long=0)


def settings_for(device: Device, quick: bool = False) -> Settings:
    """What is measured on a device by default: less on the host, which is a thousand times slower."""
    if isinstance(device, GpuDevice):
        return QUICK if quick else Settings()
    return HOST_QUICK if quick else HOST


def identity(device: Device) -> dict[str, str]:
    """What figures are bound to: the names of device, driver and toolchain."""
    compiler = choose(device.arch, device.toolchain)
    toolchain = f"{compiler.name}: {compiler.identity(device.arch)}"
    if not isinstance(device, GpuDevice):
        name = platform.processor() or platform.machine()
        return {"device": f"host CPU ({name})", "driver": platform.platform(), "toolchain": toolchain}
    facts = device.describe()
    driver = ", ".join(f"{name} {facts[name]}" for name in ("driver", "driver_api") if facts.get(name))
    return {"device": str(facts["name"]), "driver": driver, "toolchain": toolchain}


# ---- what it takes --------------------------------------------------------------------------------------------------


def resources(variants: tuple[Variant, ...], device: Device) -> dict[str, Any]:
    """Build the kernels: `fault` says what one spills, or why it does not build; empty when there is nothing."""
    faults = []
    for variant in variants:
        try:
            taken = build(variant, device.arch.name, device.toolchain).resources
        except (CompileError, RenderError) as error:
            faults.append(f"{variant.entry} does not build: {error}")
            continue
        for name in ("vgpr_spills", "sgpr_spills", "scratch_bytes"):
            if getattr(taken, name):
                faults.append(f"{variant.entry} has {name} {getattr(taken, name)}")
    return {"fault": "; ".join(faults)}


# ---- whether it is right --------------------------------------------------------------------------------------------


def parity_cases(head_dim: int, settings: Settings) -> Iterator[Case]:
    """Random cases, the same on every run: contexts at and around tile edges, short ones more often than long ones,
    any number of rows, several group sizes, all named contents in turn."""
    rng = np.random.default_rng(head_dim)
    names = list(VALUES)
    for seed in range(settings.parity_cases):
        edge = TILE * int(math.exp(rng.uniform(0, math.log(settings.parity_ctx / TILE + 1))))
        ctx = edge + int(rng.choice((-1, 0, 1, int(rng.integers(2, TILE)))))
        kv_heads, group = int(rng.choice((1, 2))), int(rng.choice((1, 2, 3, 4, 6, 8)))
        rows = int(rng.integers(1, MAX_ROWS + 1))
        ctx = min(ctx, settings.parity_ctx)
        yield Case(rows, ctx, kv_heads * group, kv_heads, head_dim, names[seed % len(names)], seed=seed)
    if settings.parity_long:
        yield Case(16, settings.parity_long, 12, 2, head_dim, seed=settings.parity_cases)


def parity(variant: Variant, device: Device, settings: Settings) -> dict[str, Any]:
    """Hold a kernel against the float64 oracle: number of cases, worst error, limit, and the first `fault`."""
    cases, worst, limit = 0, 0.0, variant.family.tolerance.worst_row
    for case in parity_cases(variant.head_dim, settings):
        cases += 1
        try:
            result = check(variant, case, device)
            fault, worst, limit = "" if result.ok else result.describe(), max(worst, result.error), result.limit
        except DeviceError as error:
            require_alive(device, error)
            fault, worst = f"FAILED {variant.name} {case.describe()}: {error}", math.inf
        if fault:
            break
    worst_error = worst if math.isfinite(worst) else None
    return {"cases": cases, "worst_error": worst_error, "limit": limit, "fault": fault}


def require_alive(device: Device, error: DeviceError) -> None:
    """Raise the error if the device does no work any more: what it says of other routes would be about the error."""
    try:
        device.to_host(device.to_device(np.zeros(1, np.float32)))
    except DeviceError:
        raise error from None


# ---- how fast it is -------------------------------------------------------------------------------------------------


class Track:
    """Times a route against the established one; keeps the caches of a head_dim between timings."""

    def __init__(self, device: Device, settings: Settings) -> None:
        self.device, self.settings = device, settings
        self._caches: tuple[int, tuple[Any, Any]] | None = None

    @functools.cached_property
    def _timer(self) -> Timer:
        return timer(self.device)

    def _cache_pair(self, head_dim: int) -> tuple[Any, Any]:
        if self._caches is None or self._caches[0] != head_dim:
            self._caches = None  # two pairs need not fit
            rng = np.random.default_rng(head_dim)
            shape = kv_cache_shape(max(self.settings.contexts), self.settings.n_kv_heads, head_dim)
            k, v = (self.device.to_device(random_q8_0(rng, shape)) for _ in range(2))
            self._caches = (head_dim, (k, v))
        return self._caches[1]

    def time(self, route: Variant, established: Variant, ctx: int, rows: int) -> dict[str, Any]:
        """Medians, the paired ratio with its quartiles, and a `fault` where the two do not agree on what they read."""
        on, k_v = self.device, self._cache_pair(route.head_dim)
        rng = np.random.default_rng(ctx + rows)
        q = on.to_device(rng.standard_normal((rows, self.settings.n_heads, route.head_dim), np.float32))
        positions = on.to_device(np.arange(ctx - rows, ctx, dtype=np.int32))
        shape = check_verify(on, q, *k_v)
        outs = [on.to_device(np.full(q.shape, np.nan, np.float32)) for _ in range(2)]
        plans = [TilePlan(variant, on, shape, ctx) for variant in (route, established)]

        def caller(plan: TilePlan, out: Any) -> Any:
            return lambda: plan.run(q, *k_v, positions, out, ctx=ctx)

        calls = {
            name: caller(*pair) for name, pair in zip(("route", "base"), zip(plans, outs, strict=True), strict=True)
        }
        times = self._timer.interleaved(calls, self.settings.rounds, warmup=2)
        middle, low, high = ratio(times["base"], times["route"])
        apart = worst_row(on.to_host(outs[0]), on.to_host(outs[1]).astype(np.float64))
        limit = 2 * route.family.tolerance.worst_row
        return {
            "route_us": round(times["route"].median, 3),
            "established_us": round(times["base"].median, 3),
            "ratio": round(middle, 4),
            "quartiles": [round(low, 4), round(high, 4)],
            "fault": "" if apart <= limit else f"{apart:.3g} from {established.entry} at ctx {ctx}, {rows} rows",
        }
