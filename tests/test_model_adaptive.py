"""The pace of speculation, on simulated pairs: what it picks, and what trying costs at most."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pace_lab import ALWAYS, BLOCK, CPU, FREE, GPU, NEVER, OFTEN, PROBE, STEP, Pair, accepted, measured, simulate

from hipfire_kernels.model.adaptive import FINDING, FIRST_DRAFT, PLAIN, SHARE, Acceptance, Cycle, Pace, Plan, Prices


def judged(*blocks: int) -> Acceptance:
    """The acceptance after blocks of 15 drafts, so many of which came true."""
    acceptance = Acceptance(15)
    for agreed in blocks:
        acceptance.proposed(range(15))
        acceptance.produced([*range(agreed), 99])
    return acceptance


def test_expected_tokens() -> None:
    assert judged().expected(1) == 1
    assert judged().expected(4) == 1 + 0.5 + 0.25 + 0.125
    assert judged(3).expected(5) == 1 + 0.75 + 0.625 + 0.5625 + 0.03125
    assert judged(*[3] * 60).expected(16) == pytest.approx(4, abs=0.01)
    # About the last eight blocks count.
    assert 1.2 < judged(*[15] * 60, *[0] * 16).expected(16) < 3


@pytest.mark.parametrize("parts", [[2, 1, 4], [1] * 7, [7]])
@pytest.mark.parametrize("agreed", [0, 1, 2, 5, 6])
def test_a_block_is_judged_by_the_tokens_that_come_whatever_was_verified(parts: list[int], agreed: int) -> None:
    acceptance, whole = Acceptance(6), Acceptance(6)
    tokens = [*range(agreed), 50, 51, 52, 53, 54, 55, 56][:7]
    for one in (acceptance, whole):
        one.proposed(range(6))
    whole.produced(tokens)
    for size in parts:
        acceptance.produced(tokens[:size])
        tokens = tokens[size:]
    assert not acceptance.is_waiting
    assert [acceptance.expected(r) for r in range(1, 8)] == [whole.expected(r) for r in range(1, 8)]
    assert acceptance.expected(7) == 1 + sum((0.5**j + (j <= agreed)) / 2 for j in range(1, 7))


def test_what_has_come_counts_before_the_block_has_ended() -> None:
    acceptance = Acceptance(6)
    acceptance.proposed(range(6))
    acceptance.produced([0, 1])
    assert [acceptance.expected(r) for r in (2, 3, 4)] == [1.75, 1.75 + 0.625, 1.75 + 0.625 + 0.125]


def test_a_block_waits_until_a_token_differs() -> None:
    acceptance = Acceptance(6)
    acceptance.proposed([])
    assert not acceptance.is_waiting
    acceptance.proposed(range(6))
    acceptance.produced([0, 1, 2])
    assert acceptance.is_waiting
    acceptance.produced([7])
    assert not acceptance.is_waiting
    acceptance.proposed(range(3))
    acceptance.produced([0, 1, 2])
    assert not acceptance.is_waiting


def test_prices() -> None:
    prices = Prices()
    assert (prices.draft, *map(prices.worst, (2, 16))) == (None, 2, 16)
    assert prices.forward(11) == 1.5
    for steps, price in ((4.0, 4.0), (0.5, 0.5), (0.7, 0.7), (9.0, 0.7), (0.1, 0.7), (0.6, 0.6)):
        prices.note_draft(steps)
        assert prices.draft == price
    prices.note_forward(3, 1.5)
    assert [prices.forward(r) for r in (1, 2, 3, 5)] == [1, 1.25, 1.5, 2]
    assert [prices.worst(r) for r in (2, 3, 6)] == [1.25, 1.5, 3]
    prices.note_forward(7, 3.5)
    assert [prices.forward(r) for r in (2, 5, 7, 13)] == pytest.approx([1.25, 2.5, 3.5, 6])
    before = prices.forward(9)
    prices.note_forward(9, 900.0)
    assert prices.forward(9) == before
    prices.note_forward(9, 900.0)
    assert prices.forward(9) == 4.5
    prices.note_forward(9, 4.0)
    assert prices.forward(9) == 4
    cheaper = Prices()
    cheaper.note_forward(2, 0.9)
    assert cheaper.forward(16) == 0.9


def test_the_numbers_of_the_docstring() -> None:
    assert SHARE == 0.02
    cpu = simulate(Pair(1.3, 1 / 3), NEVER, 1000, measured(Pair(1.3, 1 / 3)))
    drafted = [i for i, plan in enumerate(cpu.plans) if plan.draft]
    assert {b - a for a, b in pairwise(drafted)} <= {65, 66}
    assert cpu.probes == 15
    assert cpu.steps == pytest.approx(1019.5)
    assert judged(*[3, 0, 1, 2, 1, 1, 2, 1] * 5).expected(4) == pytest.approx(2.3, abs=0.1)
    gpu = simulate(GPU, OFTEN, 300, measured(GPU), adaptive=False)
    assert gpu.plans[:16] == [PLAIN] * 15 + [Plan(True, 16)]


@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("pair", [CPU, GPU, FREE, Pair(4, 0.26), Pair(0.5, 1.0)])
@pytest.mark.parametrize("kept", [NEVER, accepted(0.2), accepted(0.5, 0.2), accepted(0.02, *[1.0] * 14)])
def test_low_acceptance_never_costs_five_percent(
    pair: Pair, kept: Callable[[random.Random], int], adaptive: bool
) -> None:
    for seed in range(6):
        run = simulate(pair, kept, 500, measured(pair), adaptive=adaptive, seed=seed)
        assert run.slowdown <= 1.02
        assert run.lag <= 0.02 * 500


@settings(max_examples=150, deadline=None)
@given(
    st.floats(0, 6), st.floats(0, 1), st.lists(st.floats(0, 1), max_size=15), st.integers(1, 400), st.integers(0, 99)
)
def test_no_pair_and_no_prompt_falls_five_percent_behind(
    draft: float, row: float, shares: list[float], count: int, seed: int
) -> None:
    pair = Pair(draft, row)
    run = simulate(pair, accepted(*shares), count, measured(pair), seed=seed)
    # Rounding aside it is 1.02. It holds at every moment: a request may end at any token.
    assert run.steps <= 1.0201 * run.tokens
    assert run.lag <= 0.0201 * run.tokens


@pytest.mark.parametrize(("pair", "kept", "least"), [(GPU, OFTEN, 0.9), (GPU, ALWAYS, 0.8), (CPU, ALWAYS, 0.85)])
def test_high_acceptance_gets_nearly_all_of_its_gain(
    pair: Pair, kept: Callable[[random.Random], int], least: float
) -> None:
    auto = simulate(pair, kept, 2000, measured(pair))
    best = min(simulate(pair, kept, 2000, None, adaptive=a).steps for a in (True, False))
    assert best / auto.steps > least


def test_an_engine_pays_once_for_knowing_the_price() -> None:
    prices = Prices()
    first = simulate(CPU, NEVER, 400, prices)
    second = simulate(CPU, NEVER, 400, prices)
    assert [i for i, plan in enumerate(first.plans) if plan.draft][:2] == [3, 130]
    assert next(i for i, plan in enumerate(second.plans) if plan.draft) == 65
    assert first.slowdown < 1.02
    # A first price that was too high is not kept for ever, where requests are too short to earn it.
    prices = Prices()
    for delay, draft in ((9.0, FIRST_DRAFT), (0.0, CPU.draft)):
        simulate(CPU, NEVER, 80, prices, delays=iter([0.0, 0.0, 0.0, delay, *[0.0] * 99]))
        assert prices.draft == pytest.approx(draft)
    # The first verify pass is a small one, and does not have to be earned either.
    prices = Prices()
    run = simulate(GPU, ALWAYS, 80, prices)
    assert next(plan for plan in run.plans if plan.rows > 1).rows == 2
    assert sum(plan.draft for plan in run.plans[:12]) > 2


PAIRS = [Pair(d, row) for d in (0.001, 0.1, 0.5, 1.3, 3.0, FIRST_DRAFT) for row in (0.0133, 0.1, 0.33, 0.6, 1.0)]


@pytest.mark.parametrize("count", [1, 4, 16, 40, 79, 80, 128, 300])
def test_the_first_request_of_an_engine_does_not_fall_five_percent_behind(count: int) -> None:
    for pair, kept, seed in itertools.product(PAIRS, (NEVER, accepted(0.2), OFTEN), range(2)):
        run = simulate(pair, kept, count, Prices(), seed=seed)
        assert run.slowdown <= 1.0501
        assert count >= FIRST_DRAFT / FINDING or not any(plan.draft for plan in run.plans)


@pytest.mark.parametrize("count", [4, 16, 40, 79, 80, 128])
def test_an_engine_of_short_requests_does_not_fall_five_percent_behind(count: int) -> None:
    """It finds out in one of them, once all together have earned it; what each is behind by stays within that."""
    for pair, kept in itertools.product(PAIRS, (NEVER, accepted(0.2), OFTEN)):
        prices, steps, tokens = Prices(), 0.0, 0
        for seed in range(1200 // count):
            run = simulate(pair, kept, count, prices, seed=seed)
            steps, tokens = steps + run.steps, tokens + run.tokens
            assert steps <= (1.0501 if count >= FIRST_DRAFT / FINDING else 1.0201) * tokens


@pytest.mark.parametrize(("count", "most"), [(8, 0.95), (16, 0.8), (40, 0.6)])
def test_an_engine_of_short_requests_speculates_in_the_end(count: int, most: float) -> None:
    prices = Prices()
    runs = [simulate(GPU, OFTEN, count, prices, seed=seed) for seed in range(800 // count)]
    late = runs[len(runs) // 2 :]
    assert sum(run.steps for run in late) < most * sum(run.tokens for run in late)


def test_a_kernel_build_is_not_taken_for_a_price() -> None:
    """The first plain step and the first block take seconds more."""
    prices = Prices()
    simulate(GPU, OFTEN, 600, prices, delays=iter([2.0, 0.0, 0.0, 3.0, *[0.0] * 900]))
    assert prices.draft == pytest.approx(GPU.draft)
    run = simulate(GPU, OFTEN, 400, prices)
    assert run.slowdown < 0.5


def test_the_projection_of_the_prompt_is_no_price_of_a_block() -> None:
    prices = measured(GPU)
    long = simulate(GPU, OFTEN, 200, prices, prefill=5.0, projection=0.06)
    assert prices.draft == pytest.approx(GPU.draft)
    assert sum(plan.draft for plan in long.plans[:16]) >= 3
    often = measured(CPU)
    for _ in range(5):
        assert simulate(CPU, NEVER, 70, often, projection=0.01).probes == 1
    assert often.draft == CPU.draft
    # Without a prefill to pay for it, it has to be earned.
    short = simulate(GPU, NEVER, 2000, prices, projection=0.06)
    drafted = [i for i, plan in enumerate(short.plans) if plan.draft]
    assert drafted[1] - drafted[0] > 0.06 / STEP / 0.02 - 5


def test_retires_and_resumes() -> None:
    """Good, bad, good again: while it is bad it goes plainly, with probes, and one of them brings it back."""
    parts = iter([*[OFTEN] * 60, *[NEVER] * 40])
    prices = measured(GPU)
    run = simulate(GPU, lambda rng: next(parts, OFTEN)(rng), 1200, prices)
    kinds = "".join("p" if plan == PROBE else "v" if plan.rows > 1 else "-" for plan in run.plans)
    assert "vvvvvvvvvv" in kinds[:40]
    bad = kinds[kinds.index("vvvvvvvvvv") :]
    assert "-p----p----p-" in bad
    assert bad.rstrip("-").endswith("vvvvvvvvvv")
    assert run.slowdown < 0.7


def test_what_a_good_stretch_saved_is_not_spent_on_a_bad_one() -> None:
    blocks = [0]

    def draw(rng: random.Random) -> int:
        blocks[0] += 1
        return 15 if blocks[0] <= 40 else 0

    run = simulate(CPU, draw, 2000, measured(CPU))
    last = max(i for i, plan in enumerate(run.plans) if plan.rows > 1)
    rest = run.plans[last + 1 :]
    assert len(rest) > 500
    assert sum(plan.draft for plan in rest) * CPU.draft <= 0.02 * len(rest)


def test_fewer_rows_for_lower_acceptance_and_dearer_rows() -> None:
    def usual(pair: Pair, kept: Callable[[random.Random], int]) -> int:
        return simulate(pair, kept, 3000, measured(pair)).blocks.most_common(1)[0][0]

    assert usual(GPU, ALWAYS) == BLOCK
    assert usual(GPU, accepted(0.9, 0.8, 0.5, 0.1)) in (4, 6)
    assert usual(FREE, accepted(0.9, 0.8, 0.5, 0.1)) in (3, 4)
    assert usual(FREE, accepted(0.9, 0.1)) == 2


def test_not_adaptive_is_an_arm_of_its_own() -> None:
    kept = accepted(0.9, 0.8, 0.2)
    fixed = simulate(GPU, kept, 400, measured(GPU), adaptive=False)
    assert set(fixed.blocks) - {BLOCK} <= set(range(2, BLOCK))  # the last ones, cut by the budget
    assert fixed.blocks[BLOCK] > 0.9 * sum(fixed.blocks.values())
    assert simulate(GPU, kept, 400, measured(GPU)).blocks[BLOCK] < 10


def test_on_speculates_in_every_cycle_and_repeats_itself() -> None:
    delays = iter([random.Random(1).random() for _ in range(2000)])
    run = simulate(CPU, accepted(0.6, 0.3), 300, None, delays=delays)
    again = simulate(GPU, accepted(0.6, 0.3), 300, None)
    assert all(plan.draft and plan.rows > 1 for plan in run.plans[:-1])
    assert run.plans == again.plans
    assert set(run.blocks) >= {2, 3}
    full = simulate(CPU, accepted(0.6, 0.3), 300, None, adaptive=False)
    assert full.blocks[BLOCK] > 0.9 * sum(full.blocks.values())


def test_nothing_is_drafted_where_one_row_is_left() -> None:
    for prices in (None, measured(GPU)):
        assert Pace(BLOCK, prices, True, 100).plan(1) == PLAIN


def test_a_proposer_without_an_idea_costs_nothing_but_its_time() -> None:
    prices = measured(FREE)
    pace = Pace(BLOCK, prices, True, 100)
    for at in range(100):
        plan = pace.plan(BLOCK)
        # It has one in the first half: later plans want a block verified and get none.
        drafts = [at + j for j in range(15)] if plan.draft and at < 50 else []
        rows = min(plan.rows, 1 + len(drafts))
        pace.note(Cycle(plan, drafts, range(at, at + rows), FREE.draft * STEP, STEP * FREE.forward(rows)))
    assert plan.rows > 1
    assert [prices.forward(r) for r in (2, 16)] == [FREE.forward(r) for r in (2, 16)]
    # What such a cycle takes is a plain step.
    for _ in range(8):
        pace.note(Cycle(Plan(True, 4), [], [1], 0.0, 3 * STEP))
    assert pace._step == 3 * STEP


def test_a_step_that_another_process_held_up_is_no_measure() -> None:
    pace = Pace(BLOCK, measured(CPU), True, 100)
    for seconds in (STEP, STEP, 50 * STEP, STEP):
        pace.note(Cycle(pace.plan(BLOCK), [], [1], 0.0, seconds))
    assert pace._step == STEP
