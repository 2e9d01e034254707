"""A fuzz case: names and numbers that say everything about one input, never the tensors themselves."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from hipfire_kernels.authoring.family import Variant
from hipfire_kernels.errors import InputError
from hipfire_kernels.kernels import families


@dataclass(frozen=True)
class FuzzCase:
    """One input of one variant. A field at its default is the simplest choice; `axes.AXES` says what each may be.

    Attributes:
        variant: entry name. The only thing that has no default.
        ctx: keys the furthest row sees; for a tree those in front of the block.
        group: query heads per KV head.
        spoilt: what of q, K, V or the tree bias is no number where a row reads it, as in "k nan"; nothing when empty.
        invariant: which exact invariant is checked besides parity; none when empty.
    """

    variant: str
    seed: int = 0
    rows: int = 1
    ctx: int = 1
    n_kv_heads: int = 1
    group: int = 1
    head_dim: int = 32
    queries: str = "normal"
    keys: str = "normal"
    values: str = "normal"
    positions: str = "chain"
    window: int = 0
    causal: bool = False
    bias: str = "tree"
    extra_cols: int = 0
    scale: float | None = None
    unseen: str = "nan"
    slack: int = 0
    spare_tiles: int = 0
    partials_rows: int = 16
    offset: int = 0
    stream: str = "default"
    spoilt: str = ""
    invariant: str = ""

    @property
    def n_heads(self) -> int:
        """Query heads."""
        return self.n_kv_heads * self.group

    @property
    def work(self) -> int:
        """Multiply-adds of the scores: what a case costs."""
        return self.rows * self.n_heads * max(1, self.ctx) * self.head_dim

    def describe(self) -> str:
        """The fields that are not at their default, in one line."""
        return " ".join(f"{name}={value}" for name, value in self.as_dict().items())

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the variant and what differs from the defaults."""
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        return {name: value for name, value in vars(self).items() if value != defaults[name]}

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(self.as_dict())


@lru_cache(maxsize=1)
def entries() -> dict[str, Variant]:
    """Every variant by its entry name."""
    return {v.entry: v for family in families().values() for v in family.variants()}


def variant_of(case: FuzzCase) -> Variant:
    """The variant a case is of.

    Raises:
        InputError: no variant has that entry name.
    """
    found = entries().get(case.variant)
    if found is None:
        raise InputError(f"no variant has the entry name {case.variant!r}; `hfk list` has all names")
    return found


def kind_of(variant: Variant) -> str:
    """What a request of a variant is, by the arrays it declares: `verify`, `draft`, or nothing for other kernels."""
    names = {arg.name for arg in variant.args}
    if {"q", "k_cache", "v_cache", "positions"} <= names:
        return "verify"
    return "draft" if {"q", "k", "v"} <= names else ""


def is_tree(variant: Variant) -> bool:
    """Whether a variant's rows are a tree: one of its parameters says so."""
    return "tree" in dict(variant.params).values()
