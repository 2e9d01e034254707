"""The pytest plugin: options, and the fixtures that `suite` runs on.

An engine tests its own kernel with one function and two lines of a test file:

    from hipfire_kernels.testing.suite import *

    @pytest.fixture
    def hk_adapter(): return my_kernel          # Request -> float32 [rows, n_heads, head_dim]
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from hipfire_kernels.authoring.family import Variant
    from hipfire_kernels.testing.subjects import Adapter, Subject

DEFAULT = "attention_flash_q8_0_tile_batched_d4,attention_flash_q8_0_tile_batched_d8"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options."""
    group = parser.getgroup("hipfire-kernels")
    group.addoption("--hk-device", default="host", help="Device that kernels run on: host, hip:N, cuda:N, auto.")
    group.addoption(
        "--hk-variants",
        default=DEFAULT,
        help="Entry names or families, comma-separated, or `all`. For an engine's own kernel: whose shapes, masks and "
        f"tolerance it is held to. [default: {DEFAULT}]",
    )
    group.addoption("--hk-cases", default=20, type=int, help="Drawn cases of each variant. [default: 20]")
    group.addoption("--hk-seed", default=0, type=int, help="Of the drawn cases. [default: 0]")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `hk_case` runs once for each case: the known ones of the chosen variants, then drawn ones."""
    if "hk_case" in metafunc.fixturenames:
        option = metafunc.config.getoption
        cases = chosen_cases(option("--hk-variants"), option("--hk-cases"), option("--hk-seed"))
        metafunc.parametrize("hk_case", cases, ids=[f"{c.variant}-{i}" for i, c in enumerate(cases)])


def chosen_cases(names: str, count: int, seed: int) -> list[Any]:
    """The known cases of the named variants, then `count` drawn ones of each, which take the invariants in turn."""
    from hipfire_kernels.checking.oracle import oracle_of
    from hipfire_kernels.testing.axes import WORK, RandomSource
    from hipfire_kernels.testing.campaign import ledger

    variants = _variants(names)
    entries = {v.entry for v in variants}
    cases = [case for case in ledger() if case.variant in entries]
    for variant in variants:
        oracle = oracle_of(variant)
        held = ("", *oracle.invariants(variant))
        for k in range(count):
            case = oracle.draw(variant, RandomSource((seed, variant.entry, k)), WORK)
            cases.append(dataclasses.replace(case, invariant=held[k % len(held)]))
    return cases


def _variants(names: str) -> list[Variant]:
    from hipfire_kernels.authoring.registry import variants
    from hipfire_kernels.kernels import families

    known = families()
    found = []
    for name in list(known) if names == "all" else names.split(","):
        # An entry before the family that shares its name: the options ask for few variants, not for many.
        if name in variants():
            found.append(variants()[name])
        elif name in known:
            found += known[name].variants()
        else:
            raise pytest.UsageError(f"--hk-variants: no variant or family is named {name!r}; `hfk list` has all names")
    return found


@pytest.fixture
def hk_adapter() -> Adapter | None:
    """Override it to test an engine's own kernel; None tests this library's variants."""
    return None


@pytest.fixture
def hk_subject(hk_case: Any, hk_adapter: Adapter | None, pytestconfig: pytest.Config) -> Subject:
    """What is tested: the adapter's kernel, or the variant of the case on `--hk-device`."""
    from hipfire_kernels.running.devices import device
    from hipfire_kernels.testing.case import variant_of
    from hipfire_kernels.testing.subjects import EngineSubject, VariantSubject

    variant = variant_of(hk_case)
    if hk_adapter is not None:
        name = getattr(hk_adapter, "__name__", type(hk_adapter).__name__)
        return EngineSubject(name, hk_adapter, variant.tolerance.worst_row)
    return VariantSubject(variant, device(pytestconfig.getoption("--hk-device")))
