"""The arithmetic of A/B runs: order, pairs, interval, and how often equal arms would get a verdict."""

from __future__ import annotations

import numpy as np
import pytest

from hipfire_kernels.bench import pairs
from hipfire_kernels.bench.pairs import ANCHOR, DECLARED, OFF, ON
from hipfire_kernels.errors import InputError


def timed(repeats: int) -> list[str]:
    return [arm for arm in pairs.order(repeats) if arm != ANCHOR]


def test_the_order_is_the_declared_one_and_its_mirror() -> None:
    assert tuple(timed(4)) == 2 * (DECLARED + DECLARED[::-1])
    assert DECLARED == (OFF, ON, ON, OFF, OFF, ON)


@pytest.mark.parametrize("repeats", [4, 6, 10])
def test_the_order_favours_no_arm(repeats: int) -> None:
    """Each arm goes first in half of the pairs, and a steady drift has the same sum over both."""
    arms = timed(repeats)
    assert arms[::2].count(OFF) == arms[::2].count(ON)
    places = {name: sum(i for i, arm in enumerate(arms) if arm == name) for name in (OFF, ON)}
    assert places[OFF] == places[ON]


def test_anchors_stand_at_both_ends_and_between_the_halves() -> None:
    order = pairs.order(4)
    assert [i for i, arm in enumerate(order) if arm == ANCHOR] == [0, 13, 26]


@pytest.mark.parametrize("repeats", [0, 2, 3, 5, -4])
def test_too_few_or_unbalanced_repeats_are_refused(repeats: int) -> None:
    with pytest.raises(InputError, match="even number, at least 4"):
        pairs.order(repeats)


def test_ratios_are_of_neighbours_and_pass_over_anchors() -> None:
    samples = [(ANCHOR, 9.0), (OFF, 4.0), (ON, 2.0), (ANCHOR, 9.0), (ON, 5.0), (OFF, 15.0)]
    assert pairs.ratios(samples) == (2.0, 3.0)
    for wrong in ([(OFF, 1.0), (OFF, 1.0)], [(OFF, 1.0)], [(OFF, 1.0), (ON, 0.0)], [(OFF, float("nan")), (ON, 1.0)]):
        with pytest.raises(InputError, match=r"no pair|required: pairs"):
            pairs.ratios(wrong)


def test_the_chances_that_the_docstring_states() -> None:
    assert pairs.chance(12, 12) == pytest.approx(0.00049, rel=0.01)
    assert pairs.chance(11, 11) > pairs.MAX_CHANCE >= pairs.chance(12, 12)
    assert pairs.chance(17, 18) == pytest.approx(0.000145, rel=0.01)
    assert pairs.chance(21, 24) == pytest.approx(0.000277, rel=0.01)
    assert pairs.chance(9, 18) == 1
    assert (1 - pairs.MAX_CHANCE) ** 20 > 0.99


def test_the_interval_is_the_same_every_time_and_within_the_pairs() -> None:
    values = [1.1, 1.3, 0.9, 1.2, 1.15, 1.05, 1.4, 1.22, 1.18, 1.3, 1.01, 1.12]
    low, high = pairs.interval(values)
    assert (low, high) == pairs.interval(values[::-1])
    assert min(values) <= low < float(np.median(values)) < high <= max(values)
    assert pairs.interval([2.0] * 12) == (2.0, 2.0)


def test_the_interval_is_of_the_level_that_is_said() -> None:
    """Of 101 evenly spaced ratios: the median of resamples is at most so far from the middle in 99.9% of them."""
    values = [1 + i / 1000 for i in range(101)]
    assert pairs.LEVEL == 0.999
    assert pairs.judge(values).level == 0.999
    assert pairs.interval(values) == pairs.interval(values, 0.999) == pairs.judge(values).interval
    widths = [high - low for low, high in (pairs.interval(values, level) for level in (0.9, 0.99, 0.999))]
    # 1.64, 2.58 and 3.29 times the standard error of a median of 101, half a range over the root of 101.
    expected = [2 * z * 0.1 / (2 * 101**0.5) for z in (1.645, 2.576, 3.291)]
    assert widths == pytest.approx(expected, rel=0.1)
    assert f"at {0.999:.1%}" in pairs.judge(values).describe()


def test_a_bootstrap_of_three_pairs_alone_would_judge_a_quarter_of_equal_arms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why an interval that leaves out 1 is not enough."""
    monkeypatch.setattr(pairs, "RESAMPLES", 4000)
    rng = np.random.default_rng(0)
    runs = [pairs.interval(np.exp(0.02 * rng.standard_normal(3))) for _ in range(200)]
    assert 0.17 < sum(low > 1 or high < 1 for low, high in runs) / len(runs) < 0.33


@pytest.mark.parametrize("repeats", [4, 6])
def test_equal_arms_get_no_verdict(repeats: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """400 runs with heavy tails and a drift of 30%; the signs alone allow 1 in 2,000."""
    monkeypatch.setattr(pairs, "RESAMPLES", 4000)
    rng = np.random.default_rng(repeats)
    arms = timed(repeats)
    drift = np.linspace(1, 1.3, len(arms))
    verdicts = []
    for _ in range(400):
        times = drift * np.exp(0.05 * rng.standard_t(2, len(arms)))
        verdicts.append(pairs.judge(pairs.ratios(list(zip(arms, times, strict=True)))).verdict)
    assert sum(v is not None for v in verdicts) <= 1


def test_a_difference_well_above_the_noise_is_found_in_either_direction() -> None:
    rng = np.random.default_rng(1)
    noise = np.exp(0.01 * rng.standard_normal(18))
    assert pairs.judge(1.05 * noise).verdict == "on is faster"
    assert pairs.judge(noise / 1.05).verdict == "off is faster"


def test_what_keeps_a_verdict_back() -> None:
    assert pairs.judge([1.2] * 11).verdict is None, "too few pairs"
    assert pairs.judge([1.2] * 11 + [0.99]).verdict is None, "11 of 12 signs"
    assert pairs.judge([1.2] * 17 + [0.99]).verdict == "on is faster", "17 of 18 signs"
    assert pairs.judge([1.0] * 18).verdict is None
    assert pairs.judge([1.2] * 16 + [1.0, 1.0]).verdict is None, "a ratio of 1 is on neither side"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pairs, "interval", lambda values: (0.99, 1.3))
        assert pairs.judge([1.2] * 18).verdict is None, "the interval"
    assert "the interval includes 1" in pairs.judge([1.2, 0.8] * 9).describe()
    assert "the signs alone" in pairs.judge([1.2] * 11 + [0.99]).describe()
