"""Hypothesis strategies over the axes of `axes.AXES`. The one module that needs Hypothesis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from hipfire_kernels.authoring.family import Variant
from hipfire_kernels.layout import kv_cache_shape
from hipfire_kernels.running.attention import VerifyShape
from hipfire_kernels.testing import axes
from hipfire_kernels.testing.case import FuzzCase
from hipfire_kernels.testing.checking import request_of
from hipfire_kernels.testing.contents import CACHES
from hipfire_kernels.testing.requests import DraftRequest, Request
from hipfire_kernels.testing.subjects import Arrangement

T = TypeVar("T")
_SEEDS = st.integers(0, 2**32 - 1)


class _Drawn:
    """Picks through Hypothesis, which shrinks towards the first value of an axis."""

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw

    def pick(self, axis: str, values: Sequence[T], *, small: bool) -> T:
        """See `axes.Source`."""
        return self._draw(st.sampled_from(values), label=axis)

    def seed(self) -> int:
        """See `axes.Source`."""
        return self._draw(_SEEDS, label="seed")


@st.composite
def cases(draw: st.DrawFn, variant: Variant, *, work: int = axes.WORK) -> FuzzCase:
    """Cases of a variant, within `work` multiply-adds."""
    return axes.draw(variant, _Drawn(draw), work)


def requests(variant: Variant, *, work: int = axes.WORK) -> st.SearchStrategy[Request | DraftRequest]:
    """The tensors of such cases: a `Request` of a verify variant, a `DraftRequest` of a draft variant."""
    return cases(variant, work=work).map(request_of)


def _axis(name: str) -> st.SearchStrategy[Any]:
    return st.sampled_from(axes.AXES[name].values)


@st.composite
def shapes(draw: st.DrawFn, *, capacity: int = 1024) -> VerifyShape:
    """Shapes of verify calls with caches of up to `capacity` positions, on and around tile edges."""
    near = (axes.context(draw(_axis("tiles")), draw(_axis("edge"))) + draw(_axis("slack"))) % (capacity + 1)
    n_kv_heads = draw(_axis("n_kv_heads"))
    return VerifyShape(
        rows=draw(_axis("rows")),
        n_heads=n_kv_heads * draw(_axis("group")),
        n_kv_heads=n_kv_heads,
        head_dim=draw(_axis("head_dim")),
        capacity=max(1, near),
    )


@st.composite
def cache_contents(draw: st.DrawFn, shape: VerifyShape) -> npt.NDArray[np.uint8]:
    """Q8_0 caches of a shape: uint8 [capacity, n_kv_heads, head_dim // 32, 34], every value finite."""
    make = CACHES[draw(_axis("keys"))]
    blocks: npt.NDArray[np.uint8] = make(
        np.random.default_rng(draw(_SEEDS)), kv_cache_shape(shape.capacity, shape.n_kv_heads, shape.head_dim)
    )
    return blocks


def layouts() -> st.SearchStrategy[Arrangement]:
    """How a call is laid out: sub-batches, workspace, offsets of views, stream."""
    names = ("partials_rows", "spare_tiles", "offset", "stream")
    return st.builds(Arrangement, **{name: _axis(name) for name in names})
