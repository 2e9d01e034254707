"""How calls are timed, on a card and a clock of which everything is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_ab import SMALL, fake, kernels

from hipfire_kernels.archs import arch
from hipfire_kernels.bench import ab, pairs
from hipfire_kernels.bench.pairs import ANCHOR, OFF, ON
from hipfire_kernels.running import timing
from hipfire_kernels.running.devices.protocol import Launch, View
from hipfire_kernels.running.timing import HostTimer, Stopwatch, Times, ratio

L2_BYTES = 1 << 20
COLD_US, WARM_US, READ_US, FIRST_US = 10.0, 1.0, 100.0, 50.0


class Card:
    """A GPU with a clock. A call takes `COLD_US` if eight times the L2 were read since it was last made, else
    `WARM_US`, and `FIRST_US` more the first three times; reading a buffer takes `READ_US`."""

    arch = arch("host")
    toolchain = None
    multiprocessors = 3

    def __init__(self) -> None:
        self.now = 0.0
        self.made: list[str] = []
        self.waits = 0
        self._reads: dict[str, int] = {}
        self._end = 1 << 20
        self._sizes: dict[int, int] = {}

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        start, size = self._end, int(np.prod(shape))
        self._end += 4 * size
        self._sizes[start] = 4 * size
        return SimpleNamespace(pointer=start, shape=tuple(shape), size=size)

    def view(self, name: str, array: Any) -> View:
        return View(array.pointer, array.shape, "f32", True)

    def write(self, array: Any, values: Any) -> None:
        assert values.shape == array.shape
        assert not values.any()

    def describe(self) -> dict[str, Any]:
        return {"multiprocessors": self.multiprocessors}

    def load(self, artifact: Any) -> str:
        return str(artifact.entry)

    def launch(self, launches: Sequence[Launch]) -> None:
        (one,) = launches
        data, _, quads, blocks = (value.value for value in one.args.values)
        assert one.kernel == "bench_read"
        assert one.grid == (blocks, 1, 1) == (4 * self.multiprocessors, 1, 1)
        assert 16 * quads <= self._sizes[data]
        self._reads = {name: read + 16 * quads for name, read in self._reads.items()}
        self.now += READ_US

    def event(self) -> Any:
        return Mark(self)

    def synchronize(self) -> None:
        self.waits += 1

    def call(self, name: str, slower: float = 1.0) -> Callable[[], None]:
        def made() -> None:
            self.now += slower * (COLD_US if self._reads.get(name, 0) >= 8 * L2_BYTES else WARM_US)
            self.now += FIRST_US * (self.made.count(name) < 3)
            self.made.append(name)
            self._reads[name] = 0

        return made


class Mark:
    def __init__(self, card: Card) -> None:
        self._card = card

    def record(self) -> Mark:
        self.at = self._card.now
        return self

    def ms_since(self, start: Mark) -> float:
        return (self.at - start.at) / 1e3


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    monkeypatch.setattr(Stopwatch, "FLUSH_BYTES", 8 * L2_BYTES)
    return Card()


def test_a_call_is_timed_alone_warmed_up_and_with_a_cold_cache(card: Any) -> None:
    times = Stopwatch(card).interleaved({"a": card.call("a"), "b": card.call("b", slower=3)}, rounds=6)
    assert times == {"a": Times((COLD_US,) * 6), "b": Times((3 * COLD_US,) * 6)}


def test_calls_are_made_in_turn_forward_and_backward(card: Any) -> None:
    Stopwatch(card).interleaved({name: card.call(name) for name in "abc"}, rounds=3, warmup=2)
    assert "".join(card.made) == "aabbcc" + "abc" + "cba" + "abc"
    assert card.waits == 1 + 3  # after the warm-up, and after each round


def test_the_cache_of_the_largest_card_is_flushed() -> None:
    h200 = 60 << 20
    assert 8 * h200 < Stopwatch.FLUSH_BYTES


def test_a_reader_reads_the_whole_buffer(card: Any) -> None:
    watch = Stopwatch(card)
    card.call("a")()
    watch.reader(card.empty((4000,), np.float32))()
    assert card._reads == {"a": 16000}


def test_on_the_host_the_clock_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is the device's that takes `WARM_US` a call, its first calls longer."""
    card = Card()
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: 1e-6 * card.now))
    times = HostTimer().interleaved({"a": card.call("a"), "b": card.call("b", slower=3)}, rounds=4)
    assert times["a"].samples == pytest.approx((WARM_US,) * 4)
    assert times["b"].samples == pytest.approx((3 * WARM_US,) * 4)
    assert "".join(card.made) == "aaabbb" + "ab" + "ba" + "ab" + "ba"


def test_what_is_said_of_samples() -> None:
    """Quartiles of 1 .. 9 are 2.5 and 7.5."""
    taken = Times(tuple(float(x) for x in (9, 1, 8, 2, 7, 3, 6, 4, 5)))
    assert (taken.median, taken.spread) == (5, 1)
    assert taken.as_dict() == {"us": 5, "min_us": 1, "spread": 1}


def test_the_ratio_is_of_pairs() -> None:
    """Not of medians: the ratios 1 .. 9 have the median 5 whatever the times are."""
    fast = Times((1.0, 100.0, 7.0, 3.0, 50.0, 2.0, 9.0, 4.0, 30.0))
    slow = Times(tuple(float(i + 1) * x for i, x in enumerate(fast.samples)))
    assert ratio(slow, fast) == pytest.approx((5, 2.5, 7.5))


# ---- A/B runs -------------------------------------------------------------------------------------------------------


def test_the_interval_covers_999_in_1000() -> None:
    """By another way: the quantiles of the bootstrap at 0.05% and 99.95%."""
    values = np.exp(0.1 * np.random.default_rng(3).standard_normal(24))
    draws = np.random.default_rng(8).choice(values, (200_000, len(values)))
    want = np.quantile(np.median(draws, axis=1), [0.0005, 0.9995])
    narrower = np.quantile(np.median(draws, axis=1), [0.005, 0.995])
    found = pairs.interval(values)
    assert all(abs(np.array(found) - want) < abs(np.array(found) - narrower) / 2)
    assert pairs.judge(values).level == 0.999


def test_an_anchor_of_one_row_is_compared_by_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 rows in 4 us and in 2 us beside one in 1 us: twice and four times as fast for each row."""
    values = {OFF: 4.0, ON: 2.0, ANCHOR: 1.0}
    experiment = kernels()
    taken = [(arm, fake(values[arm])) for arm in pairs.order(4)]
    found = ab._numbers(experiment, taken)
    assert SMALL.rows == 8
    assert found["anchor"] == {OFF: 2.0, ON: 4.0}
    assert found["medians"] == values
    with experiment.arms() as arms:
        assert {name: arm.job["rows"] for name, arm in arms.items()} == {OFF: 8, ON: 8, ANCHOR: 1}
