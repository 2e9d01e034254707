"""The one table of what is varied, and the one way a case is drawn from it.

`draw` asks a `Source` to pick. The seeded generator and the Hypothesis strategies are two sources; neither has a table
of its own. Values stand simplest first: that is where a source leans to, and where a failing case is shrunk to.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from hipfire_kernels.authoring.family import Variant
from hipfire_kernels.checking.spoil import KINDS
from hipfire_kernels.kernels.arguments import HEAD_DIMS
from hipfire_kernels.layout import TILE
from hipfire_kernels.testing.case import FuzzCase, is_tree, kind_of, variant_of
from hipfire_kernels.testing.contents import BIASES, CACHES, POSITIONS, QUERIES, UNSEEN
from hipfire_kernels.testing.invariants import invariants_of

T = TypeVar("T")

WORK = 1 << 22
"""Multiply-adds of the scores that a case may take: about 20 ms on one core of the host device."""


@dataclass(frozen=True)
class Axis:
    """One axis: its values, simplest first.

    Attributes:
        size: a value multiplies the cost, so sources that have the choice lean to the first ones.
    """

    doc: str
    values: tuple[Any, ...]
    size: bool = False


AXES: Mapping[str, Axis] = {
    "rows": Axis("query rows", (1, 2, 3, 4, 5, 7, 8, 9, 13, 15, 16, 17, 31, 32, 33), size=True),
    "tiles": Axis("tiles of 128 keys in front of the edge", (0, 1, 2, 3, 4, 5, 9, 17, 33, 65, 162, 256), size=True),
    "edge": Axis("keys from there to the end of the context", (1, 0, -1, 2, -2, 3, 17, 37, 64, 68, 100)),
    "n_kv_heads": Axis("KV heads", (1, 2, 3, 4), size=True),
    "group": Axis("query heads per KV head", (1, 2, 3, 4, 5, 6, 7, 8, 12, 16), size=True),
    "head_dim": Axis("where the variant leaves it open", HEAD_DIMS, size=True),
    "queries": Axis("contents of q", tuple(QUERIES)),
    "keys": Axis("contents of K", tuple(CACHES)),
    "values": Axis("contents of V", tuple(CACHES)),
    "positions": Axis("where the rows stand", tuple(POSITIONS)),
    "causal": Axis("a draft row sees no key behind it", (False, True)),
    "bias": Axis("of a tree variant", tuple(BIASES)),
    "extra_cols": Axis("columns of the tree bias over the rows", (0, 1, 3)),
    "scale": Axis("of the scores; None: 1 / sqrt(head_dim)", (None, 0.25, 0.0, -0.1)),
    "unseen": Axis("bytes no row may see", tuple(UNSEEN)),
    "slack": Axis("cache positions behind the last one seen", (0, 1, 37, 200)),
    "spare_tiles": Axis("tiles the workspace covers beyond the context", (0, 1, 5)),
    "partials_rows": Axis("rows of one sub-batch", (16, 1, 2, 3, 5, 8)),
    "offset": Axis("steps of the least alignment that each view starts behind its allocation", (0, 1, 2, 3, 5)),
    "spoilt": Axis(
        "NaN, or an infinity, where a row reads it",
        ("", *(f"{where} {kind}" for where in ("q", "k", "v", "bias") for kind in KINDS)),
    ),
    "stream": Axis("side: a stream of its own, on the host a thread of its own", ("default", "side")),
}
"""Axis name to its values. A window is drawn around the context, the invariant from those that hold for the oracle."""

ALWAYS = ("rows", "tiles", "edge", "n_kv_heads", "group", "queries", "keys", "values")
BY_KIND: Mapping[str, tuple[str, ...]] = {
    "verify": ("positions", "scale", "unseen", "slack", "spare_tiles", "partials_rows", "offset", "stream"),
    "draft": ("scale", "unseen", "offset", "stream"),
}
"""Axes that only calls of a kind have a use for."""


class Source(Protocol):
    """What picks for `draw`."""

    def pick(self, axis: str, values: Sequence[T], *, small: bool) -> T:
        """One of the values. `small`: leaning to the first ones."""

    def seed(self) -> int:
        """A number below 2**32."""


class RandomSource:
    """Picks by a seeded generator."""

    def __init__(self, seed: Any) -> None:
        self._random = random.Random(str(seed))

    def pick(self, axis: str, values: Sequence[T], *, small: bool) -> T:
        """See `Source.pick`: of a small axis the lesser of two draws."""
        index = self._random.randrange(len(values))
        if small:
            index = min(index, self._random.randrange(len(values)))
        return values[index]

    def seed(self) -> int:
        """See `Source.seed`."""
        return self._random.getrandbits(32)


def draw(variant: Variant, source: Source, work: int = WORK) -> FuzzCase:
    """One case of a variant, within `work`."""
    params = dict(variant.params)

    def pick(name: str) -> Any:
        axis = AXES[name]
        return source.pick(name, axis.values, small=axis.size)

    chosen = {name: pick(name) for name in (*ALWAYS, *BY_KIND.get(kind_of(variant), ()))}
    if is_tree(variant):
        chosen |= {name: pick(name) for name in ("bias", "extra_cols")}
        chosen["positions"] = "chain"
    if params.get("sliding"):
        chosen["causal"] = pick("causal")
    chosen["head_dim"] = params["head_dim"] if "head_dim" in params else pick("head_dim")
    chosen["group"] = params.get("group", chosen["group"])
    chosen = _within(chosen, work, fixed_group="group" in params)
    ctx = chosen["ctx"] = context(chosen.pop("tiles"), chosen.pop("edge"))
    if params.get("mask") == "window" or params.get("sliding"):
        chosen["window"] = source.pick("window", windows(ctx, optional=bool(params.get("sliding"))), small=False)
    spoils = spoils_of(variant)
    chosen["spoilt"] = source.pick("spoilt", ("",) * len(spoils) + spoils, small=False)  # every other case is clean
    chosen["invariant"] = source.pick("invariant", ("", *invariants_of(variant)), small=False)
    return FuzzCase(variant.entry, source.seed(), **chosen)


def spoils_of(variant: Variant) -> tuple[str, ...]:
    """What of a call of the variant can be spoilt, besides nothing. Of writes and reducers it is whatever they read."""
    where = ("q", "k", "v", "bias") if is_tree(variant) else ("q", "k", "v")
    return tuple(value for value in AXES["spoilt"].values if value.split(" ")[0] in where)


def context(tiles: int, edge: int) -> int:
    """Keys of so many tiles and an edge; never negative."""
    return max(0, tiles * TILE + edge)


def windows(ctx: int, *, optional: bool) -> tuple[int, ...]:
    """Windows around a tile and around the context; 0, for none, where it is optional."""
    near = (1, 2, 37, TILE - 1, TILE, TILE + 1, ctx - 1, ctx, ctx + 1, ctx * 5 // 8)
    return ((0,) if optional else ()) + tuple(dict.fromkeys(max(1, w) for w in near))


def _within(chosen: dict[str, Any], work: int, *, fixed_group: bool) -> dict[str, Any]:
    """The choices with sizes lowered, the most excessive first, until the case is within `work`."""

    def cost(c: dict[str, Any]) -> int:
        return int(c["rows"] * c["n_kv_heads"] * c["group"] * c["head_dim"] * max(1, context(c["tiles"], c["edge"])))

    sizes = ("tiles", "rows", "n_kv_heads", *(() if fixed_group else ("group",)))
    while cost(chosen) > work:
        at = {name: AXES[name].values.index(chosen[name]) for name in sizes}
        most = max(sizes, key=lambda name: at[name] / len(AXES[name].values))
        if not at[most]:
            break
        chosen = {**chosen, most: AXES[most].values[at[most] - 1]}
    return chosen


MOST_IN_A_ROW = 20
"""Cases of one variant before the next has its turn: what a process has loaded is used, and does not pile up."""


def generate(
    variants: Sequence[Variant], seed: int, *, shard: int = 0, shards: int = 1, work: int = WORK
) -> Iterator[FuzzCase]:
    """Cases without end: one of each variant, then two of each, then four, up to `MOST_IN_A_ROW`.

    The k-th case of a variant depends on the seed, the variant and k alone. Shard i of n has those with k = i modulo n.
    """
    k = shard
    for turn in range(1 << 62):
        count = min(1 << min(turn, 30), MOST_IN_A_ROW)
        for variant in variants:
            for number in range(k, k + count * shards, shards):
                yield draw(variant, RandomSource((seed, variant.entry, number)), work)
        k += count * shards


def simpler(case: FuzzCase) -> Iterator[FuzzCase]:
    """Cases one step simpler: a field at its simplest, or a number halved or lowered by one."""
    numbers = {"rows": 1, "ctx": 0, "n_kv_heads": 1, "group": 1, "window": 1, "slack": 0, "seed": 0}
    fixed = {"variant", "head_dim"} | ({"group"} & dict(variant_of(case).params).keys())
    for field in dataclasses.fields(case):
        if field.name in fixed:
            continue
        now = getattr(case, field.name)
        if field.name in numbers:
            least = numbers[field.name]
            steps: list[Any] = [least, (now + least) // 2, now - TILE, now - 1]
            candidates = [n for n in dict.fromkeys(steps) if least <= n < now]
        elif field.name in AXES:
            values = AXES[field.name].values
            candidates = list(values[: values.index(now)]) if now in values else [field.default]
        else:
            candidates = [field.default] if field.name == "invariant" and now != field.default else []
        for value in candidates:
            yield dataclasses.replace(case, **{field.name: value})
