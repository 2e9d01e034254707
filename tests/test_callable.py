"""A loaded kernel called again: what it keeps of a call makes the next quicker, and nothing looser."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import hipfire_kernels as hk
from hipfire_kernels import InputError, KernelFamily, Scalar, Tensor, Tolerance
from hipfire_kernels.running import binding
from hipfire_kernels.running import kernel as module

Array = npt.NDArray[Any]

ADD = KernelFamily(
    name="add_rows",
    doc="one row",
    params={"width": (64,)},
    entry=lambda v: "add_rows",
    args=lambda v: (
        Tensor("x", "f32", ("rows", v.width)),
        Tensor("out", "f32", ("rows", v.width), writes=True),
        Scalar("rows", "i32"),
        Scalar("more", "f32"),
    ),
    grid=lambda v, s: (s.blocks, 1, 1),
    extents={"blocks": (0, 8)},
    body="""{{ signature }} {
    for (int i = lane(); i < {{ width }}; i += 32) {
        const long long at = (long long)block_x() * {{ width }} + i;
        if (block_x() < rows) out[at] = x[at] + more;
    }
}
""",
    tolerance=Tolerance(0.0),
)


@pytest.fixture
def kernel() -> hk.LoadedKernel:
    return hk.load(ADD.variant(width=64))


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls that were checked in full."""
    seen: list[str] = []
    bound = binding.bound
    monkeypatch.setattr(binding, "bound", lambda variant, *rest: seen.append(variant.name) or bound(variant, *rest))
    return seen


def rows(n: int, value: float = 0.0) -> Array:
    return np.full((n, 64), value, np.float32)


def test_the_like_of_a_call_is_checked_once(kernel: hk.LoadedKernel, checked: list[str]) -> None:
    for value in range(5):
        x, out = rows(3, value), rows(3)
        kernel(x=x, out=out, more=1.5, blocks=3)
        assert (out == value + 1.5).all()
    assert len(checked) == 1


def test_other_numbers_and_shapes_are_other_calls(kernel: hk.LoadedKernel, checked: list[str]) -> None:
    for n, more, blocks in ((3, 1.0, 3), (3, 2.0, 3), (2, 2.0, 2), (3, 2.0, 1), (3, 1.0, 3), (3, 2.0, 0)):
        out = rows(n, -1.0)
        kernel(x=rows(n), out=out, more=more, blocks=blocks)
        assert (out[:blocks] == more).all()
        assert (out[blocks:] == -1).all()
    assert len(checked) == 5


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"blocks": True}, "blocks is True"),
        ({"more": True}, "more is True"),
        ({"more": float("nan")}, "more is nan"),
        ({"rows": 3.0}, r"rows is 3\.0"),
        ({"rows": 2}, "rows is 2; required: 3"),
        ({"other": 1}, "takes no other"),
        ({"more": None}, "more is None"),
        ({"out": None}, "out is a NoneType"),
        ({"x": rows(3).astype(np.float64)}, "x has dtype f64"),
        ({"x": rows(2)}, "has shape"),
        ({"x": rows(3).T}, "x"),
        ({"out": np.broadcast_to(rows(1), (3, 64))}, "out"),
    ],
    ids=str,
)
def test_what_is_refused_is_refused_after_a_call_too(
    kernel: hk.LoadedKernel, change: dict[str, Any], says: str
) -> None:
    given = {"x": rows(3), "out": rows(3), "more": 1, "blocks": 1}
    kernel(**given)
    with pytest.raises(InputError, match=says):
        kernel(**{**given, **change})


def test_arrays_that_overlap_or_may_not_be_written(kernel: hk.LoadedKernel) -> None:
    kernel(x=rows(3), out=rows(3), more=1.0, blocks=3)
    memory = np.zeros((4, 64), np.float32)
    with pytest.raises(InputError, match="out shares 512 bytes with x"):
        kernel(x=memory[:3], out=memory[1:], more=1.0, blocks=3)
    fixed = rows(3)
    fixed.flags.writeable = False
    with pytest.raises(InputError, match="out is read-only"):
        kernel(x=rows(3), out=fixed, more=1.0, blocks=3)
    assert not memory.any()
    assert not fixed.any()


def test_a_missing_argument_is_named(kernel: hk.LoadedKernel) -> None:
    kernel(x=rows(3), out=rows(3), more=1.0, blocks=3)
    with pytest.raises(InputError, match="needs x="):
        kernel(out=rows(3), more=1.0, blocks=3)
    with pytest.raises(InputError, match="needs more="):
        kernel(x=rows(3), out=rows(3), blocks=3)


def test_threads_do_not_write_into_each_others_calls(kernel: hk.LoadedKernel) -> None:
    def work(value: int) -> bool:
        right = True
        for turn in range(200):
            x, out = rows(4, value * 1000 + turn), rows(4)
            kernel(x=x, out=out, more=0.5, blocks=4)
            right &= bool((out == x + 0.5).all())
        return right

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


def test_so_many_calls_are_kept(kernel: hk.LoadedKernel) -> None:
    for more in range(3 * module._KEPT):
        kernel(x=rows(1), out=rows(1), more=more, blocks=1)
    assert len(kernel._calls) == module._KEPT
