"""The route table: every way a request may run, in the order they are tried.

A route is data: a kernel variant to run, the predicates a request must meet, and whether it needs evidence for the
exact arch. The last route of a workload is the established one, which what is refused falls back to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..errors import InputError
from ..family import Variant
from ..kernels import families
from . import checks
from .checks import Check, Predicate
from .policy import MIN_CTX_DEFAULT, MIN_CTX_VARIABLE, Policy
from .record import Evidence
from .request import AttendRequest


@dataclass(frozen=True)
class Route:
    """One row of the table.

    Attributes:
        name: what callers, counters and evidence call it.
        workload: "verify" or "draft".
        family: the kernel family it runs.
        variant: the variant for a request that meets the predicates.
        predicates: all of them are evaluated, also after one has failed.
        policy_checks: predicates that the environment can narrow, from the request, the switches and the record of
            evidence that opens the route, if there is one.
        needs_evidence: the route opens only where a record for the exact arch says so.
        timed_rows: query rows at which `hfk qualify` times the route.
    """

    name: str
    workload: str
    family: str
    variant: Callable[[AttendRequest], Variant]
    predicates: tuple[Predicate, ...]
    policy_checks: Callable[[AttendRequest, Policy, Evidence | None], tuple[Check, ...]] = lambda r, policy, record: ()
    needs_evidence: bool = False
    timed_rows: tuple[int, ...] = ()


_VERIFY = (
    checks.equals("workload", "verify"),
    checks.known_arch,
    checks.equals("kv_format", "q8_0"),
    checks.grouped_heads,
)


def _above_min_ctx(r: AttendRequest, policy: Policy, record: Evidence | None) -> tuple[Check, ...]:
    """The multi-row kernels pay off from some context on; below it the established route is faster.

    A measured crossover takes the place of the default; the environment can only raise either.
    """
    asked = policy.multirow_min_ctx
    minimum, source = MIN_CTX_DEFAULT, f"the default of {MIN_CTX_VARIABLE}"
    if record and record.crossover:
        minimum, source = record.crossover.ctx, "measured crossover"
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
            checks.between("rows", rows, 32),
            checks.equals("window", 0),
            *_replayable("attention_flash_q8_0_rows"),
        ),
        policy_checks=_above_min_ctx,
        needs_evidence=True,
        timed_rows={4: (4, 7), 8: (8, 16)}[rows],
    )


def _tile_variant(r: AttendRequest) -> Variant:
    mask = "tree" if r.layout == "tree" else "window" if r.window else "causal"
    return families()["attention_flash_q8_0_tile_batched"].variant(head_dim=r.head_dim, mask=mask)


TILE_BATCHED = Route(
    name="tile_batched",
    workload="verify",
    family="attention_flash_q8_0_tile_batched",
    variant=_tile_variant,
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


def _draft(name: str, sliding: bool, *predicates: Predicate) -> Route:
    return Route(
        name=name,
        workload="draft",
        family="attention_dflash_f32",
        variant=lambda r: families()["attention_dflash_f32"].variant(head_dim=r.head_dim, sliding=sliding),
        predicates=(
            checks.equals("workload", "draft"),
            checks.known_arch,
            checks.equals("kv_format", "f32"),
            checks.grouped_heads,
            checks.tiled_head_dim,
            checks.between("rows", 1),
            checks.between("logical_ctx", 1),
            *_replayable("attention_dflash_f32"),
            *predicates,
        ),
    )


def _windowed(r: AttendRequest) -> Check:
    known = isinstance(r.window, int) and r.window >= 0 and isinstance(r.causal, bool)
    return Check(
        "window/causal", f"{r.window}/{r.causal}", "a window or a causal mask", known and bool(r.window or r.causal)
    )


DFLASH_SLIDING = _draft("dflash_sliding", True, _windowed)
DFLASH_SCALAR = _draft("dflash_scalar", False, checks.equals("window", 0), checks.equals("causal", False))

ROUTES: tuple[Route, ...] = (_multirow(8), _multirow(4), TILE_BATCHED, DFLASH_SLIDING, DFLASH_SCALAR)

UNROUTED = {
    "kv_cache_write_q8_0_batched": "a step before attention, chosen by no request",
    "attention_flash_reduce_batched": "the second launch of every tiled route",
}
"""Families that are no route of their own, and why."""


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
