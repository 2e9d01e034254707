"""The three things `hfk qualify` finds out about a route: what it takes, whether it is right, how fast it is.

Each gives a plain JSON object, which the journal of a run keeps.
"""

from __future__ import annotations

import functools
import math
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from hipfire_kernels.authoring.family import Variant
from hipfire_kernels.building.builder import build
from hipfire_kernels.building.resources import IN_MEMORY
from hipfire_kernels.building.toolchains.registry import choose
from hipfire_kernels.checking.numbers import worst_row
from hipfire_kernels.checking.oracle import check
from hipfire_kernels.checking.parity import VALUES, Case
from hipfire_kernels.errors import CompileError, DeviceError, RenderError
from hipfire_kernels.kernels.arguments import DRAFT
from hipfire_kernels.layout import TILE, kv_cache_shape
from hipfire_kernels.q8_0 import random_q8_0
from hipfire_kernels.running.attention import check_verify, verify_plan
from hipfire_kernels.running.devices.gpu import GpuDevice
from hipfire_kernels.running.devices.protocol import DTYPES, Device
from hipfire_kernels.running.draft import DraftWorkspace, draft_launches
from hipfire_kernels.running.timing import Timer, ratio, timer

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
        for name in IN_MEMORY:
            if getattr(taken, name):
                faults.append(f"{variant.entry} has {name} {getattr(taken, name)}")
    return {"fault": "; ".join(faults)}


# ---- whether it is right --------------------------------------------------------------------------------------------


def parity_cases(head_dim: int, settings: Settings, group: int = 0) -> Iterator[Case]:
    """Random cases, the same on every run: contexts at and around tile edges, short ones more often than long ones,
    any number of rows, several group sizes unless one is given, all named contents in turn."""
    rng = np.random.default_rng(head_dim)
    names = list(VALUES)
    for seed in range(settings.parity_cases):
        edge = TILE * int(math.exp(rng.uniform(0, math.log(settings.parity_ctx / TILE + 1))))
        ctx = edge + int(rng.choice((-1, 0, 1, int(rng.integers(2, TILE)))))
        kv_heads, heads = int(rng.choice((1, 2))), group or int(rng.choice((1, 2, 3, 4, 6, 8)))
        rows = int(rng.integers(1, MAX_ROWS + 1))
        ctx = min(ctx, settings.parity_ctx)
        yield Case(rows, ctx, kv_heads * heads, kv_heads, head_dim, names[seed % len(names)], seed=seed)
    if settings.parity_long:
        yield Case(16, settings.parity_long, 2 * (group or 6), 2, head_dim, seed=settings.parity_cases)


def parity(variants: Sequence[Variant], device: Device, settings: Settings) -> dict[str, Any]:
    """Hold kernels against the float64 oracle: number of cases, the first `fault`, and the worst error with its own
    limit, since the limit of a case grows with its values: the case nearest to (or furthest over) its limit."""
    cases, worst, limit = 0, 0.0, variants[0].tolerance.worst_row
    for variant, case in ((v, c) for v in variants for c in _cases_of(v, settings)):
        cases += 1
        if dict(variant.params).get("sliding") and case.seed % 4:  # each fourth has the mask alone
            case = replace(case, window=max(1, case.ctx * 5 // 8))
        try:
            result = check(variant, case, device)
            fault = "" if result.ok else result.describe()
            if fault or result.error / result.limit >= worst / limit:
                worst, limit = result.error, result.limit
        except DeviceError as error:
            require_alive(device, error)
            fault, worst = f"FAILED {variant.name} {case.describe()}: {error}", math.inf
        if fault:
            break
    worst_error = worst if math.isfinite(worst) else None
    return {"cases": cases, "worst_error": worst_error, "limit": limit, "fault": fault}


def _cases_of(variant: Variant, settings: Settings) -> Iterator[Case]:
    return parity_cases(variant.head_dim, settings, dict(variant.params).get("group", 0))


def require_alive(device: Device, error: DeviceError) -> None:
    """Raise the error if the device does no work any more: what it says of other routes would be about the error."""
    try:
        device.to_host(device.to_device(np.zeros(1, np.float32)))
    except DeviceError:
        raise error from None


# ---- how fast it is -------------------------------------------------------------------------------------------------


def _normal(rng: np.random.Generator) -> npt.NDArray[np.float32]:
    """Enough standard normals to be repeated: a context of 131,072 would take seconds."""
    return rng.standard_normal(1 << 20, np.float32)


class Track:
    """Times a route against the established one; keeps keys and values between timings."""

    def __init__(self, device: Device, settings: Settings) -> None:
        self.device, self.settings = device, settings
        self._caches: tuple[int, tuple[Any, Any]] | None = None
        self._keys: tuple[tuple[Any, ...], tuple[Any, Any]] | None = None

    @functools.cached_property
    def timer(self) -> Timer:
        """What times calls on the device."""
        return timer(self.device)

    def _cache_pair(self, head_dim: int) -> tuple[Any, Any]:
        if self._caches is None or self._caches[0] != head_dim:
            self._caches = None  # two pairs need not fit
            rng = np.random.default_rng(head_dim)
            shape = kv_cache_shape(max(self.settings.contexts), self.settings.n_kv_heads, head_dim)
            k, v = (self.device.to_device(random_q8_0(rng, shape)) for _ in range(2))
            self._caches = (head_dim, (k, v))
        return self._caches[1]

    def _key_pair(self, variant: Variant, ctx: int) -> tuple[Any, Any]:
        """Keys and values of a draft, of the variant's dtype."""
        dtype = DTYPES[dict(variant.params).get("kv", "f32")]
        wanted = (ctx, variant.head_dim, dtype)
        if self._keys is None or self._keys[0] != wanted:
            self._keys = None
            rng = np.random.default_rng(ctx)
            shape = (ctx, self.settings.n_kv_heads, variant.head_dim)
            k, v = (self.device.to_device(np.resize(_normal(rng).astype(dtype), shape)) for _ in range(2))
            self._keys = (wanted, (k, v))
        return self._keys[1]

    def call(self, variant: Variant, q: Any, out: Any, ctx: int, splits: int | None = None) -> Callable[[], None]:
        """A prepared call over `ctx` keys; for a draft the block's are among them."""
        prepare = self._draft_call if variant.family.oracle == DRAFT else self._verify_call
        return prepare(variant, q, out, ctx, splits)

    def _verify_call(self, variant: Variant, q: Any, out: Any, ctx: int, splits: int | None) -> Callable[[], None]:
        on, k_v = self.device, self._cache_pair(variant.head_dim)
        rows = q.shape[0]
        positions = on.to_device(np.arange(ctx - rows, ctx, dtype=np.int32))
        plan = verify_plan(variant, on, check_verify(on, q, *k_v), ctx, splits=splits)
        return lambda: plan.run(q, *k_v, positions, out, ctx=ctx)

    def _draft_call(self, variant: Variant, q: Any, out: Any, ctx: int, splits: int | None) -> Callable[[], None]:
        k_v = self._key_pair(variant, ctx)
        launches = draft_launches(self.device, q, *k_v, out, variant=variant, workspace=DraftWorkspace(splits))

        def call(kept: tuple[Any, ...] = k_v) -> None:  # launches hold addresses alone
            self.device.launch(launches)

        return call

    def time(self, route: Variant, established: Variant, ctx: int, rows: int) -> dict[str, Any]:
        """Medians, the paired ratio with its quartiles, and a `fault` where the two do not agree on what they read."""
        on = self.device
        rng = np.random.default_rng(ctx + rows)
        q = on.to_device(rng.standard_normal((rows, self.settings.n_heads, route.head_dim), np.float32))
        outs = [on.to_device(np.full(q.shape, np.nan, np.float32)) for _ in range(2)]
        calls = [self.call(variant, q, out, ctx) for variant, out in zip((route, established), outs, strict=True)]
        times = self.timer.interleaved(dict(zip(("route", "base"), calls, strict=True)), self.settings.rounds, warmup=2)
        middle, low, high = ratio(times["base"], times["route"])
        apart = worst_row(on.to_host(outs[0]), on.to_host(outs[1]).astype(np.float64))
        limit = 2 * route.tolerance.worst_row
        return {
            "route_us": round(times["route"].median, 3),
            "established_us": round(times["base"].median, 3),
            "ratio": round(middle, 4),
            "quartiles": [round(low, 4), round(high, 4)],
            "fault": "" if apart <= limit else f"{apart:.3g} from {established.entry} at ctx {ctx}, {rows} rows",
        }
