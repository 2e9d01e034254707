"""Made-up pairs of a target and a draft, by their prices, and the pace of speculation run on them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from model_lab import OracleSession

from hipfire_kernels.model import loop
from hipfire_kernels.model.adaptive import Cycle, Pace, Plan, Prices
from hipfire_kernels.model.state import WarmState

BLOCK = 16
STEP = 0.002  # seconds
PROBE = Plan(True, 1)


@dataclass(frozen=True)
class Pair:
    """A target and a draft, by their prices in plain steps."""

    draft: float
    row: float

    def forward(self, rows: int) -> float:
        return 1 + self.row * (rows - 1)


CPU = Pair(draft=1.3, row=0.33)
GPU = Pair(draft=0.1, row=0.0133)
FREE = Pair(draft=0.001, row=0.33)


@dataclass
class Run:
    """What a request did. `steps`: its time in plain steps; `lag`: the most it was ever behind plain decoding."""

    plans: list[Plan] = field(default_factory=list)
    tokens: int = 0
    steps: float = 0.0
    lag: float = 0.0

    @property
    def slowdown(self) -> float:
        return self.steps / self.tokens

    @property
    def probes(self) -> int:
        return self.plans.count(PROBE)

    @property
    def blocks(self) -> Counter[int]:
        return Counter(plan.rows for plan in self.plans if plan.rows > 1)


def accepted(*shares: float) -> Callable[[random.Random], int]:
    """Blocks of which a draft is kept with probability `shares[j]`, where those before it are; then none."""

    def draw(rng: random.Random) -> int:
        return next((j for j, share in enumerate(shares) if rng.random() >= share), len(shares))

    return draw


NEVER, OFTEN, ALWAYS = accepted(), accepted(*[0.8] * 15), accepted(*[1.0] * 15)


def simulate(
    pair: Pair,
    kept: Callable[[random.Random], int] | Callable[[int], Callable[[random.Random], int]],
    count: int,
    prices: Prices | None,
    *,
    adaptive: bool = True,
    delays: Iterator[float] | None = None,
    prefill: float = 0.0,
    projection: float = 0.0,
    building: float = 0.0,
    seed: int = 0,
) -> Run:
    """Run a pace on a pair. `delays` are seconds more, one for each time that is measured; the first block takes
    `projection` more, the first pass of a block `building`. These two do not count as steps of the run."""
    rng, pace, run = random.Random(seed), Pace(BLOCK, prices, adaptive, count), Run()
    pace.prefilled(prefill)
    while run.tokens < count:
        most = min(BLOCK, count - run.tokens + 1)
        plan = pace.plan(most)
        agreed = min(kept(rng), most - 1) if plan.draft else 0
        drafts = [run.tokens + j + (0 if j < agreed else 10**6) for j in range(most - 1)] if plan.draft else []
        produced = min(1 + min(agreed, plan.rows - 1), count - run.tokens)
        tokens = list(range(run.tokens, run.tokens + produced))
        draft_s = STEP * pair.draft + (next(delays) if delays else 0.0) if plan.draft else 0.0
        forward_s = STEP * pair.forward(min(plan.rows, 1 + len(drafts))) + (next(delays) if delays else 0.0)
        more = projection if plan.draft else 0.0, building if plan.rows > 1 else 0.0
        projection, building = projection - more[0], building - more[1]
        pace.note(Cycle(plan, drafts, tokens, draft_s + more[0], forward_s + more[1]))
        run.plans.append(plan)
        run.tokens += produced
        run.steps += (draft_s + forward_s) / STEP
        run.lag = max(run.lag, run.steps - run.tokens)
    return run


def measured(pair: Pair) -> Prices:
    """Prices of an engine that knows the pair."""
    prices = Prices()
    for _ in range(2):
        prices.note_draft(pair.draft)
    for rows in (2, 4, 8, BLOCK):
        prices.note_forward(rows, pair.forward(rows))
    return prices


class Clock:
    """Time that passes only while something is proposed or verified, as a pair of these prices takes it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, draft: float, row: float) -> None:
        self.now = 0.0
        verify, propose = WarmState.verify, OracleSession.propose

        def verified(warm: WarmState, anchor: int, drafts: Any) -> Any:
            self.now += 1 + row * len(drafts)
            return verify(warm, anchor, drafts)

        def proposed(session: Any, anchor: int, rows: int) -> list[int]:
            self.now += draft
            return propose(session, anchor, rows)

        monkeypatch.setattr(loop, "perf_counter", lambda: self.now)
        monkeypatch.setattr(WarmState, "verify", verified)
        monkeypatch.setattr(OracleSession, "propose", proposed)
