"""The route table: every way a request may run.

A route is data: a kernel variant to run, the predicates a request must meet, and whether it needs evidence for the
exact arch. The last route of a workload is the established one, which what is refused falls back to. Of the admitted
ones that which was measured as the fastest runs; the order of the table decides where they were measured as equal.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from hipfire_kernels.authoring.family import Variant
from hipfire_kernels.dispatch import checks
from hipfire_kernels.dispatch.checks import Check, Predicate
from hipfire_kernels.dispatch.policy import (
    FLASH_PREFILL,
    MIN_CTX_DEFAULT,
    MIN_CTX_VARIABLE,
    PREFILL_KERNEL,
    VERIFY_ATTN,
    Policy,
)
from hipfire_kernels.dispatch.request import AttendRequest
from hipfire_kernels.errors import InputError
from hipfire_kernels.kernels import families
from hipfire_kernels.running.arguments import I32_MAX


@dataclass(frozen=True)
class Route:
    """One row of the table.

    Attributes:
        name: what callers, counters and evidence call it.
        workload: "verify" or "draft".
        family: the kernel family it runs.
        variant: the variant for a request that meets the predicates.
        predicates: all of them are evaluated, also after one has failed.
        policy_checks: predicates that the environment can narrow, from the request, the switches and the crossover in
            keys that the evidence which opens the route has measured, if it has.
        auto_checks: predicates that hold for "auto" alone: when the route is chosen by itself, not insisted on.
        needs_evidence: the route opens only where a record for the exact arch says so.
        timed_rows: query rows at which `hfk qualify` times the route.
    """

    name: str
    workload: str
    family: str
    variant: Callable[[AttendRequest], Variant]
    predicates: tuple[Predicate, ...]
    policy_checks: Callable[[AttendRequest, Policy, int | None], tuple[Check, ...]] = lambda r, policy, crossover: ()
    auto_checks: Callable[[AttendRequest, Policy], tuple[Check, ...]] = lambda r, policy: ()
    needs_evidence: bool = False
    timed_rows: tuple[int, ...] = ()


MAX_BLOCK_ROWS = 32
"""Query rows of the longest speculative block."""

_VERIFY = (
    checks.equals("workload", "verify"),
    checks.known_arch,
    checks.equals("kv_format", "q8_0"),
    checks.grouped_heads,
)


def _above_min_ctx(r: AttendRequest, policy: Policy, crossover: int | None) -> tuple[Check, ...]:
    """The multi-row kernels pay off from some context on; below it the established route is faster.

    A measured crossover takes the place of the default; the environment can only raise either.
    """
    asked = policy.multirow_min_ctx
    minimum, source = MIN_CTX_DEFAULT, f"the default of {MIN_CTX_VARIABLE}"
    if crossover is not None:
        minimum, source = crossover, "measured crossover"
    if asked is not None and (asked == 0 or asked > minimum):
        minimum, source = asked, MIN_CTX_VARIABLE
    required = f"above {minimum} ({source})" if minimum else f"routes disabled by {MIN_CTX_VARIABLE}=0"
    seen = r.logical_ctx
    ok = minimum > 0 and isinstance(seen, int) and not isinstance(seen, bool) and seen > minimum
    return (Check("logical_ctx", seen, required, ok),)


def _replayable(family: str) -> tuple[Predicate, ...]:
    """A launch that is captured or recorded must stay right as the context grows: the declaration knows which does."""
    legal = (False, True) if families()[family].graph_safe else (False,)
    return (checks.one_of("capturing", *legal), checks.one_of("recording", *legal))


def _multirow(rows: int) -> Route:
    return Route(
        name=f"rows{rows}",
        workload="verify",
        family="attention_flash_q8_0_rows",
        variant=lambda r: families()["attention_flash_q8_0_rows"].variant(rows=rows, head_dim=r.head_dim),
        predicates=(
            *_VERIFY,
            checks.one_of("head_dim", *families()["attention_flash_q8_0_rows"].params["head_dim"]),
            checks.equals("layout", "chain"),
            checks.between("rows", rows, MAX_BLOCK_ROWS),
            checks.between("logical_ctx", 0),
            checks.equals("window", 0),
            *_replayable("attention_flash_q8_0_rows"),
        ),
        policy_checks=_above_min_ctx,
        needs_evidence=True,
        timed_rows={4: (4, 7), 8: (8, 16)}[rows],
    )


@functools.lru_cache(maxsize=1024)
def _split_variant(family: str, arch: str | None, head_dim: int, group: int, rows: int, **fixed: int) -> Variant:
    """The variant with the fewest rows that holds all of the request's, else that with the most: rows go in groups."""
    wanted = {"head_dim": head_dim, "group": group, **fixed}
    declared = (v for v in families()[family].variants() if wanted.items() <= dict(v.params).items())
    fitting = [v for v in declared if v.fits(str(arch))]
    return next((v for v in fitting if v.rows >= rows), fitting[-1])


def _verify_attention(r: AttendRequest, policy: Policy, crossover: int | None) -> tuple[Check, ...]:
    """From the crossover on, where one was measured: at that context the route was faster."""
    on = policy.verify_attn
    switch = Check(VERIFY_ATTN, int(on), "1 or unset", on)
    if crossover is None:
        return (switch,)
    seen = r.logical_ctx
    ok = isinstance(seen, int) and not isinstance(seen, bool) and seen >= crossover
    return (switch, Check("logical_ctx", seen, f"at least {crossover} (measured crossover)", ok))


def _verify_split(name: str, family: str, **fixed: int) -> Route:
    """A kernel whose blocks share K and V between all rows and heads of a group, on a grid that no context changes."""
    declared = families()[family].params
    return Route(
        name=name,
        workload="verify",
        family=family,
        variant=lambda r: _split_variant(family, checks.base_arch(r.arch), r.head_dim, r.group, r.rows, **fixed),
        predicates=(
            *_VERIFY,
            checks.one_of("head_dim", *declared["head_dim"]),
            checks.group_within(min(declared["group"]), max(declared["group"])),
            checks.one_of("layout", "chain", "independent"),
            checks.between("rows", 1, MAX_BLOCK_ROWS),
            checks.between("logical_ctx", 0),
            checks.equals("window", 0),
            *_replayable(family),
        ),
        policy_checks=_verify_attention,
        needs_evidence=True,
        timed_rows=(4, 8, 16, 32),
    )


@functools.lru_cache(maxsize=64)
def _tile_variant(head_dim: int, mask: str) -> Variant:
    return families()["attention_flash_q8_0_tile_batched"].variant(head_dim=head_dim, mask=mask)


def _tile_mask(r: AttendRequest) -> str:
    return "tree" if r.layout == "tree" else "window" if r.window else "causal"


TILE_BATCHED = Route(
    name="tile_batched",
    workload="verify",
    family="attention_flash_q8_0_tile_batched",
    variant=lambda r: _tile_variant(r.head_dim, _tile_mask(r)),
    predicates=(
        *_VERIFY,
        checks.tiled_head_dim,
        checks.one_of("layout", "chain", "tree", "independent"),
        checks.between("rows", 1),
        checks.between("logical_ctx", 0),
        checks.between("window", 0),
        *_replayable("attention_flash_q8_0_tile_batched"),
    ),
)


def _past_crossover(r: AttendRequest, policy: Policy, crossover: int | None) -> tuple[Check, ...]:
    """Where a crossover was measured, the established route is faster up to there."""
    if crossover is None:
        return ()
    seen = r.logical_ctx
    ok = isinstance(seen, int) and not isinstance(seen, bool) and seen > crossover
    return (Check("logical_ctx", seen, f"above {crossover} (measured crossover)", ok),)


def _not_switched_off(r: AttendRequest, policy: Policy, crossover: int | None) -> tuple[Check, ...]:
    on = policy.flash_prefill
    return (*_past_crossover(r, policy, crossover), Check(FLASH_PREFILL, int(on), "1 or unset", on))


def _prefill_by_itself(r: AttendRequest, policy: Policy) -> tuple[Check, ...]:
    """The other fast kernels end at a verify block: more rows are a prefill. Fewer it takes where it is insisted on."""
    chosen = policy.prefill_kernel
    rows = isinstance(r.rows, int) and r.rows > MAX_BLOCK_ROWS
    return (
        Check("prefill rows", r.rows, f"above {MAX_BLOCK_ROWS}, or route='wmma_prefill'", rows),
        Check(PREFILL_KERNEL, chosen, "auto", chosen == "auto"),
    )


WMMA_PREFILL = Route(
    name="wmma_prefill",
    workload="verify",
    family="attention_q8_0_flash_prefill_wmma",
    variant=lambda r: families()["attention_q8_0_flash_prefill_wmma"].variant(head_dim=r.head_dim),
    predicates=(
        *_VERIFY,
        checks.one_of("head_dim", *families()["attention_q8_0_flash_prefill_wmma"].params["head_dim"]),
        checks.one_of("layout", "chain", "independent"),
        checks.between("rows", 1),
        checks.between("logical_ctx", 0),
        checks.equals("window", 0),
        *_replayable("attention_q8_0_flash_prefill_wmma"),
    ),
    policy_checks=_not_switched_off,
    auto_checks=_prefill_by_itself,
    needs_evidence=True,
    timed_rows=(64,),
)


def _draft_predicates(family: str, head_dim: Predicate, *kv_formats: str) -> tuple[Predicate, ...]:
    return (
        checks.equals("workload", "draft"),
        checks.known_arch,
        checks.one_of("kv_format", *kv_formats),
        checks.grouped_heads,
        head_dim,
        checks.between("rows", 1),
        checks.between("logical_ctx", 1),
        *_replayable(family),
    )


def _draft(name: str, sliding: bool, *predicates: Predicate) -> Route:
    return Route(
        name=name,
        workload="draft",
        family="attention_dflash_f32",
        variant=lambda r: families()["attention_dflash_f32"].variant(head_dim=r.head_dim, sliding=sliding),
        predicates=(*_draft_predicates("attention_dflash_f32", checks.tiled_head_dim, "f32"), *predicates),
    )


def _draft_matrix(name: str, family: str, timed_rows: int, **params: int) -> Route:
    """A draft kernel on matrix units. It takes f16 K and V too, and has a form for a window or a causal mask."""
    declared = families()[family].params
    return Route(
        name=name,
        workload="draft",
        family=family,
        variant=lambda r: families()[family].variant(
            head_dim=r.head_dim, kv=r.kv_format, sliding=bool(r.window or r.causal), **params
        ),
        predicates=(
            *_draft_predicates(family, checks.one_of("head_dim", *declared["head_dim"]), *declared["kv"]),
            checks.between("window", 0),
            checks.one_of("causal", False, True),
        ),
        policy_checks=_past_crossover,
        needs_evidence=True,
        timed_rows=(timed_rows,),
    )


def _windowed(r: AttendRequest) -> Check:
    known = checks.is_int(r.window) and 0 <= r.window <= I32_MAX and isinstance(r.causal, bool)
    return Check(
        "window/causal", f"{r.window}/{r.causal}", "a window or a causal mask", known and bool(r.window or r.causal)
    )


DFLASH_SLIDING = _draft("dflash_sliding", True, _windowed)
DFLASH_SCALAR = _draft("dflash_scalar", False, checks.equals("window", 0), checks.equals("causal", False))

DFLASH_N64 = _draft_matrix("dflash_n64", "attention_dflash_wmma_n64_f32", 16)
DFLASH_M32 = _draft_matrix("dflash_m32", "attention_dflash_wmma_m32_f32", 32)
DFLASH_M16 = _draft_matrix("dflash_m16", "attention_dflash_wmma_f32", 16)

ROUTES: tuple[Route, ...] = (
    _verify_split("verify_mma", "attention_verify_mma_q8", terms=1),
    _verify_split("verify_gqa", "attention_verify_gqa_q8"),
    _multirow(8),
    _multirow(4),
    WMMA_PREFILL,
    TILE_BATCHED,
    DFLASH_N64,
    DFLASH_M32,
    DFLASH_M16,
    DFLASH_SLIDING,
    DFLASH_SCALAR,
)

UNROUTED = {
    "kv_cache_write_q8_0_batched": "a step before attention, chosen by no request",
    "attention_flash_reduce_batched": "the second launch of every tiled route",
}
"""Families that are no route of their own, and why."""


@functools.cache
def per_group(name: str) -> bool:
    """Whether a route has a kernel for each number of query heads of a KV head, and so needs evidence for each."""
    return any(row.name == name and "group" in families()[row.family].params for row in ROUTES)


def is_graph_safe(name: str) -> bool:
    """Whether a captured launch of a route stays right as the context grows."""
    return families()[route(name).family].graph_safe


def routes_of(workload: str | None) -> tuple[Route, ...]:
    """The routes of a workload, in order. An unknown workload has all of them, so that each can say why it refuses."""
    found = tuple(r for r in ROUTES if r.workload == workload)
    return found or ROUTES


def route(name: str) -> Route:
    """A route by name."""
    for row in ROUTES:
        if row.name == name:
            return row
    raise InputError(f"route {name!r} is not known; known routes: {', '.join(r.name for r in ROUTES)}, auto")
