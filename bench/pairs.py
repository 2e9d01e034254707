"""Paired samples of two arms: their order, the ratio with its interval, and when a verdict may be given. Pure.

The declared order is off,on,on,off,off,on. Every second repeat is its mirror, on,off,off,on,on,off: over two repeats
each arm goes first in half of the pairs, and a steady drift of the machine favours neither. A pair is two neighbours.
Autoregressive anchors stand before the first repeat, between the halves, and behind the last.

Interval: percentile bootstrap of the median over whole pairs, a pair never split (Efron and Tibshirani, An Introduction
to the Bootstrap, 1993, chapter 13), from a fixed seed. It says how large the effect is. It does not by itself hold
the rate of false verdicts over few pairs: of 3 pairs the interval is [smallest, largest] at any usual level, which
leaves out 1 in 2 x (1/2)^3 = 25% of the runs of a thing against itself; of 12 pairs at 99.9% it does in 0.6%, where 11
agree. So a verdict demands two things more:

- an exact sign test (Dixon and Mood, 1946): if the arms are equal a pair is on either side of 1 with even odds, and
  at least k of n pairs agree with probability 2 x sum_{i>=k} C(n, i) / 2^n. This may be `MAX_CHANCE` = 1/2000 at most:
  12 of 12 pairs (0.049%), 17 of 18 (0.0145%), 21 of 24 (0.028%). The chance that 20 runs of a thing against itself give
  no verdict is then at least (1 - 1/2000)^20 = 99%.
- `MIN_PAIRS` = 12: with 11 even full agreement (0.098%) would not do.

The test needs no assumption on the noise but that it treats the two places of a pair alike over the mirrored order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hipfire_kernels.errors import InputError

OFF, ON, ANCHOR = "off", "on", "ar"
DECLARED = (OFF, ON, ON, OFF, OFF, ON)
PAIRS_PER_REPEAT = len(DECLARED) // 2

LEVEL = 0.999
"""Coverage that the interval aims at."""

MAX_CHANCE = 1 / 2000
"""Largest chance of the signs of a verdict among equal arms."""

MIN_PAIRS = 12
RESAMPLES = 100_000
"""50 of them lie beyond each end of a 99.9% interval."""

SEED = 20676


def order(repeats: int) -> tuple[str, ...]:
    """The arm of each sample, anchors included.

    Args:
        repeats: of the declared order; even, so that the mirrored ones balance the others, and at least 4.

    Raises:
        InputError: another number.
    """
    least = MIN_PAIRS // PAIRS_PER_REPEAT
    if repeats < least or repeats % 2:
        raise InputError(
            f"repeats is {repeats}; required: an even number, at least {least}: of fewer than {MIN_PAIRS} pairs no "
            f"agreement is beyond chance"
        )
    arms: list[str] = [ANCHOR]
    for repeat in range(repeats):
        arms += DECLARED[:: -1 if repeat % 2 else 1]
        if repeat + 1 in (repeats // 2, repeats):
            arms.append(ANCHOR)
    return tuple(arms)


def ratios(samples: Sequence[tuple[str, float]]) -> tuple[float, ...]:
    """off over on of each pair, in order: above 1 where `on` took less.

    Args:
        samples: arm and time of every sample, in the order of `order`; anchors take no part.

    Raises:
        InputError: two neighbours are not one of each arm, or a time is not positive.
    """
    timed = [(arm, value) for arm, value in samples if arm != ANCHOR]
    found = []
    for first, second in _neighbours(timed):
        pair = dict((first, second))
        if set(pair) != {OFF, ON} or not all(math.isfinite(v) and v > 0 for v in pair.values()):
            raise InputError(f"{first} and {second} are no pair; required: one of each arm, with positive times")
        found.append(pair[OFF] / pair[ON])
    return tuple(found)


def _neighbours(timed: Sequence[tuple[str, float]]) -> Iterator[tuple[tuple[str, float], tuple[str, float]]]:
    if len(timed) % 2:
        raise InputError(f"there are {len(timed)} samples; required: pairs")
    return zip(timed[::2], timed[1::2], strict=True)


def interval(pairs: Sequence[float], level: float = LEVEL, seed: int = SEED) -> tuple[float, float]:
    """Percentile bootstrap of the median ratio over whole pairs; the same every time."""
    values = np.sort(np.asarray(pairs, float))
    picks = np.random.default_rng(seed).integers(0, len(values), (RESAMPLES, len(values)))
    picks.sort(axis=1)  # of sorted values: the middle picks are the middle values
    middle = (values[picks[:, (len(values) - 1) // 2]] + values[picks[:, len(values) // 2]]) / 2
    low, high = np.quantile(middle, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def chance(agreeing: int, pairs: int) -> float:
    """Two-sided chance that at least so many of the pairs agree on a side although the arms are equal."""
    tail = sum(math.comb(pairs, k) for k in range(agreeing, pairs + 1))
    return min(1.0, math.ldexp(2 * tail, -pairs))


@dataclass(frozen=True)
class Judgement:
    """What the pairs say.

    Attributes:
        ratio: median of off over on: above 1 where `on` is faster.
        interval: around it, at `level`.
        pairs: how many.
        agreeing: how many of them lie on the ratio's side of 1; a ratio of exactly 1 is on neither.
        chance: of that much agreement among equal arms.
        verdict: "on is faster", "off is faster", or None: no verdict.
    """

    ratio: float
    interval: tuple[float, float]
    level: float
    pairs: int
    agreeing: int
    chance: float
    verdict: str | None

    def as_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Judgement:
        """The reverse of `as_dict`."""
        low, high = values["interval"]
        return cls(**{**values, "interval": (low, high)})

    def describe(self) -> str:
        """One line: the verdict, or what kept it back, and the figures."""
        low, high = self.interval
        figures = (
            f"off/on {self.ratio:.4f} ({low:.4f} .. {high:.4f} at {self.level:.1%}), {self.agreeing} of {self.pairs} "
            f"pairs agree (among equal arms: {self.chance:.2g})"
        )
        if self.verdict:
            return f"{self.verdict}: {figures}"
        kept = f"the signs alone would do that too often (more than {MAX_CHANCE:g})"
        return f"no verdict, {'the interval includes 1' if low <= 1 <= high else kept}: {figures}"


def judge(pairs: Sequence[float]) -> Judgement:
    """The ratio, and a verdict where interval, signs and number of pairs all allow one."""
    middle, (low, high) = float(np.median(pairs)), interval(pairs)
    above, below = sum(r > 1 for r in pairs), sum(r < 1 for r in pairs)
    agreeing = above if middle > 1 else below if middle < 1 else 0
    odds = chance(agreeing, len(pairs))
    shown = len(pairs) >= MIN_PAIRS and odds <= MAX_CHANCE and (low > 1 or high < 1)
    verdict = ("on is faster" if middle > 1 else "off is faster") if shown else None
    return Judgement(middle, (low, high), LEVEL, len(pairs), agreeing, odds, verdict)
