"""Hypothesis draws over the same axes, and shrinks on them."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import HealthCheck, find, given, settings
from hypothesis import strategies as st

from hipfire_kernels import families
from hipfire_kernels.q8_0 import dequantize_q8_0
from hipfire_kernels.running.attention import VerifyShape
from hipfire_kernels.running.devices.protocol import Device
from hipfire_kernels.testing import AXES, Arrangement, FuzzCase, Request, assert_parity, case_from, strategies

TILE = families()["attention_flash_q8_0_tile_batched"]
D1 = TILE.variant(head_dim=32, mask="causal")
TREE = TILE.variant(head_dim=32, mask="tree")
FEW = settings(
    max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.mark.parametrize("variant", [D1, TREE], ids=lambda v: v.name)
def test_drawn_cases_pass(variant: object, host: Device) -> None:
    assert variant in (D1, TREE)

    @FEW
    @given(strategies.cases(variant, work=50_000))  # type: ignore[arg-type]
    def holds(case: FuzzCase) -> None:
        assert case_from(json.loads(case.to_json())) == case
        assert_parity(variant, case)  # type: ignore[arg-type]

    holds()


def test_hypothesis_shrinks_to_the_simplest_values() -> None:
    wanted = lambda case: case.rows > 4 and case.keys == "huge"  # noqa: E731
    case = find(strategies.cases(D1), wanted, settings=settings(deadline=None, derandomize=True))
    simplest = {"variant": D1.entry, "rows": 5, "keys": "huge"}
    assert case.as_dict() == simplest


@FEW
@given(strategies.requests(TREE, work=20_000), strategies.layouts())
def test_requests_have_the_declared_shapes(request_: Request, how: Arrangement) -> None:
    rows, n_heads, head_dim = request_.q.shape
    assert request_.tree_bias is not None
    assert request_.tree_bias.shape[0] == rows == len(request_.positions)
    assert request_.k_cache.shape == request_.v_cache.shape
    assert request_.k_cache.shape[2:] == (head_dim // 32, 34)
    assert n_heads % request_.k_cache.shape[1] == 0
    assert request_.ctx <= len(request_.k_cache)
    assert how.offset in AXES["offset"].values


@FEW
@given(st.data())
def test_cache_contents_are_finite_and_of_their_shape(data: st.DataObject) -> None:
    shape = data.draw(strategies.shapes(capacity=200))
    assert isinstance(shape, VerifyShape)
    assert shape.capacity <= 200
    cache = data.draw(strategies.cache_contents(shape))
    assert cache.shape == (shape.capacity, shape.n_kv_heads, shape.head_dim // 32, 34)
    assert np.isfinite(dequantize_q8_0(cache)).all()
