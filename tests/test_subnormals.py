"""Matrix kernels where the matrix unit reads subnormal f16 as they are, and where it reads them as zero."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
from budget import some
from matrix_lab import MAPS, map_device

from hipfire_kernels import families
from hipfire_kernels.authoring.family import Variant
from hipfire_kernels.checking.oracle import check, hold, oracle_of
from hipfire_kernels.checking.parity import Case
from hipfire_kernels.errors import InputError
from hipfire_kernels.running.devices import device
from hipfire_kernels.running.devices.host import HostDevice
from hipfire_kernels.testing.case import FuzzCase

M16, M32, N64 = (f"attention_dflash_wmma{which}_f32" for which in ("", "_m32", "_n64"))
MMA, PREFILL = "attention_verify_mma_q8", "attention_q8_0_flash_prefill_wmma"
MATRIX = [v for name in (M16, M32, N64, PREFILL, MMA) for v in families()[name].variants() if v.fits("host")]
FORMS = [v for v in MATRIX if dict(v.params).get("group", 3) == 3 and dict(v.params).get("rows", 8) == 8]
"""Of each formulation one: `verify_mma` with eight rows of three heads."""


def by_name(v: Variant) -> str:
    return v.name


def cases(v: Variant) -> Iterator[Case]:
    """Two tiles and a part of normal numbers; of the forms, also of large queries, whose weights are small."""
    group = dict(v.params).get("group", 3)
    window = 200 if dict(v.params).get("sliding") else 0
    for values in ("normal", "large", "foreign") if v in FORMS else ("large",):
        yield Case(9, 321, group, 1, v.head_dim, values, window=window, seed=len(v.name))


@pytest.mark.parametrize("v", some(MATRIX, 14), ids=by_name)
def test_either_way_of_reading_is_right(v: Variant) -> None:
    for case in cases(v):
        for on in (device("host"), device("host+flush")):
            result = check(v, case, on)
            assert result.ok, (on, result.describe())


HELD_AT_128 = [v for v in FORMS if v.head_dim == 128]


@pytest.mark.parametrize(
    ("name", "v"), some([(name, v) for name in MAPS for v in HELD_AT_128 if v.family.name != MMA or name != "mma16"], 9)
)  # whose body of verify_mma is another
def test_with_the_lane_map_of_each_gpu(name: str, v: Variant, monkeypatch: pytest.MonkeyPatch) -> None:
    map_device(monkeypatch, name)
    for case in cases(v):
        result = check(v, case, HostDevice(flush_f16=True))
        assert result.ok, result.describe()


TWO_TERMS = [v for v in FORMS if v.family.name == MMA and v.terms == 2]
BOTH_WAYS = TWO_TERMS + [v for v in FORMS if dict(v.params).get("kv") == "f32" and v.head_dim == 128]


@pytest.mark.parametrize("v", some(BOTH_WAYS, 3), ids=by_name)
@pytest.mark.parametrize("values", ["subnormal", "mixed"])
@pytest.mark.parametrize("queries", ["normal", "large"])
def test_small_values_and_weights_have_two_terms(v: Variant, values: str, queries: str) -> None:
    """V whose every element is subnormal in f16, and V so large where the weight is small that this counts."""
    group = dict(v.params).get("group", 3)
    for seed in range(3):
        case = FuzzCase(
            v.name,
            seed,
            rows=5,
            ctx=70,
            group=group,
            head_dim=v.head_dim,
            queries=queries,
            values=values,
            keys="negative",
        )
        for on in (device("host"), device("host+flush")):
            found = hold(v, case, on)
            assert found.ok, (on, found.error, found.fault)


@pytest.mark.parametrize("v", TWO_TERMS, ids=by_name)
def test_products_of_codes_and_scales_are_exact(v: Variant) -> None:
    """With a weight of one, V itself comes out: all of its bits, subnormal in f16 or not, in either way of reading."""
    for on in (device("host"), device("host+flush")):
        case = FuzzCase(v.name, 11, rows=1, ctx=1, group=v.group, head_dim=v.head_dim, values="subnormal")
        found = hold(v, case, on)
        assert (found.fault, found.error) == ("", 0.0), on


def test_it_is_a_device_by_name_and_under_the_memory_check() -> None:
    on = device("host+flush")
    assert isinstance(on, HostDevice)
    assert (on.flush_f16, on.name) == (True, "host+flush")
    checked = on.checking()
    assert (checked.checked, checked.flush_f16) == (True, True)
    assert on.toolchain is None  # the kernels are those of the host
    assert not HostDevice().flush_f16
    with pytest.raises(InputError, match=r"'host\+flushed' is not known"):
        device("host+flushed")


def test_the_limit_of_small_weights_is_the_declared_one() -> None:
    """A weight of 2^-36, all there is: lost within what is declared, and outside of what an exact kernel may lose."""
    v = families()[MMA].variant(head_dim=128, group=6, rows=8, terms=2)
    case = FuzzCase(
        v.name, 1886665575, rows=8, ctx=8, group=6, head_dim=128, queries="alternating", keys="alternating",
        values="mixed", scale=1.0,
    )  # fmt: skip
    assert hold(v, case, device("host")).ok
    exact = dataclasses.replace(v.tolerance, least_weight=0.0)
    strict = dataclasses.replace(v, family=dataclasses.replace(v.family, tolerance=exact))
    assert not oracle_of(strict).hold(strict, case, device("host")).ok
