"""The accounts of a request: what is charged, what becomes a price, what is counted and what is traced.

Each check has faults beside it that it must catch; the last test plants them.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median_low
from typing import Any

import pytest
from model_lab import BLOCKS, PROMPT, TARGET, OracleDraft, OracleSession, target_tensors, write_checkpoint
from pace_lab import BLOCK, CPU, GPU, NEVER, OFTEN, STEP, Clock, measured, simulate

from hipfire_kernels import CheckpointError
from hipfire_kernels.model import Engine, Generation, GenerationResult, conversation, load_target, loop
from hipfire_kernels.model.adaptive import PLAIN, Cycle, Pace, Plan, Prices
from hipfire_kernels.model.qwen35 import Target
from hipfire_kernels.model.request import Request
from hipfire_kernels.model.state import WarmState
from hipfire_kernels.model.trace import Trace

ROWS, COUNT = 8, 120


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_target(write_checkpoint(tmp_path_factory.mktemp("target"), TARGET, target_tensors(TARGET)))


def drafting(target: Target, *right: int, prompt: Sequence[int] = PROMPT, ideas: Sequence[int] = ()) -> Engine:
    """An engine whose draft gets so many proposals right, over and over. With `ideas` it has only so many proposals."""
    pattern, limits = iter(right * 999), iter(list(ideas) * 999)
    draft = OracleDraft(ROWS, lambda: next(pattern))
    draft.sequence = [*prompt, *Engine(target, kv_format="f32").generate(list(prompt), 200, stop=()).tokens]
    if ideas:
        session = draft.session

        def sparing(*args: Any) -> Any:
            made = session(*args)
            made.propose = lambda anchor, rows: OracleSession.propose(made, anchor, rows)[: next(limits)]  # type: ignore[method-assign]
            return made

        draft.session = sparing  # type: ignore[method-assign]
    return Engine(target, draft, kv_format="f32")


def traced(engine: Engine, count: int = COUNT, **options: Any) -> tuple[GenerationResult, list[dict[str, Any]]]:
    """A request, and the records of its cycles."""
    file = io.StringIO()
    got = engine.generate(PROMPT, count, stop=(), trace=file, **options)
    return got, [record for line in file.getvalue().splitlines() if (record := json.loads(line))["event"] == "cycle"]


# ---- what is charged ---------------------------------------------------------------------------------------


def check_the_share_of_the_prefill(target: Target) -> None:
    """It pays for the prompt's projection in the first block, as far as it reaches, and for nothing else.

    A block that costs 1.3 and projects for 6 steps, after a prefill of 100 steps, whose share is 2: 5.3 are charged,
    and come back in 265 tokens of 0.02.
    """
    run = simulate(CPU, NEVER, 1000, measured(CPU), prefill=100 * STEP, projection=6 * STEP)
    drafted = [i for i, plan in enumerate(run.plans) if plan.draft]
    assert drafted[:2] == [65, 65 + 265]
    assert {b - a for a, b in pairwise(drafted[1:])} <= {64, 65, 66}
    # A share that is left over stays with the first block.
    run = simulate(CPU, NEVER, 1000, measured(CPU), prefill=500 * STEP)
    drafted = [i for i, plan in enumerate(run.plans) if plan.draft]
    assert drafted[:2] == [65, 66]
    assert {b - a for a, b in pairwise(drafted[1:])} <= {64, 65, 66}


def check_the_loop_tells_of_the_prefill(target: Target) -> None:
    """100 of prefill, of which 2 pay for the 2 that the first block projects: the second is due 50 tokens after it."""
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock(patch, draft=1.0, row=0.3)
        prefill, propose, asked = WarmState.prefill, OracleSession.propose, []

        def prefilled(warm: WarmState, *args: Any) -> Any:
            clock.now += 100
            return prefill(warm, *args)

        def projecting(session: Any, anchor: int, rows: int) -> list[int]:
            clock.now += 0 if asked else 2
            asked.append(session.length - len(PROMPT))
            return propose(session, anchor, rows)

        patch.setattr(WarmState, "prefill", prefilled)
        patch.setattr(OracleSession, "propose", projecting)
        engine = drafting(target, 0)
        for _ in range(2):
            engine._prices.note_draft(1.0)
        engine.generate(PROMPT, COUNT, stop=())
    assert asked == [50, 100]


def check_a_build_is_not_charged_in_full(target: Target) -> None:
    """500 steps of building in the first block, or in the first verified one, do not end speculation for a request."""
    for slow in ({"projection": 500 * STEP}, {"building": 500 * STEP}):
        prices = Prices()
        run = simulate(GPU, OFTEN, 600, prices, **slow)
        assert sum(plan.rows > 1 for plan in run.plans[-20:]) > 15
        assert prices.draft == pytest.approx(GPU.draft)
        assert prices.forward(BLOCK) < 2
    # Four steps are charged at most for it, and a pass no more than its rows.
    pace = Pace(BLOCK, Prices(), True, 600)
    for _ in range(3):
        pace.note(Cycle(PLAIN, [], [1], 0.0, STEP))
    pace.note(Cycle(Plan(True, 1), range(15), [99], 500 * STEP, STEP))
    assert pace._balance == pytest.approx(4 * 0.02 - 4)
    pace.note(Cycle(Plan(True, 2), range(15), [99], 0.1 * STEP, 500 * STEP))
    assert pace._balance == pytest.approx(5 * 0.02 - 4 - 0.1 + 1 - 2)


def check_finding_out(target: Target) -> None:
    """A first block waits for a budget that bears it, or for what all requests have earned; so does a first pass."""
    for count, drafts in ((79, False), (80, True)):
        assert any(plan.draft for plan in simulate(CPU, NEVER, count, Prices()).plans) == drafts
    prices = Prices()
    for _ in range(4):
        assert not any(plan.draft for plan in simulate(CPU, NEVER, 50, prices).plans)
    assert prices.fund == pytest.approx(4.0)
    assert simulate(CPU, NEVER, 50, prices).probes == 1
    assert prices.fund == pytest.approx(4.0 + 0.02 * 50 - CPU.draft)
    # Of a known price the budget bears as much; the pass of a block costs a step more than a plain one at most.
    for budget, bears in ((19, False), (20, True)):
        prices = Prices()
        for _ in range(2):
            prices.note_draft(0.01)
        pace = Pace(BLOCK, prices, True, budget)
        for _ in range(4):
            pace.note(Cycle(pace.plan(BLOCK), [], [1], 0.0, STEP))
        assert (pace.plan(BLOCK).rows > 1) == bears


def share_forgiven_to_every_block(self: Pace, seconds: float) -> None:
    self._is_first_block = True
    right_pay(self, seconds)


def share_forgiven_until_spent(self: Pace, seconds: float) -> None:
    self._is_first_block = self._prompt_share > 0
    right_pay(self, seconds)
    self._prompt_share -= seconds


def share_of_everything(self: Pace, seconds: float) -> None:
    self._prompt_share = seconds


def told_to_nobody(self: Pace, seconds: float) -> None:
    pass


def prefill_not_told(self: Generation, seconds: float) -> None:
    if self._request.trace:
        self._request.trace.prefill(len(self._request.prompt), self.result, seconds)


def block_charged_in_full(self: Pace, seconds: float) -> None:
    before, most = self._balance, self._prices.draft
    right_pay(self, seconds)
    if most is None:
        self._balance = before - seconds / self._step


def pass_charged_in_full(self: Pace, cycle: Cycle) -> None:
    right_note(self, cycle)
    if self.retires and cycle.rows > 1:
        self._balance -= max(0.0, cycle.verify_s / self._step - cycle.rows)


def pass_priced_in_full(self: Prices, rows: int, steps: float) -> None:
    self._forward[rows] = (*self._forward[rows][-4:], steps)


def slow_pass_priced(self: Prices, rows: int, steps: float) -> None:
    self._slow.add(rows)
    right_note_forward(self, rows, steps)


def tried_in_any_budget(self: Pace, steps: float) -> bool:
    return True


def tried_where_earned_alone(self: Pace, steps: float) -> bool:
    return steps <= self._prices.fund


def fund_unused(self: Pace, steps: float) -> bool:
    return steps <= 0.05 * self._budget


def fund_never_spent(self: Pace, cycle: Cycle) -> None:
    right_note(self, cycle)
    if cycle.plan.draft:
        self._prices.fund += cycle.draft_s / self._step


# ---- what becomes a price ----------------------------------------------------------------------------------


def check_prices_of_rows_that_were_not_measured(target: Target) -> None:
    prices = Prices()
    noted: dict[int, list[float]] = {1: [1.0], 4: [1.9, 1.6, 1.7], 9: [2.2], 12: [2.1]}
    for rows, steps in noted.items():
        for one in steps if rows > 1 else ():
            prices.note_forward(rows, one)
    for rows, steps in noted.items():
        assert prices.forward(rows) == median_low(steps)
    # Between two that were measured on the line through them; beyond the last never cheaper than that.
    assert prices.forward(2) == pytest.approx(1 + 0.7 / 3)
    assert prices.forward(7) == pytest.approx(1.7 + 0.5 * 3 / 5)
    assert prices.forward(11) == pytest.approx(2.2 - 0.1 * 2 / 3)
    assert prices.forward(16) == pytest.approx(2.1 + 1.1 / 11 * 4)
    assert prices.worst(12) == prices.forward(12)
    assert prices.worst(16) == pytest.approx(2.1 * 16 / 12)


def check_only_verified_rows_become_prices(target: Target) -> None:
    """A plan of 16 rows that finds 3 proposals verifies 4; one that finds none is a plain step, as a probe is."""
    prices = measured(GPU)
    before = [prices.forward(rows) for rows in range(1, BLOCK + 1)]
    pace = Pace(BLOCK, prices, True, 600)
    for _ in range(3):
        pace.note(Cycle(PLAIN, [], [1], 0.0, STEP))
    pace.note(Cycle(Plan(True, BLOCK), [], [1], 0.0, STEP))
    pace.note(Cycle(Plan(True, 1), [5, 6, 7], [1], 0.0, STEP))
    assert [prices.forward(rows) for rows in range(1, BLOCK + 1)] == before
    for _ in range(3):
        pace.note(Cycle(Plan(True, BLOCK), [5, 6, 7], [1], 0.0, 1.8 * STEP))
    changed = [rows for rows in range(1, BLOCK + 1) if prices.forward(rows) != before[rows - 1]]
    assert prices.forward(4) == pytest.approx(1.8)
    assert changed == [3, 4, 5, 6, 7]


def check_prices_come_from_auto_alone(target: Target) -> None:
    """ "on" repeats its cycles, whatever they take, and "off" drafts nothing: neither learns or earns."""
    engine = drafting(target, 3)
    for mode in ("on", "off"):
        engine.generate(PROMPT, 40, stop=(), speculation=mode)
        assert (engine._prices.draft, engine._prices.has_verified, engine._prices.fund) == (None, False, 0.0)
    engine.generate(PROMPT, 100, stop=(), speculation="auto")
    assert engine._prices.draft is not None


def prices_of_planned_rows(self: Pace, cycle: Cycle) -> None:
    right_note(self, cycle)
    if self.retires and cycle.plan.rows > cycle.rows:
        self._prices.note_forward(cycle.plan.rows, cycle.verify_s / self._step)


def nearest_price(self: Prices, rows: int) -> float:
    return min(self._known(), key=lambda known: abs(known[0] - rows))[1]


def price_on_the_last_line(self: Prices, rows: int) -> float:
    known = self._known()
    if rows <= known[-1][0]:
        return right_forward(self, rows)
    (r0, p0), (r1, p1) = known[-2:]
    return p1 + (p1 - p0) / (r1 - r0) * (rows - r1)


def mean_price(self: Prices) -> list[tuple[int, float]]:
    return [(rows, sum(measured) / len(measured)) for rows, measured in enumerate(self._forward) if measured]


def worst_is_likely(self: Prices, rows: int) -> float:
    return self.forward(rows)


def priced_always(block: int, prices: Prices | None, adaptive: bool, budget: int) -> Pace:
    """As if "on" wrote into the prices of the engine too."""
    made = Pace(block, prices or SEEN[-1], adaptive, budget)
    return made


SEEN: list[Prices] = []


def remembering(self: Generation, *args: Any) -> None:
    SEEN.append(args[3])
    right_init(self, *args)


# ---- what is counted and traced ----------------------------------------------------------------------------


def check_probes_and_plain_cycles(target: Target) -> None:
    """Every cycle is one kind, in the result as in the trace; a probe without proposals is none."""
    engine = drafting(target, 0, ideas=(7, 7, 0, 3))
    with pytest.MonkeyPatch.context() as patch:
        Clock(patch, draft=0.5, row=0.4)
        for _ in range(2):
            engine._prices.note_draft(0.5)
        for rows in (2, ROWS):
            engine._prices.note_forward(rows, 1 + 0.4 * (rows - 1))
        got, cycles = traced(engine)
    kinds = Counter(record["kind"] for record in cycles)
    planned = sum(record["draft_s"] > 0 for record in cycles)
    assert (got.probes, got.capped_cycles) == (kinds["probe"], 0)
    assert planned == got.probes + 1 > 3
    assert got.retired_cycles == kinds["plain"] + kinds["probe"] == got.cycles
    assert [record["drafted"] for record in cycles if record["kind"] == "probe"][:3] == [7, 7, 3]
    assert not got.block_sizes
    for mode in ("on", "off"):
        got, cycles = traced(drafting(target, 2), 40, speculation=mode)
        assert (got.probes, got.retired_cycles) == (0, 0)


def check_traced_blocks(target: Target) -> None:
    """Rows as they were verified: of a plan that found fewer proposals, of an adaptive one, of one the budget cut."""
    for options, ideas in (
        ({"adaptive_b": False}, (7, 3, 0, 1)),
        ({"adaptive_b": True}, (7,)),
        ({"block_size": 5}, (4,)),
    ):
        seen: list[int] = []
        engine = drafting(target, 3, 0, 1, ideas=ideas)
        with pytest.MonkeyPatch.context() as patch:
            verify = WarmState.verify

            def counted(self: WarmState, anchor: int, drafts: Any, verify: Any = verify, seen: Any = seen) -> Any:
                seen.append(1 + len(drafts))
                return verify(self, anchor, drafts)

            patch.setattr(WarmState, "verify", counted)
            got, cycles = traced(engine, 60, speculation="on", **options)
        assert [record["block"] for record in cycles] == seen
        assert got.block_sizes == Counter(rows for rows in seen if rows > 1)
        assert [record["accepted"] for record in cycles] == got.accepted
        assert [record["produced"] for record in cycles] == got.produced
        most = options.get("block_size", ROWS) - 1
        asked = [min(most, 60 - 1 - sum(got.produced[:n])) for n in range(got.cycles)]
        given = [min(a, i) for a, i in zip(asked, list(ideas) * 60, strict=False)]
        assert [record["drafted"] for record in cycles] == given


def check_traced_seconds(target: Target) -> None:
    """Every second of a cycle is that of the draft or of the target, and is neither lost nor told twice."""
    engine = drafting(target, 2)
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock(patch, draft=0.25, row=0.5)
        _, cycles = traced(engine, 40, **BLOCKS)
        whole = clock.now
    assert [record["draft_s"] for record in cycles] == [0.25 if record["drafted"] else 0.0 for record in cycles]
    assert [record["verify_s"] for record in cycles] == [1 + 0.5 * (record["block"] - 1) for record in cycles]
    assert sum(record["draft_s"] + record["verify_s"] for record in cycles) == pytest.approx(whole)


def check_fallback(target: Target) -> None:
    """The reason stands where a draft that was given could have been used, and only there."""

    def broken() -> Any:
        raise CheckpointError("it is not there")

    failing, working = Engine(target, broken, kv_format="f32"), drafting(target, 3)
    for opened in (failing, failing.conversation()):
        assert "it is not there" in str(opened.generate(PROMPT, 3, stop=()).fallback)
        assert opened.generate(PROMPT, 3, stop=(), speculation="off").fallback is None
    for mode in ("auto", "on", "off"):
        assert working.generate(PROMPT, 3, stop=(), speculation=mode).fallback is None
    assert Engine(target, kv_format="f32").generate(PROMPT, 3, stop=()).fallback is None


def probes_as_planned(self: Generation, cycle: Cycle, context: int) -> None:
    right_count(self, cycle, context)
    self.result.probes += cycle.plan.draft and cycle.plan.rows == 1 and cycle.kind != "probe"


def probes_not_retired(self: Generation, cycle: Cycle, context: int) -> None:
    right_count(self, cycle, context)
    self.result.retired_cycles -= cycle.kind == "probe"


def all_plain_cycles_retired(self: Generation, cycle: Cycle, context: int) -> None:
    right_count(self, cycle, context)
    self.result.retired_cycles += cycle.rows == 1 and not (self._pace and cycle.plan.rows == 1)


def rows_as_planned(self: Cycle) -> int:
    return self.plan.rows


def rows_as_drafted(self: Cycle) -> int:
    return 1 + len(self.drafts)


def drafted_as_verified(self: Trace, context: int, result: GenerationResult, cycle: Cycle) -> None:
    right_cycle(self, context, result, cycle._replace(drafts=cycle.drafts[: cycle.rows - 1]))


def draft_told_twice(self: Generation, cycle: Cycle, context: int) -> None:
    right_count(self, cycle._replace(verify_s=cycle.verify_s + cycle.draft_s), context)


def draft_told_as_verify(self: Generation, cycle: Cycle, context: int) -> None:
    right_count(self, cycle._replace(verify_s=cycle.verify_s + cycle.draft_s, draft_s=0.0), context)


def fallback_whatever_was_asked(**values: Any) -> Request:
    return Request(**{**values, "fallback": values["fallback"] or ("off" if values["speculation"] == "off" else None)})


def fallback_forgotten(**values: Any) -> Request:
    return Request(**{**values, "fallback": None})


# ---- all of it ---------------------------------------------------------------------------------------------

right_pay, right_note, right_forward = Pace._pay_draft, Pace.note, Prices.forward
right_count, right_cycle, right_init = Generation._note, Trace.cycle, Generation.__init__
right_note_forward = Prices.note_forward

Check = Callable[[Target], None]
FAULTS: dict[Check, list[tuple[Any, str, Any]]] = {
    check_the_share_of_the_prefill: [
        (Pace, "_pay_draft", share_forgiven_to_every_block),
        (Pace, "_pay_draft", share_forgiven_until_spent),
        (Pace, "prefilled", share_of_everything),
        (Pace, "prefilled", told_to_nobody),
    ],
    check_the_loop_tells_of_the_prefill: [
        (Generation, "_note_prefill", prefill_not_told),
        (Pace, "_pay_draft", share_forgiven_to_every_block),
    ],
    check_a_build_is_not_charged_in_full: [
        (Pace, "_pay_draft", block_charged_in_full),
        (Pace, "note", pass_charged_in_full),
        (Prices, "note_forward", pass_priced_in_full),
        (Prices, "note_forward", slow_pass_priced),
    ],
    check_finding_out: [
        (Pace, "_can_bear", tried_in_any_budget),
        (Pace, "_can_bear", tried_where_earned_alone),
        (Pace, "_can_bear", fund_unused),
        (Pace, "note", fund_never_spent),
    ],
    check_prices_of_rows_that_were_not_measured: [
        (Prices, "forward", nearest_price),
        (Prices, "forward", price_on_the_last_line),
        (Prices, "_known", mean_price),
        (Prices, "worst", worst_is_likely),
    ],
    check_only_verified_rows_become_prices: [(Pace, "note", prices_of_planned_rows)],
    check_prices_come_from_auto_alone: [(loop, "Pace", priced_always)],
    check_probes_and_plain_cycles: [
        (Generation, "_note", probes_as_planned),
        (Generation, "_note", probes_not_retired),
        (Generation, "_note", all_plain_cycles_retired),
    ],
    check_traced_blocks: [
        (Cycle, "rows", property(rows_as_planned)),
        (Cycle, "rows", property(rows_as_drafted)),
        (Trace, "cycle", drafted_as_verified),
    ],
    check_traced_seconds: [
        (Generation, "_note", draft_told_twice),
        (Generation, "_note", draft_told_as_verify),
    ],
    check_fallback: [
        (conversation, "Request", fallback_whatever_was_asked),
        (conversation, "Request", fallback_forgotten),
    ],
}


@pytest.mark.parametrize("check", FAULTS, ids=lambda check: check.__name__)
def test_right(target: Target, check: Check) -> None:
    check(target)


@pytest.mark.parametrize(
    ("check", "fault"),
    [(check, fault) for check, faults in FAULTS.items() for fault in faults],
    ids=lambda value: getattr(value[2], "fget", value[2]).__name__ if isinstance(value, tuple) else value.__name__,
)
def test_fault_is_caught(
    target: Target, check: Check, fault: tuple[Any, str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault[2] is priced_always:
        monkeypatch.setattr(Generation, "__init__", remembering)
    monkeypatch.setattr(*fault)
    with pytest.raises((AssertionError, StopIteration)):
        check(target)
