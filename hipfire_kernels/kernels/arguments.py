"""Arguments, limits and choices that declarations of several files share."""

from __future__ import annotations

from types import SimpleNamespace

from hipfire_kernels.authoring.args import Scalar, Tensor
from hipfire_kernels.authoring.family import Tolerance, Variant
from hipfire_kernels.layout import MAX_SPLITS, Q8_BLOCK, Q8_BYTES, RECORD_HEAD

HEAD_DIMS = tuple(range(Q8_BLOCK, 257, Q8_BLOCK))
_ORACLES = "hipfire_kernels.testing.oracles"
ATTEND, SPLIT, MERGE = f"{_ORACLES}:ATTEND", f"{_ORACLES}:SPLIT", f"{_ORACLES}:MERGE"
QUANTIZE, DRAFT = f"{_ORACLES}:QUANTIZE", f"{_ORACLES}:DRAFT"
"""Where the library's checks are: of attention calls, which take more than one launch, and of the cache write."""

EXACT_F32 = Tolerance(worst_row=1e-5)

Q8_ALIGN = 2
"""Of a Q8_0 cache, whose scales are loaded and stored two bytes wide."""


def query(v: Variant) -> Tensor:
    """Query rows, float32 [rows, n_heads, head_dim]."""
    return Tensor("q", "f32", ("rows", "n_heads", v.head_dim))


def q8_cache(name: str, v: Variant) -> Tensor:
    """K or V of a Q8_0 cache, uint8 [capacity, n_kv_heads, head_dim / 32, 34]: an f16 scale, then 32 int8."""
    return Tensor(name, "u8", ("capacity", "n_kv_heads", v.head_dim // Q8_BLOCK, Q8_BYTES), align=Q8_ALIGN)


def partials(v: Variant, *, writes: bool, records: str = "max_tiles") -> Tensor:
    """The workspace, float32 [batch_rows, n_heads, records, RECORD_HEAD + head_dim]: maximum, sum, weighted values."""
    return Tensor("partials", "f32", ("batch_rows", "n_heads", records, RECORD_HEAD + v.head_dim), writes)


def output(v: Variant) -> Tensor:
    """What attention writes, float32 [rows, n_heads, head_dim]; it may be the very array q."""
    return Tensor("out", "f32", ("rows", "n_heads", v.head_dim), writes=True, over=("q",))


POSITIONS = Tensor("positions", "i32", ("rows",))
TREE_BIAS = Tensor("tree_bias", "f32", ("rows", "block_cols"))


def ints(*names: str) -> tuple[Scalar, ...]:
    """Int32 arguments by value."""
    return tuple(Scalar(name, "i32") for name in names)


def outside_arrays(v: Variant, s: SimpleNamespace) -> str | None:
    """Why a launch would leave its arrays: the rows of a sub-batch lie in q and in the workspace, its tiles in that."""
    last = s.first_row + s.batch
    if s.batch < 0 or s.first_row < 0 or last > s.rows:
        return f"first_row is {s.first_row} and batch {s.batch}; required: rows of the {s.rows} that the arrays have"
    if s.batch > s.batch_rows:
        return f"batch is {s.batch}; required: at most the {s.batch_rows} rows of partials"
    if getattr(s, "live_tiles", 0) > getattr(s, "max_tiles", 0):
        return f"live_tiles is {s.live_tiles}; required: at most the {s.max_tiles} tiles of partials"
    return None


F16_MAX = 65504.0
"""The largest f16."""

WIDE = 16
"""Bytes that the matrix kernels load and store at once."""

MATRIX_ROWS = 16
"""Query rows, or (row, head) pairs of a KV head, that one wave on matrix units takes: the rows of a fragment."""


SPLIT_SHARES = (1 / 4, 1 / 2, 3 / 4, 3 / 2, 2)
"""Of the default number of splits: what else is worth timing. Fewer leave less to merge, more are more evenly long."""


def splits_worth_timing(default: int) -> tuple[int, ...]:
    """Numbers of splits to time, the default first, each once and from 1 to MAX_SPLITS."""
    others = (min(MAX_SPLITS, max(1, round(share * default))) for share in SPLIT_SHARES)
    return tuple(dict.fromkeys((default, *others)))
