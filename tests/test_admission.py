"""Admission: the truth table, and what must hold for any request."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hipfire_kernels import ARCHS, families
from hipfire_kernels.dispatch import ROUTES, AttendRequest, admit, evidence, policy
from hipfire_kernels.dispatch.routes import UNROUTED
from hipfire_kernels.errors import InputError, NotAdmitted

VERIFY = AttendRequest(
    arch="gfx1100",
    workload="verify",
    kv_format="q8_0",
    head_dim=256,
    n_heads=24,
    n_kv_heads=4,
    rows=16,
    logical_ctx=20676,
    layout="chain",
    capturing=False,
    recording=False,
)
DRAFT = dataclasses.replace(VERIFY, workload="draft", kv_format="f32", head_dim=128)


def verify(**changes: Any) -> AttendRequest:
    return dataclasses.replace(VERIFY, **changes)


@pytest.mark.parametrize(
    ("changes", "route"),
    [
        ({}, "rows8"),
        ({"logical_ctx": 4096}, "tile_batched"),
        ({"logical_ctx": 4097}, "rows8"),
        ({"rows": 8}, "rows8"),
        ({"rows": 7}, "rows4"),
        ({"rows": 4}, "rows4"),
        ({"rows": 3}, "tile_batched"),
        ({"rows": 32}, "rows8"),
        ({"rows": 33}, "tile_batched"),
        ({"layout": "tree"}, "tile_batched"),
        ({"layout": "independent"}, "tile_batched"),
        ({"capturing": True}, "tile_batched"),
        ({"recording": True}, "tile_batched"),
        ({"window": 2048}, "tile_batched"),
        ({"head_dim": 128}, "rows8"),
        ({"head_dim": 64}, "tile_batched"),
        ({"arch": "gfx1100:sramecc-:xnack-"}, "rows8"),
        ({"arch": "gfx1101"}, "tile_batched"),
        ({"arch": "gfx1151"}, "tile_batched"),
        ({"arch": "gfx1201"}, "tile_batched"),
        ({"arch": "GFX1100"}, None),
        ({"arch": "gfx11-generic"}, None),
        ({"arch": "gfx90a"}, None),
        ({"arch": ""}, None),
        ({"kv_format": "fp8"}, None),
        ({"head_dim": 46}, None),
        ({"head_dim": 288}, None),
        ({"n_kv_heads": 5}, None),
        ({"rows": 0}, None),
        ({"layout": "forest"}, None),
        ({"workload": "train"}, None),
        ({"logical_ctx": -1}, None),
    ],
    ids=lambda v: str(v),
)
def test_truth_table(changes: dict[str, Any], route: str | None) -> None:
    assert admit(verify(**changes)).route == route


@pytest.mark.parametrize(
    ("changes", "route"),
    [
        ({}, "dflash_scalar"),
        ({"window": 2048}, "dflash_sliding"),
        ({"causal": True}, "dflash_sliding"),
        ({"kv_format": "q8_0"}, None),
        ({"head_dim": 40}, None),
        ({"capturing": True}, None),  # the number of keys is an argument: a replay would stop at the old context
        ({"recording": True}, None),
    ],
)
def test_draft_routes(changes: dict[str, Any], route: str | None) -> None:
    assert admit(dataclasses.replace(DRAFT, **changes)).route == route


@pytest.mark.parametrize("arch", ["gfx1101", "gfx1151", "gfx1200", "gfx1201", "host"])
def test_without_evidence_only_the_evidence_is_missing(arch: str) -> None:
    decision = admit(verify(arch=arch))
    assert [c.name for c in decision.rejected["rows8"]] == ["evidence"]
    assert "evidence" in decision.explain()


def test_every_failing_check_is_kept() -> None:
    decision = admit(verify(rows=33, layout="tree", capturing=True, logical_ctx=100))
    assert {c.name for c in decision.rejected["rows8"]} == {"rows", "layout", "capturing", "logical_ctx"}
    for word in ("33", "8 .. 32", "tree", "chain", "above 4096"):
        assert word in decision.explain()


def test_a_decision_is_json() -> None:
    document = json.loads(json.dumps(admit(verify()).as_dict()))
    assert document["route"] == "rows8"
    assert document["evidence"]["kind"] == "reported"
    assert document["fallback"] == "tile_batched"


def test_asking_for_a_route_that_is_not_admitted_lists_every_reason() -> None:
    with pytest.raises(NotAdmitted, match=r"(?s)rows8.*layout: 'tree'.*rows: 3") as caught:
        admit(verify(rows=3, layout="tree"), route_name="rows8")
    assert caught.value.decision.route is None
    assert admit(verify(), route_name="rows4").route == "rows4"
    with pytest.raises(InputError, match="known routes: verify_mma, verify_gqa, rows8"):
        admit(verify(), route_name="rows16")


@pytest.mark.parametrize(
    ("value", "route"), [("0", "tile_batched"), ("20675", "rows8"), ("20676", "tile_batched"), ("4096", "rows8")]
)
def test_the_minimum_context_narrows(value: str, route: str) -> None:
    with policy.override({"HIPFIRE_FA_PERTOKEN_MIN_CTX": value}):
        assert admit(verify()).route == route


@pytest.mark.parametrize("value", ["abc", "", "-1", "4095", "4096.5"])
def test_a_minimum_context_that_is_not_legal_is_an_error(value: str) -> None:
    with (
        policy.override({"HIPFIRE_FA_PERTOKEN_MIN_CTX": value}),
        pytest.raises(InputError, match=r"HIPFIRE_FA_PERTOKEN_MIN_CTX.*legal: 0"),
    ):
        admit(verify())


@pytest.mark.parametrize("flag", ["capturing", "recording"])
def test_what_is_replayed_takes_graph_safe_families_alone(flag: str) -> None:
    for route in ROUTES:
        request = dataclasses.replace(DRAFT if route.workload == "draft" else VERIFY, **{flag: True})
        replayed = [c for c in admit(request).checks[route.name] if c.name == flag]
        assert [c.ok for c in replayed] == [families()[route.family].graph_safe], route.name


def test_every_family_has_a_route_or_says_why_not() -> None:
    routed = {route.family for route in ROUTES}
    assert routed | set(UNROUTED) == set(families())
    assert not routed & set(UNROUTED)


REQUESTS = st.builds(
    AttendRequest,
    arch=st.sampled_from([*ARCHS, "gfx1100:xnack-", "gfx90a", "", None]),
    workload=st.sampled_from(["verify", "draft", "prefill", None]),
    kv_format=st.sampled_from(["q8_0", "f32", "fp8", None]),
    head_dim=st.sampled_from([32, 46, 64, 96, 128, 192, 256, 512, 0, -32, None]),
    n_heads=st.sampled_from([1, 4, 16, 24, 0, None]),
    n_kv_heads=st.sampled_from([1, 4, 5, 0, -1, None]),
    rows=st.sampled_from([0, 1, 3, 4, 7, 8, 16, 32, 33, 4096, None]),
    logical_ctx=st.one_of(st.integers(-2, 10**6), st.none()),
    layout=st.sampled_from(["chain", "tree", "independent", "forest", None]),
    capturing=st.sampled_from([False, True, None]),
    capacity=st.sampled_from([0, 5000, None]),
    multiprocessors=st.sampled_from([8, 132, None]),
    memory=st.sampled_from([1 << 20, 1 << 35, None]),
    recording=st.sampled_from([False, True, None]),
    window=st.sampled_from([0, 1, 2048, -1, None]),
    causal=st.sampled_from([False, True, None]),
)


@settings(max_examples=600, deadline=None, derandomize=True)
@given(REQUESTS)
def test_an_admitted_request_is_in_the_kernels_domain(request: AttendRequest) -> None:
    decision = admit(request)
    if decision.route is None:
        return
    route = next(r for r in ROUTES if r.name == decision.route)
    variant = route.variant(request)  # raises where the declaration does not have it
    assert variant.source(str(request.arch))
    assert request.n_heads is not None
    assert request.n_kv_heads is not None
    assert request.n_heads % request.n_kv_heads == 0


@settings(max_examples=600, deadline=None, derandomize=True)
@given(REQUESTS, st.integers(0, 10**6))
def test_more_context_never_closes_the_multirow_route(request: AttendRequest, more: int) -> None:
    if str(admit(request).route).startswith("rows"):
        assert request.logical_ctx is not None
        longer = dataclasses.replace(request, logical_ctx=request.logical_ctx + more)
        assert admit(longer).route == admit(request).route


DECIDES_NOTHING = {"capacity", "multiprocessors", "memory"}
"""Fields that may be unknown."""

WHOLE = ("head_dim", "n_heads", "n_kv_heads", "rows", "logical_ctx", "window")


@pytest.mark.parametrize("base", [VERIFY, DRAFT], ids=["verify", "draft"])
@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(AttendRequest)])
def test_what_is_unknown_never_admits(field: str, base: AttendRequest) -> None:
    if (base.workload, field) in (("verify", "causal"), ("draft", "layout")):
        return  # not part of the question there
    known = dataclasses.replace(base, capacity=30_000, multiprocessors=48, memory=1 << 34)
    assert admit(known).route is not None
    assert (admit(dataclasses.replace(known, **{field: None})).route is not None) == (field in DECIDES_NOTHING)


@pytest.mark.parametrize("base", [VERIFY, DRAFT], ids=["verify", "draft"])
@pytest.mark.parametrize("field", WHOLE)
@pytest.mark.parametrize("wrong", [2**31, 2**32 + 1, -1, 1.0, True, "1", [1]], ids=repr)
def test_no_number_is_admitted_that_a_kernel_cannot_have(base: AttendRequest, field: str, wrong: Any) -> None:
    assert admit(dataclasses.replace(base, **{field: wrong})).route is None


def test_evidence_opens_an_arch_and_only_that_one() -> None:
    record = dataclasses.replace(evidence.find("gfx1100", "rows8", 256), arch="gfx1201")
    with evidence.using([record]):
        assert admit(verify(arch="gfx1201")).route == "rows8"
        assert admit(verify(arch="gfx1201", head_dim=128)).route == "tile_batched"
        assert admit(verify(arch="gfx1200")).route == "tile_batched"
        assert admit(verify(arch="gfx1100")).route == "tile_batched"
    assert admit(verify(arch="gfx1201")).route == "tile_batched"
