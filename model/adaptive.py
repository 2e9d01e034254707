"""When a block is drafted, and how many of its rows are verified.

Times are counted in plain steps: one step is what decoding one token plainly takes. A cycle that drafts at price D and
verifies r rows at price V(r) produces E(r) = 1 + (drafts expected to be kept) tokens. It beats plain decoding when

    E(r) > D + V(r),   that is   tau > D + V(r) - 1.

*How many rows.* The draft always proposes the block it was trained on; r = argmax E(r) / (D + V(r)) of them are
verified. E comes from an exponentially weighted mean per position (`Acceptance`). It is fed by whole blocks, verified
or not: proposals are compared with the tokens that come next, whoever produced them.

*Retiring.* With "auto", no r that beats plain decoding means plain steps. Now and then a block is drafted all the same
and compared, not verified: a probe, at price D. When the comparisons promise a gain again, verifying resumes.

*What trying may cost.* A balance starts at 0. Each token that comes earns `SHARE` = 0.02 steps, a verified block earns
its tokens and pays D + V(r), a probe pays D. A cycle begins only when the balance holds its worst case: D for a probe,
D + V(r) - 1 for a block none of whose drafts is kept. So the balance does not go below 0, and n tokens take at most
1.02 n steps. The way from there to 1.05 is left to what no balance holds: the taps that a draft wants of every step
(0.01 on the demo pair), the cold cache after a block, prices that are a little off. Retiring forfeits what a good
stretch has saved, so that a bad one after it is held to the same share.

Two numbers. A pair on a CPU, where rows cost almost as much as steps: D = 1.3, V(4) = 2.0. tau = 1.4 gives E(4) = 2.3,
less than 3.3: retired; a probe every 1.3 / 0.02 = 65 tokens, 15 in 1,000 tokens, which then take 1,019.5 steps. A pair
on a GPU, where rows cost little: D = 0.1, V(16) = 1.2. The worst case is 0.3 steps, so the first block is verified
after 0.3 / 0.02 = 15 tokens; from tau = 0.3 on it stays.

What an engine has not measured yet it finds out once, not in every request: its first block (and the first one of a
later request, as long as there was no second), and the first that it verifies (of the fewest rows that promise a gain)
are charged, but not paid in advance. They wait for a request that can bear them: `FINDING` = 0.05 of its token budget
covers what they may cost, or all requests of the engine together have earned it. A first block is taken to cost
`FIRST_DRAFT` = 4 steps, and no more is charged, as it may have built kernels: it is drafted where the budget has 80
tokens, or after 200 tokens of shorter requests. The worst case of more rows than ever before is what the most so far
cost a row. The projection of a prompt's context in a request's first block may take `SHARE` of the prefill.

So with a block of up to 4 steps no request that uses its budget falls behind by more than 5%, but for those in which an
engine of requests below 80 tokens finds out: of all its requests together that is less than 5% at any time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median, median_low
from typing import NamedTuple

from hipfire_kernels.model.layers import BLOCK_ROWS
from hipfire_kernels.model.prefix import common_prefix

SHARE = 0.02
"""Of the time of plain decoding, what drafting may lose."""

FINDING = 0.05
"""Of a request's token budget, what finding out may cost."""

FIRST_DRAFT = 4.0
"""Steps that an engine's first block is taken to cost, and charged at most."""

DRAFT_PRICE, ROW_PRICE = 0.25, 0.05
"""Steps that a block and one more verified row are taken to cost where nothing was measured."""

_ROWS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
_MEMORY = 8  # blocks, and plain steps, that a mean or a median looks back on
_STEPS_FIRST = 3  # plain steps before anything is drafted: one may have built a kernel, the median of three did not


class Plan(NamedTuple):
    """What a cycle is to do.

    Attributes:
        draft: whether a block is drafted.
        rows: to verify at most, the anchor included; 1 for none.
        capped: whether that is because the context is beyond the draft's cap.
    """

    draft: bool
    rows: int
    capped: bool = False


class Cycle(NamedTuple):
    """What a cycle did.

    Attributes:
        plan: as planned.
        drafts: what was proposed, verified or not; perhaps nothing.
        tokens: what came.
        draft_s: seconds that proposing took.
        verify_s: seconds of the rest.
    """

    plan: Plan
    drafts: Sequence[int]
    tokens: Sequence[int]
    draft_s: float
    verify_s: float

    @property
    def rows(self) -> int:
        """Verified rows, the anchor included."""
        return min(self.plan.rows, 1 + len(self.drafts))

    @property
    def kind(self) -> str:
        """ "verify" for a block, "probe" for one that was drafted to be compared, else "plain" or "capped"."""
        if self.rows > 1:
            return "verify"
        if self.drafts:
            return "probe"
        return "capped" if self.plan.capped else "plain"


PLAIN, CAPPED, _PROBE = Plan(False, 1), Plan(False, 1, capped=True), Plan(True, 1)


class _Open(NamedTuple):
    """A block that is being compared: what it proposed, how much of it has come, what it weighs."""

    drafts: Sequence[int]
    agreed: int
    weight: float


class Acceptance:
    """How many drafts of a block are kept: for each position the share of blocks that agree up to it.

    An exponentially weighted mean over about the last 8 blocks. Before the first it takes every second draft to be
    kept, which counts as one block.
    """

    def __init__(self, positions: int) -> None:
        self._kept = [0.5**j for j in range(1, positions + 1)]
        self._blocks = 0
        self._open: list[_Open] = []

    @property
    def is_waiting(self) -> bool:
        """Whether a block is still being compared."""
        return bool(self._open)

    def proposed(self, drafts: Sequence[int]) -> None:
        """A block was drafted for the positions of the tokens that come next."""
        if drafts:
            self._open.append(_Open(drafts, 0, max(1 / _MEMORY, 1 / (self._blocks + 2))))
            self._blocks += 1

    def produced(self, tokens: Sequence[int]) -> None:
        """These tokens came next."""
        waiting = []
        for drafts, before, weight in self._open:
            agreed = before + common_prefix(drafts[before:], tokens)
            self._judge(range(before, agreed), 1.0, weight)
            if agreed == before + len(tokens) < len(drafts):
                waiting.append(_Open(drafts, agreed, weight))
            else:
                self._judge(range(agreed, len(drafts)), 0.0, weight)
        self._open = waiting

    def expected(self, rows: int) -> float:
        """Tokens that verifying `rows` rows produces on average."""
        return 1.0 + sum(self._kept[: rows - 1])

    def _judge(self, positions: range, kept: float, weight: float) -> None:
        for j in positions:
            self._kept[j] += weight * (kept - self._kept[j])


class Prices:
    """What drafting and verifying cost, in plain steps. One for all requests of an engine, in any thread.

    A price is the median of its last five measurements, of two the lower: a first one may have been a kernel's build.

    Attributes:
        fund: what the requests of the engine have earned and not spent, in steps.
    """

    def __init__(self) -> None:
        self.fund = 0.0
        self._draft: tuple[float, ...] = ()
        self._forward: list[tuple[float, ...]] = [(), (1.0,), *[()] * (BLOCK_ROWS - 1)]  # by rows
        self._slow: set[int] = set()

    @property
    def draft(self) -> float | None:
        """The price of a block; None before the first."""
        return median_low(self._draft) if self._draft else None

    @property
    def is_sure(self) -> bool:
        """Whether more than one block was measured."""
        return len(self._draft) > 1

    @property
    def has_verified(self) -> bool:
        """Whether a pass of more than one row was measured."""
        return len(self._known()) > 1

    def note_draft(self, steps: float) -> None:
        """A block was drafted at this price."""
        self._draft = (*self._draft[-4:], steps)

    def note_forward(self, rows: int, steps: float) -> None:
        """A verify pass of `rows` rows took so many steps. What is more a row than a smaller pass takes was not it.

        Where nothing else is known of these rows the first such pass is no price at all: a build that is taken for one
        would keep them from ever being tried again.
        """
        bound = min(price * rows / fewer for fewer, price in self._known() if fewer < rows)
        if steps > bound and not self._forward[rows] and rows not in self._slow:
            self._slow.add(rows)
            return
        self._forward[rows] = (*self._forward[rows][-4:], min(steps, bound))

    def forward(self, rows: int) -> float:
        """The likely price of a pass: on the lines between those measured, beyond them on the line through the ends."""
        known = self._known()
        if len(known) == 1:
            return 1.0 + ROW_PRICE * (rows - 1)
        below, above = [p for p in known if p[0] <= rows], [p for p in known if p[0] > rows]
        (r0, p0), (r1, p1) = (below[-1], above[0]) if above else (known[0], known[-1])
        slope = (p1 - p0) / (r1 - r0)
        return p0 + slope * (rows - r0) if above else p1 + max(0.0, slope) * (rows - r1)

    def worst(self, rows: int) -> float:
        """What a pass costs at most: beyond the measured ones, every row as much as those of the largest on average."""
        largest, price = self._known()[-1]
        return self.forward(rows) if rows <= largest else price * rows / largest

    def _known(self) -> list[tuple[int, float]]:
        """Rows and prices of what was measured."""
        return [(rows, median_low(measured)) for rows, measured in enumerate(self._forward) if measured]


class Pace:
    """Plans the cycles of one request from its acceptance and from the times it is told.

    Args:
        block_size: the most rows of a block.
        prices: those of the engine; None for "on", which speculates in every cycle and by what is taken for granted,
            so that a request repeats its cycles.
        adaptive: whether fewer rows than drafted may be verified.
        budget: tokens that the request may produce.

    Attributes:
        retires: whether it is "auto".
    """

    def __init__(self, block_size: int, prices: Prices | None, adaptive: bool, budget: int) -> None:
        self.retires = prices is not None
        self._budget = budget
        self._prices = prices or Prices()
        self._adaptive = adaptive
        self._acceptance = Acceptance(block_size - 1)
        self._steps: deque[float] = deque(maxlen=_MEMORY)
        self._step = 0.0  # seconds of a plain step; 0.0 before enough were seen
        self._balance = 0.0  # steps
        self._prompt_share = 0.0  # seconds that projecting the prompt's context may take
        self._is_first_block = True
        self._is_retired = True

    def prefilled(self, seconds: float) -> None:
        """The prompt was processed in so many seconds."""
        self._prompt_share = SHARE * seconds

    def plan(self, most: int) -> Plan:
        """The next cycle. `most` rows are what block and budget allow."""
        if most < 2:
            return PLAIN
        if not self.retires:
            return Plan(True, self._best(self._sizes(most)))
        price = self._prices.draft
        if not self._step:
            return PLAIN
        if price is None:
            return _PROBE if self._can_bear(FIRST_DRAFT) else PLAIN
        is_free = not self._prices.is_sure and self._is_first_block and self._can_bear(price)
        if self._balance < (0.0 if is_free else price):
            return PLAIN
        return self._affordable(most, price)

    def note(self, cycle: Cycle) -> None:
        """A cycle was run."""
        self._acceptance.proposed(cycle.drafts)
        self._acceptance.produced(cycle.tokens)
        if not self.retires:
            return
        before = self._balance
        if cycle.rows == 1:
            self._note_step(cycle.verify_s)
        self._balance += SHARE * len(cycle.tokens)
        if cycle.plan.draft:
            self._pay_draft(cycle.draft_s)
        if cycle.rows > 1:
            steps = cycle.verify_s / self._step
            self._prices.note_forward(cycle.rows, steps)
            # As in the prices: what is beyond the bound was no verifying, but a build or another process.
            self._balance += len(cycle.tokens) - min(steps, cycle.rows)
        self._prices.fund += self._balance - before

    def _note_step(self, seconds: float) -> None:
        self._steps.append(seconds)
        if len(self._steps) >= _STEPS_FIRST:
            self._step = median(self._steps)

    def _pay_draft(self, seconds: float) -> None:
        """Charge a block, and learn its price. A request's first one also projects the prompt, within its share."""
        first, self._is_first_block = self._is_first_block, False
        most = FIRST_DRAFT if self._prices.draft is None else math.inf
        if not first or not self._prices.is_sure:
            self._prices.note_draft(min(seconds / self._step, most))
        shared = self._prompt_share if first else 0.0
        self._balance -= min(max(0.0, seconds - shared) / self._step, most)

    def _affordable(self, most: int, price: float) -> Plan:
        """The block that gains most of those whose worst case is paid for; without any that gains, a probe."""
        gaining = [rows for rows in self._sizes(most) if self._speed(rows) > 1.0]
        if gaining:
            self._is_retired = False
            fewest = min(gaining)
            if not self._prices.has_verified and self._can_bear(self._prices.worst(fewest) - 1.0):
                return Plan(True, fewest)
            paid = [rows for rows in gaining if price + self._prices.worst(rows) - 1.0 <= self._balance]
            return Plan(True, self._best(paid)) if paid else PLAIN
        if not self._is_retired:
            self._is_retired = True
            self._balance = 0.0
            return PLAIN
        return PLAIN if self._acceptance.is_waiting else _PROBE

    def _can_bear(self, steps: float) -> bool:
        """Whether finding out may cost so many steps that the request has not earned."""
        return steps <= max(FINDING * self._budget, self._prices.fund)

    def _sizes(self, most: int) -> list[int]:
        """The numbers of rows to choose from."""
        return [rows for rows in _ROWS if rows < most] + [most] if self._adaptive else [most]

    def _best(self, sizes: Sequence[int]) -> int:
        return max(sizes, key=self._speed)

    def _speed(self, rows: int) -> float:
        """Tokens per step of a cycle with `rows` rows; plain decoding has 1."""
        draft = DRAFT_PRICE if self._prices.draft is None else self._prices.draft
        return self._acceptance.expected(rows) / (draft + self._prices.forward(rows))
