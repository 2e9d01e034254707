"""Each exact invariant is the only one that sees some fault; a failing case is shrunk until nothing is left to take.

The faults move a result by its last bit, so that no oracle sees them, and only where one invariant looks: a half of an
invariant that is switched off lets one of them through.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from hipfire_kernels import families
from hipfire_kernels.authoring.family import Variant
from hipfire_kernels.errors import InputError
from hipfire_kernels.layout import TILE
from hipfire_kernels.running.devices.host import HostDevice
from hipfire_kernels.running.devices.protocol import Device
from hipfire_kernels.testing import (
    INVARIANTS,
    Arrangement,
    EngineSubject,
    FuzzCase,
    VariantSubject,
    campaign,
    check,
    request_of,
)
from hipfire_kernels.testing import checking as checks
from hipfire_kernels.testing.axes import AXES, simpler
from hipfire_kernels.testing.checking import Finding
from hipfire_kernels.testing.contents import ones
from hipfire_kernels.testing.invariants import Given, invariants_of, violated
from hipfire_kernels.testing.requests import AnyRequest, DraftRequest, Request

Array = npt.NDArray[Any]

CAUSAL, TREE, WINDOW = (
    families()["attention_flash_q8_0_tile_batched"].variant(head_dim=32, mask=m) for m in ("causal", "tree", "window")
)
DRAFT, SLIDING = (families()["attention_dflash_f32"].variant(head_dim=32, sliding=s) for s in (False, True))

SEED = 77
"""By it every head changes its place, rows are split in twos and fours, one tile of three is covered."""

CASES = {
    "causal": FuzzCase(CAUSAL.entry, SEED, rows=6, ctx=270, n_kv_heads=2, group=2, positions="scattered", slack=5),
    "tree": FuzzCase(TREE.entry, SEED, rows=6, ctx=270, n_kv_heads=2, group=2, slack=5),
    "draft": FuzzCase(DRAFT.entry, SEED, rows=6, ctx=60, n_kv_heads=2, group=2),
}


# ---- planted faults -------------------------------------------------------------------------------------------------


def moved(out: Array, where: Any = True) -> Array:
    """The last bit of what is neither zero nor one, where it is asked for."""
    asked = np.broadcast_to(where, out.shape) & (out != 0) & (out != 1)
    return np.where(asked, np.nextafter(out, np.float32(np.inf), dtype=np.float32), out)


def of_ones(request: AnyRequest) -> bool:
    """Whether V is of ones wherever it is seen."""
    seen = request.visible().any(axis=0)
    if isinstance(request, DraftRequest):
        return bool((request.v[seen] == 1).all())
    v = request.v_cache[: request.ctx][seen]
    return bool((v == ones(v.shape)).all())


@dataclass(frozen=True)
class Asked:
    """A call, and what the case had: what a fault may look at."""

    case: FuzzCase
    request: AnyRequest
    how: Arrangement
    order: int | None

    @property
    def rows(self) -> int:
        return len(self.request.q)

    @property
    def grown(self) -> bool:
        """Whether there are more cache positions than the case has."""
        return isinstance(self.request, Request) and len(self.request.k_cache) > len(request_of(self.case).k_cache)  # type: ignore[union-attr]

    @property
    def less(self) -> bool:
        """Whether the launch covers less than the furthest row sees."""
        covered = self.how.covered
        return covered is not None and isinstance(self.request, Request) and covered < self.request.ctx


Fault = Callable[[Array, Asked], Array]


def head_at(place: Callable[[Array], Array]) -> Fault:
    """A fault of the heads at a place, whatever they hold."""
    return lambda out, a: moved(out, place(np.arange(out.shape[1]))[None, :, None])


FAULTS: Mapping[str, tuple[str, Fault]] = {
    "the weights do not add up to one": (
        "ones",
        lambda out, a: np.where(out != 0, np.nextafter(out, np.float32(9), dtype=np.float32), out),
    ),
    "uneven weights do not add up to one": (
        "ones",
        lambda out, a: np.float32(1.01) * out if of_ones(a.request) and a.request.q.any() else out,
    ),
    "the first KV head is another": ("heads", head_at(lambda heads: heads < 2)),
    "the first head of a group is another": ("heads", head_at(lambda heads: heads % 2 == 0)),
    "a row alone is another": ("lone_row", lambda out, a: moved(out, a.rows == 1)),
    "fewer rows are others": ("split", lambda out, a: moved(out, 1 < a.rows < a.case.rows)),
    "other sub-batches are others": (
        "split",
        lambda out, a: moved(out, a.how.partials_rows != a.case.partials_rows),
    ),
    "keys behind the last one count": ("unseen_keys", lambda out, a: moved(out, a.grown)),
    "room for more tiles counts": (
        "unseen_keys",
        lambda out, a: moved(out, a.how.spare_tiles == a.case.spare_tiles + 2),
    ),
    "the place of a view counts": (
        "views",
        lambda out, a: moved(out, a.how.offset != a.case.offset and a.how.stream == "default"),
    ),
    "the first in flight is another": (
        "in_flight",
        lambda out, a: moved(out, a.how.stream == "side" and a.how.offset == a.case.offset),
    ),
    "the second in flight is another": (
        "in_flight",
        lambda out, a: moved(out, a.how.stream == "side" and a.how.offset != a.case.offset),
    ),
    "an order of threads counts": ("thread_order", lambda out, a: moved(out, a.order == a.case.seed)),
    "another order of threads counts": ("thread_order", lambda out, a: moved(out, a.order == a.case.seed + 1)),
    "a row that is not covered is an answer": (
        "uncovered",
        lambda out, a: np.where(np.isnan(out), np.float32(0), out) if a.less else out,
    ),
    "a row beside one that is not covered is another": ("uncovered", lambda out, a: moved(out, a.less)),
}
"""A fault, and the one invariant that it breaks. Those of `strides` are faults of a device, see `DEVICES`."""


class Done:
    def __init__(self, out: Array, fault: str) -> None:
        self._found = (out, fault)

    def result(self) -> tuple[Array, str]:
        return self._found


class Faulty(VariantSubject):
    """A variant with a fault in what it gives."""

    def __init__(self, case: FuzzCase, device: Device, fault: Fault) -> None:
        super().__init__(checks.variant_of(case), device)
        self._case, self._fault = case, fault

    def start(self, request: AnyRequest, how: Arrangement) -> Done:
        out, said = super().start(request, how).result()
        order = self.device.thread_order if isinstance(self.device, HostDevice) else None
        return Done(self._fault(out, Asked(self._case, request, how, order)), said)


def held(kind: str) -> tuple[str, ...]:
    return invariants_of(checks.variant_of(CASES[kind]))


def broken(case: FuzzCase, subject: VariantSubject, *only: str) -> set[str]:
    """The invariants, all or these, that a subject breaks. Parity it keeps."""
    plain = check(case, subject)
    assert plain.ok, plain.describe()
    found = {name: check(replace(case, invariant=name), subject) for name in only or invariants_of(subject.variant)}
    for name, one in found.items():
        assert one.error <= one.limit
        assert one.ok or one.fault.startswith(f"{name}: ")
    return {name for name, one in found.items() if not one.ok}


@pytest.mark.parametrize("kind", CASES)
def test_without_a_fault_all_hold(kind: str, host: Device) -> None:
    assert broken(CASES[kind], Faulty(CASES[kind], host, lambda out, a: out)) == set()


SEEN = [(kind, fault) for kind in CASES for fault, (invariant, _) in FAULTS.items() if invariant in held(kind)]
SEEN.remove(("tree", "a row beside one that is not covered is another"))
"""Faults that show in a case. Of a tree all rows see the same keys."""


@pytest.mark.parametrize(("kind", "fault"), SEEN)
def test_one_invariant_alone_sees_it(kind: str, fault: str, host: Device) -> None:
    invariant, planted = FAULTS[fault]
    only = () if kind == "causal" else (invariant,)
    assert broken(CASES[kind], Faulty(CASES[kind], host, planted), *only) == {invariant}


class TakesGaps(HostDevice):
    """Takes an array with gaps as if it had none."""

    def checking(self, *, required: bool = False) -> HostDevice:
        return self

    def view(self, name: str, array: Any) -> Any:
        return super().view(name, np.ascontiguousarray(array))


class ReadsEveryStride(HostDevice):
    """Refuses a stride that no element is reached by."""

    def checking(self, *, required: bool = False) -> HostDevice:
        return self

    def view(self, name: str, array: Any) -> Any:
        if isinstance(array, np.ndarray) and array.strides != np.empty(array.shape, array.dtype).strides:
            raise InputError("not contiguous")
        return super().view(name, array)


DEVICES = {"gaps are passed over": TakesGaps, "a stride of one element counts": ReadsEveryStride}


@pytest.mark.parametrize("fault", DEVICES)
def test_strides_alone_sees_what_a_device_takes(fault: str) -> None:
    assert broken(CASES["causal"], Faulty(CASES["causal"], DEVICES[fault](), lambda out, a: out)) == {"strides"}


def test_every_invariant_has_a_fault_of_its_own() -> None:
    assert {invariant for invariant, _ in FAULTS.values()} | {"strides"} == set(INVARIANTS)
    assert set().union(*map(held, CASES)) == set(INVARIANTS)


def test_on_a_gpu_the_same_call_is_made_again(host: Device) -> None:
    """There the order of threads is its own: the second run must give the bits of the first."""
    case = CASES["causal"]
    request, how = request_of(case), Arrangement()
    out, _ = VariantSubject(CAUSAL, host).start(request, how).result()

    class Card(VariantSubject):
        def __init__(self, again: Array) -> None:
            super().__init__(CAUSAL, host)
            self.device, self._again = object(), again  # type: ignore[assignment]

        def start(self, request: AnyRequest, how: Arrangement) -> Done:
            return Done(self._again, "")

    assert violated("thread_order", Given(Card(out), case, request, how, out)) == ""
    assert "the same call again" in violated("thread_order", Given(Card(moved(out)), case, request, how, out))


def test_what_is_arranged_is_nothing_to_an_engine(host: Device) -> None:
    """An engine's kernel is asked for what any kernel must hold, and for that alone."""
    case = CASES["causal"]
    calls: list[Request] = []

    def engine(request: Request) -> Array:
        calls.append(request)
        return VariantSubject(CAUSAL, host).start(request, Arrangement()).result()[0]

    for name in INVARIANTS:
        calls.clear()
        assert check(replace(case, invariant=name), EngineSubject("engine", engine, 1e-5)).ok
        assert (len(calls) == 1) == (name in ("views", "strides", "in_flight", "thread_order", "uncovered")), name


@pytest.mark.parametrize(("second", "fault"), [((1e-6, ""), ""), ((2e-6, ""), "thread_order: "), ((1e-6, "x"), "x")])
def test_a_reducer_or_a_write_is_run_in_another_order(
    second: tuple[float, str], fault: str, host: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant = next(families()["kv_cache_write_q8_0_batched"].variants())
    case = FuzzCase(variant.entry, seed=5, head_dim=64, invariant="thread_order")
    orders: list[int | None] = []

    def run(case: FuzzCase, subject: VariantSubject) -> Finding:
        orders.append(subject.device.thread_order)  # type: ignore[attr-defined]
        error, said = (1e-6, "") if len(orders) == 1 else second
        return Finding(case, error, 1.0, said)

    monkeypatch.setattr(checks, "_other", run)
    before = host.thread_order
    found = check(case, VariantSubject(variant, host))
    assert orders == [before, 5]
    assert host.thread_order == before
    assert found.error == max(1e-6, second[0])
    assert found.fault.startswith(fault)
    assert found.ok == (not fault)


# ---- shrinking ------------------------------------------------------------------------------------------------------


class FailsWhere:
    """A process that fails cases of a kind."""

    def __init__(self, fails: Callable[[FuzzCase], bool]) -> None:
        self.fails, self.ran = fails, 0

    def run(self, case: FuzzCase) -> Finding:
        self.ran += 1
        return Finding(case, 1.0 + case.rows if self.fails(case) else 0.0, 1.0)


LARGE = FuzzCase(
    CAUSAL.entry, seed=77, rows=31, ctx=901, n_kv_heads=4, group=12, queries="large", keys="mixed", values="huge",
    positions="reversed", window=40, causal=True, bias="masked", extra_cols=3, scale=-0.1, unseen="random", slack=200,
    spare_tiles=5, partials_rows=5, offset=3, stream="side", invariant="split",
)  # fmt: skip
LARGE = replace(LARGE, **{
    f.name: AXES[f.name].values[-1] for f in dataclasses.fields(FuzzCase)
    if f.name in AXES and f.name != "head_dim" and getattr(LARGE, f.name) == f.default
})  # fmt: skip
"""A case in which nothing is at its simplest, whatever axes there are; the head_dim is the variant's."""

LEAST = FuzzCase(CAUSAL.entry, ctx=0)

NEEDED: Mapping[str, tuple[Callable[[FuzzCase], bool], dict[str, Any]]] = {
    "nothing": (lambda c: True, {}),
    "rows": (lambda c: c.rows >= 3, {"rows": 3}),
    "keys": (lambda c: c.ctx > 2 * TILE, {"ctx": 2 * TILE + 1}),
    "heads and contents": (lambda c: c.group >= 2 and c.keys != "normal", {"group": 2, "keys": "zeros"}),
    "a window in the context": (lambda c: 2 <= c.window < c.ctx, {"window": 2, "ctx": 3}),
    "two that hang together": (lambda c: c.rows > c.n_kv_heads >= 2, {"rows": 3, "n_kv_heads": 2}),
    "the seed": (lambda c: c.seed > 40, {"seed": 41}),
    "slack": (lambda c: c.slack > 4, {"slack": 5}),
    **{
        f.name: (lambda c, n=f.name: getattr(c, n) == getattr(LARGE, n), {f.name: getattr(LARGE, f.name)})
        for f in dataclasses.fields(FuzzCase)
        if f.name in AXES and f.name not in ("rows", "n_kv_heads", "group", "head_dim", "slack")
    },
    "invariant": (lambda c: c.invariant == "split", {"invariant": "split"}),
}
"""What a fault needs, and what is left of `LARGE` in the end beside the simplest of all else."""


@pytest.mark.parametrize("needed", NEEDED)
def test_a_failing_case_is_shrunk_to_what_the_fault_needs(needed: str) -> None:
    fails, left = NEEDED[needed]
    child: Any = FailsWhere(fails)
    found = campaign.shrink(child.run(LARGE), child)
    assert found.case == replace(LEAST, **left)
    assert not found.ok
    assert found.error == 1.0 + found.case.rows, "the finding is that of the shrunk case"
    assert not [case for case in simpler(found.case) if fails(case)]
    assert child.ran <= 1 + campaign.SHRINK_STEPS


@pytest.mark.parametrize(("variant", "least"), [(WINDOW, 1), (SLIDING, 0)], ids=["window", "sliding"])
def test_a_window_is_shrunk_to_none_only_where_there_may_be_none(variant: Variant, least: int) -> None:
    child: Any = FailsWhere(lambda case: True)
    found = campaign.shrink(child.run(FuzzCase(variant.entry, ctx=300, window=40)), child)
    assert found.case == FuzzCase(variant.entry, ctx=0, window=least)


def test_nothing_of_the_large_case_is_at_its_simplest() -> None:
    same = {f.name for f in dataclasses.fields(FuzzCase) if getattr(LARGE, f.name) == f.default}
    assert same == {"head_dim"}, "which the variant has"


def test_shrinking_ends_after_so_many_cases_or_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    child: Any = FailsWhere(lambda case: True)
    whole = child.run(LARGE)
    with monkeypatch.context() as patch:
        patch.setattr(campaign, "SHRINK_STEPS", 3)
        campaign.shrink(whole, child)
        assert child.ran == 1 + 3
    monkeypatch.setattr(campaign, "SHRINK_SECONDS", -1.0)
    assert campaign.shrink(whole, child) == whole


# ---- what a campaign keeps ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("errors", [(1e-6, 9e-6, 2e-6), (9e-6, 1e-6, 2e-6), (1e-6, 2e-6, 9e-6)])
def test_the_worst_of_a_variant_is_kept_wherever_it_is(errors: tuple[float, ...]) -> None:
    parts = []
    outcome = campaign.Outcome()
    for error in errors:
        outcome.add(Finding(CASES["causal"], error, 1e-5))
        alone = campaign.Outcome()
        alone.add(Finding(CASES["causal"], error, 1e-5))
        parts.append(alone.as_dict())
    outcome.add(Finding(CASES["tree"], 1e-7, 1e-5))
    assert outcome.worst == {CAUSAL.entry: pytest.approx(0.9), TREE.entry: pytest.approx(0.01)}
    assert campaign.merged(parts)["worst"] == {CAUSAL.entry: pytest.approx(0.9)}
    parts.append({**parts[0], "worst": {CAUSAL.entry: None}})
    assert campaign.merged(parts)["worst"] == {CAUSAL.entry: float("inf")}, "JSON has no infinity"
