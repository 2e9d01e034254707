"""Every variant against the float64 oracle on the host device."""

from __future__ import annotations

import numpy as np
import pytest
from budget import some

from hipfire_kernels import families
from hipfire_kernels.authoring.family import Variant
from hipfire_kernels.checking.numbers import worst_row
from hipfire_kernels.checking.oracle import check
from hipfire_kernels.checking.parity import CONTEXTS, ROWS, Case, grid, inputs, run_attend, tile_twin
from hipfire_kernels.checking.reference import attend as reference_attend
from hipfire_kernels.running.devices.host import HostDevice
from hipfire_kernels.running.devices.protocol import Device

VARIANTS = [
    v
    for family in families().values()
    if family.records != "split" and "wmma" not in family.name
    for v in family.variants()
]
"""The split kernels, and those on matrix units, have files of their own, with fewer cases."""
ROW_VARIANTS = list(families()["attention_flash_q8_0_rows"].variants())
EVERY_HEAD_DIM = {"rows": (1, 5, 8, 31), "contexts": (1, 127, 129, 300)}


def by_name(v: Variant) -> str:
    return v.name


def is_tuned(v: Variant) -> bool:
    return dict(v.params).get("head_dim", 256) in (128, 256)


@pytest.mark.parametrize("variant", [v for v in VARIANTS if is_tuned(v)], ids=by_name)
@pytest.mark.parametrize(
    "contexts", [CONTEXTS[:6], pytest.param(CONTEXTS[6:], marks=pytest.mark.long)], ids=["short", "long"]
)
def test_tuned_variants_over_the_grid(variant: Variant, contexts: tuple[int, ...], host: Device) -> None:
    for case in grid(variant, rows=ROWS, contexts=contexts):
        result = check(variant, case, host)
        assert result.ok, result.describe()


@pytest.mark.parametrize("variant", some([v for v in VARIANTS if not is_tuned(v)], 8), ids=by_name)
def test_other_head_dims(variant: Variant, host: Device) -> None:
    for case in grid(variant, **EVERY_HEAD_DIM):
        result = check(variant, case, host)
        assert result.ok, result.describe()


@pytest.mark.parametrize("variant", ROW_VARIANTS, ids=by_name)
@pytest.mark.parametrize("ctx", [129, 2048])
def test_multirow_output_has_the_bits_of_tile_batched(variant: Variant, ctx: int, host: Device) -> None:
    for rows in ROWS:
        case = Case(rows, ctx, 12, 2, variant.head_dim, seed=rows)
        got, _ = run_attend(variant, case, host)
        want, _ = run_attend(tile_twin(variant), case, host)
        assert np.array_equal(got, want), case.describe()


@pytest.mark.parametrize(
    "variant", [*ROW_VARIANTS, tile_twin(ROW_VARIANTS[0]), tile_twin(ROW_VARIANTS[1])], ids=by_name
)
def test_a_row_has_the_same_bits_in_any_company(variant: Variant, host: Device) -> None:
    case = Case(16, 300, 8, 2, variant.head_dim, seed=5)
    whole, _ = run_attend(variant, case, host)
    for start, count in [(0, 1), (7, 1), (15, 1), (0, 4), (3, 4), (12, 4), (0, 8), (5, 8), (8, 8)]:
        part, _ = run_attend(variant, case, host, slice(start, start + count))
        assert np.array_equal(part, whole[start : start + count]), (start, count)


@pytest.mark.parametrize("variant", [*ROW_VARIANTS, tile_twin(ROW_VARIANTS[1])], ids=by_name)
def test_nan_behind_a_rows_bound_stays_behind(variant: Variant, host: Device) -> None:
    """Rows of one group see different keys; what only later rows see may be NaN without the earlier ones knowing."""
    case = Case(8, 260, 4, 2, variant.head_dim, seed=11)
    clean, _ = run_attend(variant, case, host)
    i = inputs(case)
    for row in range(case.rows):
        first = int(i.positions[row]) + 1
        kept = i.k_cache[first:].copy(), i.v_cache[first:].copy()
        i.k_cache[first:, ..., :2], i.v_cache[first:, ..., :2] = 0x7E, 0x7E
        try:
            spoiled, _ = run_attend(variant, case, host)
        finally:
            i.k_cache[first:], i.v_cache[first:] = kept
        assert np.array_equal(spoiled[: row + 1], clean[: row + 1])


@pytest.mark.parametrize("variant", some([v for v in VARIANTS if is_tuned(v)], 4), ids=by_name)
def test_thread_order_does_not_matter(variant: Variant, host: Device) -> None:
    cases = list(grid(variant, rows=(5, 13), contexts=(2, 255)))
    for case in cases:
        results = [check(variant, case, device) for device in [host, *ORDERED]]
        assert all(r.ok for r in results), results[0].describe()
        assert len({r.error for r in results}) == 1, case.describe()


ORDERED = [HostDevice(thread_order=seed) for seed in range(5)]


def test_thread_order_keeps_every_bit(host: Device) -> None:
    for variant in [*ROW_VARIANTS, tile_twin(ROW_VARIANTS[0])]:
        case = Case(13, 300, 12, 2, variant.head_dim)
        outputs = [run_attend(variant, case, device)[0] for device in [host, *ORDERED]]
        assert all(np.array_equal(outputs[0], other) for other in outputs[1:])


def test_no_visible_key_gives_zero_rows(host: Device) -> None:
    variant = families()["attention_flash_q8_0_tile_batched"].variant(head_dim=64, mask="causal")
    got, _ = run_attend(variant, Case(4, 1, 2, 1, 64), host)
    assert not got[:3].any()
    assert got[3].any()


def test_worst_row_is_not_an_average() -> None:
    want = np.ones((100, 4))
    got = want.copy()
    got[37, 2] += 0.5
    assert worst_row(got, want) == 0.5
    got[37, 2] = np.nan
    assert worst_row(got, want) == np.inf
    assert worst_row(np.full((1, 4), 1e-30), np.zeros((1, 4))) == np.inf


def test_the_oracle_agrees_with_a_loop_written_out() -> None:
    """The oracle itself, held against the definition, one scalar at a time."""
    case = Case(3, 5, 4, 2, 32, seed=1)
    i = inputs(case)
    got = reference_attend(i.q, i.k_cache, i.v_cache, i.positions)

    def value(cache: np.ndarray, key: int, kv_head: int, dim: int) -> float:
        block = cache[key, kv_head, dim // 32]
        return float(block[:2].copy().view(np.float16)[0]) * float(block[2:].view(np.int8)[dim % 32])

    for row in range(3):
        for head in range(4):
            keys = range(int(i.positions[row]) + 1)
            scores = [
                sum(float(i.q[row, head, d]) * value(i.k_cache, t, head // 2, d) for d in range(32)) / 32**0.5
                for t in keys
            ]
            weights = np.exp(np.array(scores) - max(scores))
            weights /= weights.sum()
            for dim in (0, 17, 31):
                want = sum(w * value(i.v_cache, t, head // 2, dim) for w, t in zip(weights, keys, strict=True))
                assert abs(got[row, head, dim] - want) < 1e-12
