"""Tuning: the declared spaces, records and their lookup, what a plan makes of them, and how `hfk tune` decides."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_verify_split import ask, record

from hipfire_kernels import attend, cli, draft_attend, families
from hipfire_kernels.authoring.family import Site
from hipfire_kernels.bench import tune as work
from hipfire_kernels.bench.tune import Shapes
from hipfire_kernels.checking.numbers import worst_row
from hipfire_kernels.checking.parity import Case, expected, inputs
from hipfire_kernels.dispatch import admit, calls, evidence, measure, plan, tuning
from hipfire_kernels.dispatch.record import dump
from hipfire_kernels.dispatch.routes import route as route_named
from hipfire_kernels.dispatch.tuning import ANY, Gain, Tuning
from hipfire_kernels.errors import InputError
from hipfire_kernels.layout import MAX_SPLITS, covering
from hipfire_kernels.running.attention import VerifyShape, splits_of, verify_plan, workspace_shape
from hipfire_kernels.running.devices.protocol import Device
from hipfire_kernels.running.draft import DraftWorkspace
from hipfire_kernels.running.timing import HostTimer, Times

GQA, MMA, N64 = "attention_verify_gqa_q8", "attention_verify_mma_q8", "attention_dflash_wmma_n64_f32"
ROUTES = {GQA: "verify_gqa", MMA: "verify_mma", N64: "dflash_n64"}


def tuned(family: str, choice: dict[str, int], rows: int, ctx: int, **changes: Any) -> Tuning:
    """A record for head_dim 256 and 24/4 heads on the host; of one kernel's source."""
    variant = next(v for v in families()[family].variants() if (v.head_dim, v.group, v.rows) == (256, 6, 16))
    whole = {
        "arch": "host",
        "device": "A card",
        "driver": "1",
        "toolchain": "a compiler",
        "date": "2026-02-03",
        "multiprocessors": 8,
        "family": family,
        "head_dim": 256,
        "n_heads": 24,
        "n_kv_heads": 4,
        "rows": rows,
        "ctx": ctx,
        "choice": choice,
        "gains": (Gain(16, 4000, 22.8, 20.9, 1.09, (1.08, 1.1)),),
        "digests": {variant.entry: str(evidence.source_digest(variant.entry, "host"))},
        "source": "a test",
    }
    return Tuning(**{**whole, **changes})


@pytest.fixture
def opened() -> Iterator[None]:
    """Only the two split routes are open, for head_dim 256 and 24/4 heads."""
    with evidence.using([record("verify_mma", {128: 9.0}), record("verify_gqa", {128: 2.0})]):
        yield


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's tuning folder, not there yet."""
    monkeypatch.setenv("HIPFIRE_EVIDENCE_DIR", str(tmp_path))
    tuning.forget()
    yield tmp_path / "tuning"
    tuning.forget()


# ---- the space ------------------------------------------------------------------------------------------------------


def test_a_family_has_splits_to_choose_exactly_where_its_records_cover_splits() -> None:
    assert {name for name in families() if tuning.names(name)} == set(ROUTES)
    for name, family in families().items():
        assert ("splits" in tuning.names(name)) == (family.records == "split")


@pytest.mark.parametrize("site", [Site(132, 4, 16), Site(132, 8, 5), Site(8, 1, 1), Site(1024, 1, 32), Site(2, 16, 4)])
def test_every_value_is_one_the_kernels_take_and_the_default_is_first(site: Site) -> None:
    for name in ROUTES:
        for v in families()[name].variants():
            space = v.family.space(v, site)
            assert all(1 <= n <= MAX_SPLITS for n in space["splits"])
            assert len(set(space["splits"])) == len(space["splits"])
            assert splits_of(v, site, None) == space["splits"][0]
            for rows in space.get("rows", ()):
                assert v.family.variant(**{**dict(v.params), "rows": rows})
            assert space.get("rows", (0,))[0] == dict(v.params).get("rows", 0)


def test_the_defaults_are_what_they_were() -> None:
    gqa, mma = (families()[n].variant(head_dim=256, group=6, rows=8, **p) for n, p in ((GQA, {}), (MMA, {"terms": 1})))
    n64 = next(families()[N64].variants())
    assert mma.family.space(mma, Site(132, 4, 16)) == {"rows": (8, 4), "splits": (16, 4, 8, 12, 24, 32)}
    assert gqa.family.space(gqa, Site(132, 4, 16)) == {"rows": (8, 4), "splits": (33, 8, 16, 25, 50, 66)}
    assert n64.family.space(n64, Site(132, 8, 16)) == {"splits": (33, 8, 16, 25, 50, 66)}


def test_splits_of_an_exact_family_do_not_follow_the_rows() -> None:
    for name in ROUTES:
        for v in families()[name].variants():
            found = {v.family.space(v, Site(132, 4, rows))["splits"] for rows in (1, 4, 5, 16, 32)}
            assert len(found) == 1 or not v.family.exact, v.name


def test_splits_that_no_kernel_takes_are_refused(host: Device) -> None:
    shape = VerifyShape(4, 24, 4, 256, 100)
    variant = families()[GQA].variant(head_dim=256, group=6, rows=4)
    assert workspace_shape(variant, host.multiprocessors, shape, 100, splits=7)[2] == 7
    for wrong in (0, MAX_SPLITS + 1):
        with pytest.raises(InputError, match=rf"splits is {wrong}; required: 1 \.\. {MAX_SPLITS}"):
            verify_plan(variant, host, shape, 100, splits=wrong)
    whole = families()["attention_flash_q8_0_tile_batched"].variant(head_dim=256, mask="causal")
    with pytest.raises(InputError, match="splits is 4; attention_flash_q8_0_tile_batched_d8 does not split"):
        verify_plan(whole, host, shape, 100, splits=4)


# ---- records --------------------------------------------------------------------------------------------------------


def test_a_record_is_read_as_it_was_written() -> None:
    records = (tuned(MMA, {"splits": 16, "rows": 8}, 16, 4096), tuned(GQA, {"splits": 5}, ANY, ANY))
    assert tuning.load(dump(records), "again") == records


def test_the_shipped_records_are_whole() -> None:
    assert tuning.load(dump(tuning.shipped()), "again") == tuning.shipped()
    assert not [r for r in tuning.shipped() if r.arch.startswith("gfx")]


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (MMA, {"family": "attention_flash_q8_0_rows"}, r"records\[0\]\.family is .*required: one of attention_verify"),
        (MMA, {"arch": "gfx9"}, r"arch is 'gfx9'"),
        (MMA, {"date": "soon"}, "date is 'soon'; required: YYYY-MM-DD"),
        (MMA, {"rows": 5}, "rows is 5; required: 0 or one of 4, 8, 16, 32"),
        (MMA, {"ctx": 5000}, "ctx is 5000; required: 0, or tiles by a power of two"),
        (MMA, {"n_heads": 25}, "n_kv_heads is 4"),
        (MMA, {"digests": {}}, "digests is {}"),
        (MMA, {"gains": []}, r"gains is \(\)"),
        (MMA, {"choice": {}}, r"choice is {}; required: some of rows, splits"),
        (MMA, {"choice": {"stages": 3}}, "choice is {'stages': 3}; required: some of rows, splits"),
        (MMA, {"choice": {"splits": 129}}, r"choice\.splits is 129; required: 1 \.\. 128"),
        (MMA, {"choice": {"rows": 32}}, "required: values of a variant that attention_verify_mma_q8 has"),
        (MMA, {"choice": {"splits": 1.5}}, r"choice\.splits is 1\.5; required: a whole number"),
        (MMA, {"rows": 0, "ctx": 0}, "required: for a class"),
        (GQA, {}, "rows and ctx is .*required: splits for any rows and context, the rest for a class"),
        (GQA, {"rows": 0}, "rows and ctx is .*required: splits for any rows and context"),
        (GQA, {"rows": 0, "ctx": 0, "choice": {"rows": 8}}, "rows and ctx is .*required: splits for any rows"),
        (GQA, {"choice": {"rows": 8, "splits": 4}}, "rows and ctx is .*required: splits for any rows"),
    ],
)
def test_a_record_that_is_not_right_is_refused(family: str, changes: dict[str, Any], message: str) -> None:
    document = json.loads(dump([tuned(family, {"splits": 16}, 16, 4096)]))
    document["records"][0].update(changes)
    with pytest.raises(InputError, match=message):
        tuning.load(json.dumps(document), "mine")


def test_records_of_the_user_override_the_shipped_ones(
    opened: None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = tuple(tuned(MMA, {"splits": 16}, 16, ctx) for ctx in (4096, 8192))
    monkeypatch.setattr(tuning._SHELF, "_shipped", shipped)
    folder.mkdir()
    (folder / "mine.json").write_text(dump([tuned(MMA, {"splits": 9}, 16, 4096)]), encoding="utf-8")
    tuning.forget()
    assert admit(ask(logical_ctx=4096)).tuning_of("verify_mma").splits == 9
    assert admit(ask(logical_ctx=8192)).tuning_of("verify_mma").splits == 16
    (folder / "other.json").write_text(dump([shipped[0]]), encoding="utf-8")
    tuning.forget()
    with pytest.raises(InputError, match=r"mine\.json and \S*other\.json both have tuning for"):
        admit(ask())


# ---- the lookup -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "splits"),
    [
        ({"logical_ctx": 4096}, 11),
        ({"logical_ctx": 2049, "rows": 9}, 11),
        ({"logical_ctx": 2048}, None),
        ({"logical_ctx": 4097}, None),
        ({"logical_ctx": 8193}, 12),
        ({"logical_ctx": 4096, "rows": 8}, 13),
        ({"logical_ctx": 4096, "rows": 17}, None),
        ({"logical_ctx": 4096, "n_heads": 48, "n_kv_heads": 8}, None),
        ({"logical_ctx": 4096, "capacity": 16384}, 11),
        ({"logical_ctx": 4096, "capacity": 16384, "capturing": True}, 12),
        ({"logical_ctx": 300, "capacity": 9000, "recording": True}, 12),
        ({"logical_ctx": 4096, "capturing": True}, 11),
        ({"logical_ctx": 4096, "multiprocessors": 8}, 11),
        ({"logical_ctx": 4096, "multiprocessors": 7}, None),
    ],
    ids=str,
)
def test_the_entry_of_the_class_is_found(opened: None, changes: dict[str, Any], splits: int | None) -> None:
    records = [
        tuned(MMA, {"splits": 11}, 16, 4096),
        tuned(MMA, {"splits": 12}, 16, 16384),
        tuned(MMA, {"splits": 13, "rows": 4}, 8, 4096),
    ]
    with tuning.using(records):
        found = admit(ask(**changes), route_name="verify_mma").tuning_of("verify_mma")
    assert found.splits == splits
    assert ("tuned: splits" in found.why) == (splits is not None)


def test_more_rows_than_a_class_has_are_not_tuned() -> None:
    assert tuning.classes(33, 4096) is None
    assert tuning.classes(1, 0) == (4, 128)
    assert [covering(n) for n in (1, 128, 129, 4096, 4097, 20672)] == [128, 128, 256, 4096, 8192, 32768]


def test_the_decision_says_which_entry_was_used(opened: None) -> None:
    with tuning.using([tuned(MMA, {"rows": 8, "splits": 11}, 16, 4096)]):
        decision = admit(ask(logical_ctx=4000))
        line = "  tuned: rows 8, splits 11 (up to 16 rows and 4096 keys: 1.09x on A card, 2026-02-03)"
        assert decision.route == "verify_mma"
        assert line in decision.explain().splitlines()
        assert decision.as_dict()["tuning"]["values"] == {"rows": 8, "splits": 11}
        other = admit(ask(logical_ctx=4000, multiprocessors=114)).explain()
        assert "default, not rows 8, splits 11" in other
        assert "tuned on 8 multiprocessors, this device has 114" in other
        assert "  default rows and splits: not tuned for this shape" in admit(ask()).explain()
    with evidence.using([]):
        assert admit(ask()).tuning is None  # the established route has nothing to choose


def test_a_record_of_another_source_is_stale(opened: None) -> None:
    entry = next(iter(tuned(MMA, {"splits": 11}, 16, 4096).digests))
    with tuning.using([tuned(MMA, {"splits": 11}, 16, 4096, digests={entry: "0" * 64})]):
        decision = admit(ask(logical_ctx=4000))
    assert decision.tuning_of("verify_mma").values == {}
    assert f"stale: the source of {entry} has changed since; hfk tune measures anew" in decision.explain()


# ---- what a launch makes of it --------------------------------------------------------------------------------------


def test_a_plan_has_the_rows_and_splits_that_were_chosen(opened: None, host: Device) -> None:
    i = inputs(Case(16, 500, 24, 4, 256))
    out = np.full_like(i.q, np.nan)
    with tuning.using([tuned(MMA, {"rows": 4, "splits": 3}, 16, 512)]):
        prepared = plan(ask(logical_ctx=500), host, capacity=len(i.k_cache))
    assert prepared.run(i.q, i.k_cache, i.v_cache, i.positions, out) == "verify_mma"
    launches = prepared._prepared["verify_mma"].launches
    assert launches[0].grid == (3, 4, 4)
    assert worst_row(out, expected(Case(16, 500, 24, 4, 256))) <= 1.5e-3
    assert plan(ask(logical_ctx=500), host)._prepared["verify_mma"].partials.shape[2] == 2  # untuned: 8 // 4


def test_attend_takes_them_and_another_tuning_is_another_plan(opened: None, host: Device) -> None:
    i = inputs(Case(4, 300, 24, 4, 256))
    seen = []
    for records in ([], [tuned(MMA, {"splits": 5}, 4, 512)]):
        calls._plans.clear()
        with tuning.using(records):
            for _ in range(2):
                attend(i.q, i.k_cache, i.v_cache, i.positions)
        (prepared,) = calls._plans.values()
        seen.append(prepared._prepared["verify_mma"].partials.shape[2])
    with tuning.using([]):
        attend(i.q, i.k_cache, i.v_cache, i.positions)
    assert len(calls._plans) == 2
    assert seen == [2, 5]


def test_an_exact_row_has_the_same_bits_in_any_company_tuned_or_not(host: Device) -> None:
    """Rows before and behind the edge of a class of contexts, in caches of two capacities, together and alone."""
    case = Case(16, 264, 24, 4, 256, seed=5)
    i = inputs(case)
    records = [
        tuned(GQA, {"splits": 3}, ANY, ANY),
        tuned(GQA, {"rows": 8}, 16, 512),
        tuned(GQA, {"rows": 8}, 16, 256),
    ]
    tail = np.full((300, *i.k_cache.shape[1:]), 0x7F, np.uint8)
    longer = [np.concatenate([cache, tail]) for cache in (i.k_cache, i.v_cache)]
    with evidence.using([record("verify_gqa", {1: 2.0})]), tuning.using(records):
        assert admit(ask(logical_ctx=264)).tuning_of("verify_gqa").values == {"splits": 3, "rows": 8}
        assert admit(ask(logical_ctx=264, rows=1)).tuning_of("verify_gqa").values == {"splits": 3}
        whole = attend(i.q, i.k_cache, i.v_cache, i.positions)
        for caches in ((i.k_cache, i.v_cache), longer):
            for start, count in ((0, 16), (0, 1), (6, 1), (7, 1), (2, 5), (5, 9), (15, 1)):
                rows = slice(start, start + count)
                alone = attend(np.ascontiguousarray(i.q[rows]), *caches, i.positions[rows].copy())
                assert np.array_equal(alone, whole[rows]), (start, count)
    assert worst_row(whole, expected(case)) <= 1e-5


def test_a_draft_has_the_splits_that_were_chosen(host: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    q = rng.standard_normal((4, 8, 128), np.float32)
    k, v = (rng.standard_normal((200, 2, 128), np.float32) for _ in range(2))
    made: list[int | None] = []
    make = DraftWorkspace.make
    monkeypatch.setattr(DraftWorkspace, "make", lambda self, *a: (made.append(self.splits), make(self, *a))[1])
    variant = next(families()[N64].variants())
    of_gqa = tuned(GQA, {"splits": 3}, ANY, ANY)
    chosen = dataclasses.replace(of_gqa, family=N64, head_dim=128, n_heads=8, n_kv_heads=2)
    open_it = dataclasses.replace(
        record("verify_gqa", {1: 2.0}),
        route="dflash_n64",
        shape=dataclasses.replace(record("verify_gqa", {1: 2.0}).shape, head_dim=128, n_heads=8, n_kv_heads=2),
        digests={variant.entry: str(evidence.source_digest(variant.entry, "host"))},
        crossover=None,
    )
    with evidence.using([open_it]):
        for records in ([chosen], []):
            with tuning.using(records):
                got = draft_attend(q, k, v)
                want = draft_attend(q, k, v, route="dflash_scalar")
            assert worst_row(got, want.astype(np.float64)) <= 1e-4
    assert made == [3, None]


# ---- how it is decided ----------------------------------------------------------------------------------------------

FAST, SLOW, SAME = (1.1,) * 18, (0.9,) * 18, (1.02, 0.98) * 9


def timing(pairs: tuple[float, ...]) -> work.Timing:
    return (pairs, 100.0, 100.0 / float(np.median(pairs)))


@pytest.mark.parametrize(
    ("points", "won"),
    [
        ([{"a": FAST}], "a"),
        ([{"a": SLOW}], None),
        ([{"a": SAME}], None),
        ([{"a": (1.1,) * 12 + (0.99,) * 6}], None),  # six of eighteen disagree
        ([{"a": FAST}, {"a": SAME}], "a"),
        ([{"a": FAST}, {"a": SLOW}], None),
        ([{"a": (2.0,) * 18}, {"a": SLOW}], None),  # faster on the whole, but slower at one
        ([{"a": FAST, "b": (1.2,) * 18}], "b"),
        ([{"a": FAST, "b": (1.2,) * 18}, {"a": FAST}], "a"),  # b was wrong at the second
        ([{"a": FAST, "b": (1.5, 0.9) * 9}], "a"),  # b has the larger mean, and no verdict
        ([{"a": FAST}, {"a": (0.5, 1.2) * 9}], None),  # faster beyond doubt at one, slower on the whole
        ([{"a": (2.0,) * 18}, {"a": (0.5,) * 9 + (0.5, 1.1) * 4 + (0.5,)}], None),  # the same on the whole
        ([{"a": FAST}, {"a": FAST, "b": (3.0,) * 18}], "a"),  # b was wrong at the first
        ([{"a": (1.3,) * 18, "b": (1.2,) * 18}, {"a": (1.0,) * 18, "b": (1.2,) * 18}], "b"),
    ],
)
def test_which_candidate_wins(points: list[dict[str, tuple[float, ...]]], won: str | None) -> None:
    timed = [{((name, 1),): timing(pairs) for name, pairs in point.items()} for point in points]
    beside = [{(("default", 1),): timing((1.0,) * 18), **point} for point in timed]
    found = work.winner(beside, work.mean_ratios(beside))
    assert (found and found[0]) == (won and ((won, 1),))


def test_the_mean_over_points_is_geometric_and_of_medians() -> None:
    """Half as fast here and twice as fast there is no gain; one pair in eighteen is no half."""
    points = [{"a": (2.0,) * 18, "b": (4.0,) * 17 + (400.0,)}, {"a": (0.5,) * 18, "b": (1.0,) * 18}]
    timed = [{(("default", 1),): timing((9.0,) * 18)} for _ in points]
    for at, point in zip(timed, points, strict=True):
        at.update({((name, 1),): timing(pairs) for name, pairs in point.items()})
    means = work.mean_ratios(timed)
    assert means == {(("a", 1),): pytest.approx(1.0), (("b", 1),): pytest.approx(2.0)}
    timed[1].pop((("b", 1),))
    assert set(work.mean_ratios(timed)) == {(("a", 1),)}


TINY = Shapes((128,), (2, 1), (4,), (200,))


def asked(host: Device, row: str, shapes: Shapes, step: Callable[[str], None] = lambda _: None) -> list[work.Answer]:
    return work.tune(host, work.questions(route_named(row), host, shapes), step)


def planted(us: Callable[[int], float]) -> Callable[[Device], Any]:
    """A timer under which candidate i takes `us(i)`; 0 is the default. Each call is made once."""

    class Fake:
        def interleaved(self, calls: Any, rounds: int, warmup: int) -> dict[str, Times]:
            HostTimer().interleaved(calls, 1, 0)
            return {name: Times((us(int(name)),) * rounds) for name in calls}

    return lambda device: Fake()


@pytest.mark.parametrize("row", ["verify_mma", "verify_gqa", "dflash_n64"])
def test_a_planted_faster_candidate_is_recorded_and_a_slower_one_is_not(
    row: str, host: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    for us, wins in ((lambda i: 90.0 if i == 2 else 100.0, True), (lambda i: 100.0 + i, False)):
        monkeypatch.setattr(measure, "timer", planted(us))
        (answer, *others) = asked(host, row, TINY, steps.append)
        assert not answer.faults
        assert not others
        assert (answer.record is not None) == wins
        if answer.record:
            exact = families()[answer.record.family].exact
            assert answer.record.key[2:] == (128, 2, 1, *((ANY, ANY) if exact else (4, 256)))
            point = answer.question.points[0]
            assert (
                answer.record.choice["splits"] == point.variant.family.space(point.variant, Site(8, 1, 4))["splits"][2]
            )
            assert {(g.ratio, g.default_us, g.chosen_us) for g in answer.record.gains} == {(1.1111, 100.0, 90.0)}
            assert tuning.load(dump([answer.record]), "it") == (answer.record,)
            assert "attention_flash_reduce_batched_d4_splits" in answer.record.digests
    assert len(steps) == (4 if row == "dflash_n64" else 2)


def test_rows_of_an_exact_family_are_asked_for_with_its_splits_settled(
    host: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "timer", planted(lambda i: 90.0 if i == 1 else 100.0))
    shapes = dataclasses.replace(TINY, rows=(4, 8))
    splits, rows = asked(host, "verify_gqa", shapes)
    assert (splits.question.key[5:], rows.question.key[5:]) == ((ANY, ANY), (8, 256))
    assert [p.rows for p in splits.question.points] == [4, 8]
    assert splits.record is not None
    assert rows.record is not None
    assert splits.record.choice == {"splits": 2}
    assert rows.record.choice == {"rows": 4}


@pytest.mark.parametrize(("times", "right"), [(0.99, True), (1.01, False)])
def test_a_wrong_candidate_is_never_timed_and_never_wins(
    times: float, right: bool, host: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default is right, the others are so many times their limit off."""
    timed: list[str] = []
    make = planted(lambda i: 90.0 if i else 100.0)

    def counted(device: Device) -> Any:
        fake = make(device)
        interleaved = fake.interleaved
        fake.interleaved = lambda calls, *a, **k: (timed.extend(calls), interleaved(calls, *a, **k))[1]
        return fake

    monkeypatch.setattr(measure, "timer", counted)
    honest = work.Held._verify
    off = times * 1.5e-3
    monkeypatch.setattr(
        work.Held, "_verify", lambda self, v, splits, case: honest(self, v, splits, case) if splits == 8 else off
    )
    (answer,) = asked(host, "verify_mma", TINY)
    assert (answer.record is not None) == right
    said = "attention_verify_mma_q8_r4_g2_d4, {'rows': 4, 'splits': 2}: error 0.00152, limit 0.0015"
    assert (said in answer.faults) != right
    assert (len(timed) > 1) == right


@pytest.mark.parametrize(("times", "right"), [(0.95, True), (1.05, False)])
def test_a_candidate_that_differs_in_what_was_timed_never_wins(
    times: float, right: bool, host: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each may be its limit from the oracle, so both may be two limits apart: one element is so many times that off."""
    monkeypatch.setattr(measure, "timer", planted(lambda i: 90.0 if i == 1 else 100.0))
    prepare = measure.Track.call

    def off(track: Any, variant: Any, q: Any, out: Any, ctx: int, splits: int | None = None) -> Callable[[], None]:
        call = prepare(track, variant, q, out, ctx, splits)

        def launched() -> None:
            call()
            if splits == 2:
                row = out[-1, -1]
                row[abs(row).argmax()] *= 1 + times * 3e-3

        return launched

    monkeypatch.setattr(measure.Track, "call", off)
    (answer,) = asked(host, "verify_mma", TINY)
    splits = [dict(values)["splits"] for values in work.candidates(answer.question, host, {})]
    assert splits.index(2) == 1, "the one that is timed as the fastest"
    assert (answer.record is not None) == right
    said = [f for f in answer.faults if re.search(r"'splits': 2}: 0\.0031\d* from the default at 4 rows, 200 keys", f)]
    assert len(said) == (not right)


def test_a_tuning_is_bound_to_every_kernel_that_was_timed(host: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "timer", planted(lambda i: 90.0 if i == 1 else 100.0))
    (answer,) = asked(host, "verify_mma", dataclasses.replace(TINY, rows=(8,)))
    assert answer.record is not None
    timed = {
        tuning.Choice(dict(values), "").of(point.variant).entry
        for values in work.candidates(answer.question, host, {})
        for point in answer.question.points
    }
    assert timed == {f"attention_verify_mma_q8_r{rows}_g2_d4" for rows in (4, 8)}
    assert set(answer.record.digests) == {*timed, "attention_flash_reduce_batched_d4_splits"}
    for entry, digest in answer.record.digests.items():
        assert digest == evidence.source_digest(entry, "host")


def test_a_family_without_choices_cannot_be_tuned() -> None:
    assert [row.name for row in work.tunable([])] == ["verify_mma", "verify_gqa", "dflash_n64"]
    with pytest.raises(InputError, match="family 'attention_flash_q8_0_rows' has no choices to tune; those that do"):
        work.tunable(["attention_flash_q8_0_rows"])


# ---- the command ----------------------------------------------------------------------------------------------------


def hfk(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.app(["tune", *arguments])
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out, said.err


LITTLE = ("--device", "host", "--head-dim", "256", "--heads", "24/4", "--rows", "4", "--ctx", "200", "--family", MMA)


def test_the_command_stores_what_decisions_then_use(
    opened: None, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    request = ask(logical_ctx=200, rows=4)
    assert "not tuned for this shape" in admit(request).explain()
    monkeypatch.setattr(measure, "timer", planted(lambda i: 80.0 if i == 1 else 100.0))
    code, out, err = hfk(capsys, *LITTLE)
    assert code == 0, err
    assert "tune 1/1 attention_verify_mma_q8 d256 B4 ctx 200" in err
    assert "1.250x  1.250 .. 1.250" in out
    assert "1 of 1 classes have a faster choice than the default" in out
    assert [p.name for p in folder.iterdir()] == ["host.json"]
    assert "tuned: rows 4, splits 1 (up to 4 rows and 256 keys: 1.25x" in admit(request).explain()
    kept = tuned(MMA, {"splits": 9}, 16, 4096)
    (folder / "host.json").write_text(dump([*tuning.read_file(folder / "host.json"), kept]), encoding="utf-8")
    monkeypatch.setattr(measure, "timer", planted(lambda i: 100.0))
    code, out, err = hfk(capsys, *LITTLE, "--json")
    assert code == 0, err
    document = json.loads(out)
    assert (document["records"], document["faults"]) == ([], [])
    next_best = {"choice": "rows 4, splits 1", "ratio": 1.0}
    assert document["defaults"] == [{"key": ["host", MMA, 256, 24, 4, 4, 256], "best_other": next_best}]
    assert tuning.read_file(folder / "host.json") == (kept,)  # the other class stays, the one asked for is gone
    assert "not tuned for this shape" in admit(request).explain()


def test_the_command_times_by_the_clock_on_the_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = ("--head-dim", "128", "--heads", "2/1", "--rows", "4", "--ctx", "130")
    code, out, err = hfk(capsys, "--device", "host", *tiny, "--out", str(tmp_path / "own.json"))
    assert code == 0, err
    assert "attention_dflash_wmma_n64_f32" in out
    assert all(r.family in ROUTES for r in tuning.read_file(tmp_path / "own.json"))


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--device", "cuda:77"), 3, "cuda"),
        (("--device", "host", "--family", "nonsense"), 2, f"--family is 'nonsense'; legal: {MMA}, {GQA}, {N64}"),
        (("--device", "host", "--family", "attention_dflash_f32"), 2, f"legal: {MMA}, {GQA}, {N64}"),
        (("--device", "host", "--rows", "0"), 2, "--rows is '0'; required: positive whole numbers"),
        (("--device", "host", "--rows", "64", "--ctx", "32"), 2, "--ctx is 32 with 64 rows"),
        (("--device", "host", "--head-dim", "64"), 2, "no kernel has these head_dims, heads and rows"),
        (("--device", "host", "--heads", "24"), 2, "--heads is '24'"),
    ],
)
def test_what_the_command_refuses(
    arguments: tuple[str, ...], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found, _, err = hfk(capsys, *arguments)
    assert found == code
    assert message in err


def test_a_wrong_candidate_ends_with_exit_code_1(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure, "timer", planted(lambda i: 100.0))
    monkeypatch.setattr(work.Held, "fault", lambda self, variant, splits, *_: "" if splits == 2 else "error 1, limit 0")
    code, out, _ = hfk(capsys, *LITTLE)
    assert code == 1
    assert "WRONG attention_verify_mma_q8_r4_g6_d8, {'rows': 4, 'splits': 1}: error 1, limit 0" in out
