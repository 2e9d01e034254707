"""The axes, the check and its invariants, the campaign: what `hipfire_kernels.testing` promises."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hipfire_kernels import InputError, families
from hipfire_kernels.authoring.family import KernelFamily, Variant
from hipfire_kernels.checking import reference
from hipfire_kernels.errors import DeviceError
from hipfire_kernels.kernels.arguments import MERGE, QUANTIZE
from hipfire_kernels.running.devices.protocol import Device
from hipfire_kernels.testing import (
    AXES,
    INVARIANTS,
    Arrangement,
    EngineSubject,
    FuzzCase,
    Request,
    VariantSubject,
    assert_parity,
    campaign,
    case_from,
    check,
    draw,
    generate,
    ledger,
    ray_cluster,
    request_of,
    variant_of,
)
from hipfire_kernels.testing.axes import RandomSource, simpler
from hipfire_kernels.testing.case import kind_of
from hipfire_kernels.testing.contents import CACHES, UNSEEN
from hipfire_kernels.testing.invariants import invariants_of
from hipfire_kernels.testing.yardstick import Expected, error_of, expected

VARIANTS = [v for family in families().values() for v in family.variants()]
TILE = families()["attention_flash_q8_0_tile_batched"]
D1, WINDOW, TREE = (TILE.variant(head_dim=32, mask=mask) for mask in ("causal", "window", "tree"))
SMALL = 100_000


def drawn(variant: Variant, count: int, **fixed: Any) -> list[FuzzCase]:
    cases = [draw(variant, RandomSource((7, variant.entry, k)), SMALL) for k in range(count)]
    return [dataclasses.replace(case, **fixed) for case in cases]


def reference_kernel(request: Request) -> np.ndarray:
    r = request
    return reference.attend(r.q, r.k_cache, r.v_cache, r.positions, r.scale, r.tree_bias, r.window).astype(np.float32)


# ---- cases and axes -------------------------------------------------------------------------------------------------


def test_every_variant_is_drawn_for_and_its_cases_survive_json() -> None:
    for case in itertools.islice(generate(VARIANTS, 3, work=SMALL), 3 * len(VARIANTS)):
        again = case_from(json.loads(case.to_json()))
        assert again == case
        assert case.work <= max(SMALL, 100 * case.head_dim * case.group)  # an edge is not lowered


def test_shards_are_a_partition_of_the_campaign() -> None:
    whole = set(itertools.islice(generate([D1, TREE], 5), 60))
    parts = [set(itertools.islice(generate([D1, TREE], 5, shard=i, shards=3), 20)) for i in range(3)]
    assert len(whole) == 60
    assert all(not a & b for a, b in itertools.combinations(parts, 2))
    first = {case for case in set.union(*parts) if case in whole}
    assert len(first) > 30  # turns end elsewhere, so the edges differ; the k-th case of a variant is the same


def test_every_value_of_every_axis_is_reached() -> None:
    seen: dict[str, set[Any]] = {}
    for k in range(1500):
        for variant in (D1, TREE, families()["attention_dflash_f32"].variant(head_dim=32, sliding=True)):
            for name, value in vars(draw(variant, RandomSource(("all", variant.entry, k)))).items():
                seen.setdefault(name, set()).add(value)
    for name in set(AXES) - {"tiles", "edge", "head_dim"}:
        assert seen[name] == set(AXES[name].values), name
    assert seen["invariant"] == {"", *INVARIANTS}
    assert {127, 128, 129, 255, 256, 257} <= seen["ctx"]


def test_simpler_cases_end_at_the_simplest() -> None:
    case = drawn(D1, 1, rows=9, ctx=300, group=6)[0]
    for _ in range(500):
        case = next(simpler(case), case)
    assert case == dataclasses.replace(FuzzCase(D1.entry), ctx=0)


@pytest.mark.parametrize("family", families().values(), ids=lambda f: f.name)
def test_simpler_cases_are_cases(family: KernelFamily) -> None:
    for variant in (next(family.variants()), list(family.variants())[-1]):
        for case in drawn(variant, 4):
            assert all(case_from(one.as_dict()) == one for one in simpler(case))


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ([], "required: a JSON object"),
        ({}, "no `variant`"),
        ({"variant": "nonsense"}, "no variant has the entry name"),
        ({"variant": D1.entry, "ctxx": 1}, "its fields are"),
        ({"variant": D1.entry, "rows": 0}, "rows is 0; required: a whole number, at least 1"),
        ({"variant": D1.entry, "rows": True}, "rows is True"),
        ({"variant": D1.entry, "keys": "odd"}, "keys is 'odd'; required: one of 'normal'"),
        ({"variant": D1.entry, "head_dim": 64}, "head_dim is 64; required: that of"),
        ({"variant": D1.entry, "scale": "1"}, "scale is '1'"),
    ],
)
def test_a_case_that_is_none_is_refused(found: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        case_from(found)


def test_contents_are_what_their_names_say() -> None:
    rng = np.random.default_rng(0)
    made = {name: reference.decode_cache(make(rng, (5, 2, 2, 34))) for name, make in CACHES.items()}
    assert all(np.isfinite(values).all() for values in made.values())
    assert not made["zeros"].any()
    assert not made["zero_scale"].any()
    assert 0 < abs(made["subnormal"]).max() < 128 * 2.0**-14
    assert abs(made["huge"]).max() > 65504
    assert (made["one_hot"].reshape(10, 64) != 0).sum(axis=1).tolist() == [1] * 10
    assert (made["same"] == made["same"][0]).all()
    unseen = {name: reference.decode_cache(make(rng, (1, 1, 1, 34))) for name, make in UNSEEN.items()}
    assert np.isnan(unseen["nan"]).all()
    assert np.isinf(unseen["inf"]).all()


def test_keys_behind_a_window_are_unseen_as_well() -> None:
    case = FuzzCase(WINDOW.entry, rows=3, ctx=50, window=10, unseen="nan", slack=5)
    request = request_of(case)
    assert isinstance(request, Request)
    spoiled = np.isnan(reference.decode_cache(request.k_cache)).all(axis=(1, 2))
    assert np.flatnonzero(~spoiled).tolist() == list(range(38, 50))


# ---- the check ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", [D1, WINDOW, TREE], ids=lambda v: v.name)
@pytest.mark.parametrize("invariant", ["", *INVARIANTS])
def test_the_established_kernel_holds_every_invariant(variant: Variant, invariant: str, host: Device) -> None:
    for case in drawn(variant, 6, invariant=invariant):
        assert_parity(variant, case)


@pytest.mark.parametrize("name", ["attention_flash_q8_0_rows", "attention_dflash_f32", "kv_cache_write_q8_0_batched"])
def test_other_families_pass_drawn_cases(name: str, host: Device) -> None:
    variant = next(families()[name].variants())
    for case in drawn(variant, 12, values="normal"):
        assert_parity(variant, case)


def test_writes_of_every_kind_are_the_blocks_of_quantize(host: Device) -> None:
    variant = families()["kv_cache_write_q8_0_batched"].variant(pair=True)
    for keys, values in itertools.product(CACHES, repeat=2):
        case = FuzzCase(variant.entry, rows=3, ctx=4, n_kv_heads=2, head_dim=64, keys=keys, values=values, slack=1)
        assert_parity(variant, case)


def test_the_ledger_passes(host: Device) -> None:
    for case in ledger():
        assert_parity(variant_of(case), case)


def test_each_kernel_is_run_on_requests_or_by_parity() -> None:
    for variant in VARIANTS:
        assert (kind_of(variant) == "") == (variant.family.oracle in (MERGE, QUANTIZE)), variant.name
        assert set(invariants_of(variant)) <= set(INVARIANTS)


def exactly(out: Any) -> Expected:
    """What must be met to within the tolerance, and be finite."""
    rows = out.shape[:2]
    return Expected(out, np.zeros(rows), np.zeros(rows, bool), np.zeros(rows))


def test_the_worst_row_decides_and_kinds_come_first() -> None:
    want = exactly(np.ones((50, 1, 4)))
    got = np.ones((50, 1, 4), np.float32)
    got[17, 0, 2] += 1e-3
    error, wrong = error_of(got, want, 1e-5)
    assert error == pytest.approx(1e-3, rel=1e-3)
    assert not wrong
    got[3, 0, 1] = np.inf
    error, wrong = error_of(got, want, 1e-5)
    assert error == np.inf
    assert wrong.startswith("inf at row 3, head 0, dim 1")
    assert "shape" in error_of(got[1:], want, 1e-5)[1]


def test_a_row_of_zeros_must_be_zero() -> None:
    want = exactly(np.zeros((1, 1, 4)))
    assert error_of(np.zeros((1, 1, 4)), want, 1e-5)[0] == 0
    assert error_of(np.full((1, 1, 4), 1e-30), want, 1e-5)[0] == np.inf


def test_the_yardstick_grows_with_scores_but_not_where_one_key_has_all_the_weight() -> None:
    tame = FuzzCase(D1.entry, rows=4, ctx=100, head_dim=32)
    wide = dataclasses.replace(tame, queries="beyond_f16", keys="same")  # equal scores, each a large sum
    alone = dataclasses.replace(wide, ctx=1, rows=1)
    spread = {}
    for name, case in {"tame": tame, "wide": wide, "alone": alone}.items():
        want = expected(request_of(case), 1e-5)
        spread[name] = float((want.spread / abs(want.out).max(axis=-1)).max())
    assert spread["alone"] < 1e-6 < spread["tame"] < 1e-4 < spread["wide"]


def test_a_wrong_engine_is_caught_and_a_right_one_passes() -> None:
    def forgets_the_window(request: Request) -> np.ndarray:
        return reference_kernel(dataclasses.replace(request, window=0))

    case = FuzzCase(WINDOW.entry, rows=3, ctx=50, window=10, unseen="large", invariant="lone_row")
    assert_parity(EngineSubject("right", reference_kernel, 1e-5), case)
    with pytest.raises(AssertionError, match=r"wrong: FAILED variant=.*\nreplay: \{\"variant\""):
        assert_parity(EngineSubject("wrong", forgets_the_window, 1e-5), case)


def test_an_engine_that_depends_on_company_is_caught() -> None:
    def rounds_by_rows(request: Request) -> np.ndarray:
        return reference_kernel(request) * np.float32(1 + 2e-7 * len(request.q))

    for invariant in ("lone_row", "split"):
        case = FuzzCase(D1.entry, rows=8, ctx=50, invariant=invariant)
        found = check(case, EngineSubject("engine", rounds_by_rows, 1e-5))
        assert found.fault.startswith(f"{invariant}: ")


def test_a_view_with_gaps_and_a_launch_that_covers_too_little_are_looked_at(host: Device) -> None:
    case = FuzzCase(D1.entry, rows=4, ctx=300, positions="reversed")
    out, fault = VariantSubject(D1, host).start(request_of(case), Arrangement(covered=128)).result()
    assert not fault
    assert np.isnan(out).all()
    for invariant in ("strides", "uncovered"):
        assert check(dataclasses.replace(case, invariant=invariant), VariantSubject(D1, host)).ok


# ---- campaigns ------------------------------------------------------------------------------------------------------


def test_a_campaign_runs_the_known_cases_first_and_its_parts_add_up(host: Device) -> None:
    settings = campaign.Settings((D1,), count=9, seed=1, jobs=2, work=SMALL, shards=2)
    known = [FuzzCase(D1.entry, ctx=5), FuzzCase(WINDOW.entry, ctx=5, window=1)]
    parts = [campaign.run(dataclasses.replace(settings, shard=i), known).as_dict() for i in range(2)]
    whole = campaign.merged(json.loads(json.dumps(parts)))
    assert (whole["cases"], whole["ledger"], whole["failures"]) == (9, 1, [])
    assert set(whole["worst"]) == {D1.entry}
    assert whole["devices"] == [{"device": "host", "arch": "host"}]
    with pytest.raises(InputError, match="no result of `hfk fuzz --json`"):
        campaign.merged([{"cases": 1}])


def test_a_campaign_by_time_ends(host: Device) -> None:
    """There is no end to the cases."""
    outcome = campaign.run(campaign.Settings((D1,), count=None, seconds=0.2, work=SMALL), [])
    assert outcome.cases > 0


def test_a_variant_that_does_not_fit_is_left_out(monkeypatch: pytest.MonkeyPatch, host: Device) -> None:
    monkeypatch.setattr(Variant, "fits", lambda self, arch: (self.mask, arch) != ("tree", "host"))
    outcome = campaign.run(campaign.Settings((D1, TREE), count=3, work=SMALL), [FuzzCase(TREE.entry)])
    assert (outcome.left_out, outcome.cases, outcome.ledger) == ([TREE.entry], 3, 0)


def test_a_device_that_is_not_there_refuses_the_campaign() -> None:
    with pytest.raises(DeviceError):
        campaign.run(campaign.Settings((D1,), device="hip:63", count=3), [])


def test_ray_runs_every_shard_once(monkeypatch: pytest.MonkeyPatch, host: Device) -> None:
    """A stand-in for Ray that runs a task where it is submitted, from what would travel."""
    monkeypatch.setitem(sys.modules, "ray", None)
    settings = campaign.Settings((D1,), count=5, seed=1, work=SMALL, shards=2)
    with pytest.raises(DeviceError, match="--ray needs Ray"):
        ray_cluster.run_shards(settings, [])

    def remote(**_: Any) -> Any:
        return lambda f: SimpleNamespace(remote=lambda *args: f(*json.loads(json.dumps(args))))

    stand_in = SimpleNamespace(is_initialized=lambda: True, remote=remote, get=lambda results: results)
    monkeypatch.setitem(sys.modules, "ray", stand_in)
    whole = campaign.merged(ray_cluster.run_shards(settings, [FuzzCase(D1.entry)]))
    assert (whole["cases"], whole["ledger"]) == (5, 1)
