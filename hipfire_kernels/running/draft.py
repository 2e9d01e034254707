"""Draft attention: one launch, or a split launch and the reducer. The caller says which variant."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hipfire_kernels.authoring.family import Site, Variant
from hipfire_kernels.errors import InputError
from hipfire_kernels.kernels import families
from hipfire_kernels.layout import partials_shape
from hipfire_kernels.running.arguments import flag, window_keys
from hipfire_kernels.running.attention import check_heads, reducer, splits_of
from hipfire_kernels.running.binding import BoundLaunch, bind, check_apart, prepare, rivals
from hipfire_kernels.running.devices.protocol import Device, Launch, View


@dataclass
class DraftWorkspace:
    """What a split variant keeps between its two launches. For one stream, and one thread, at a time.

    Attributes:
        splits: of the context; the family's default when None.
    """

    splits: int | None = None
    partials: Any = None
    positions: Any = None
    _made_for: tuple[Any, ...] = field(default=())

    def make(self, variant: Variant, device: Device, rows: int, n_heads: int, n_kv_heads: int) -> None:
        """Allocate what calls of this shape need, unless it is there."""
        wanted = (variant, device, rows, n_heads, n_kv_heads, self.splits)
        if wanted == self._made_for:
            return
        shape = draft_workspace_shape(variant, device.multiprocessors, rows, n_heads, n_kv_heads, self.splits)
        self.partials = device.empty(shape, np.float32)
        self.positions = device.to_device(np.zeros(rows, np.int32))
        self._made_for = wanted


def draft_workspace_shape(
    variant: Variant, multiprocessors: int, rows: int, n_heads: int, n_kv_heads: int, splits: int | None
) -> tuple[int, int, int, int]:
    """Shape of the partials of a variant that splits the context: all rows at once."""
    records = splits_of(variant, Site(multiprocessors, n_kv_heads, rows), splits)
    return partials_shape(rows, n_heads, records, variant.head_dim)


def draft_attend_rows(device: Device, q: Any, k: Any, v: Any, out: Any, *, stream: Any = None, **options: Any) -> None:
    """Run a draft kernel, and the reducer behind one that splits the context. Arguments: see `draft_launches`."""
    device.launch(draft_launches(device, q, k, v, out, **options), stream)


def draft_launches(
    device: Device,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    *,
    variant: Variant | None = None,
    scale: float | None = None,
    window: int = 0,
    causal: bool = False,
    workspace: DraftWorkspace | None = None,
) -> tuple[Launch, ...]:
    """The launches of one draft-attention call, for these arrays.

    Args:
        q: float32 [rows, n_heads, head_dim]; k, v: [keys, n_kv_heads, head_dim], context then block, float32 or what
            the variant's `kv` says.
        out: float32, the shape of q; written. It lies apart from the others, or is the very array q.
        variant: of a family whose oracle is "draft"; the scalar one by default.
        window: 0 for none; else keys at a distance of `window` or more are hidden.
        workspace: of a variant that splits the context; made for this call when None.
    """
    views = _check(device, q, k, v, variant)
    (rows, n_heads, head_dim), (keys, n_kv_heads, _) = views["q"].shape, views["k"].shape
    window, causal = window_keys(window), flag("causal", causal)
    sliding = bool(window or causal)
    chosen = variant or families()["attention_dflash_f32"].variant(head_dim=head_dim, sliding=sliding)
    if sliding and not chosen.sliding:
        raise InputError(f"{chosen.name} has no window and no causal mask; take its variant with sliding=True")
    span = {"window": window or keys + rows, "causal": int(causal)} if chosen.sliding else {}
    scalars = {"scale": 1 / math.sqrt(head_dim) if scale is None else scale, **span}
    to = {"out": device.view("out", out)}
    merging = reducer(chosen)
    if merging is None:
        bound: tuple[BoundLaunch, ...] = (bind(chosen, {**views, **to}, **scalars),)
    else:
        held = workspace or DraftWorkspace()
        held.make(chosen, device, rows, n_heads, n_kv_heads)
        partials = {"partials": device.view("partials", held.partials)}
        first = bind(chosen, {**views, **partials}, **scalars)
        # Every row sees what the first launch covered: positions 0 in a context of 1.
        positions = {"positions": device.view("positions", held.positions)}
        second = bind(merging, {**partials, **positions, **to}, first_row=0, batch=rows, ctx=1)
        first.args.keeps = second.args.keeps = (held.partials, held.positions)
        bound = (first, second)
    called = {**views, **to}
    check_apart(rivals((chosen, merging), {name: view.nbytes for name, view in called.items()}), called)
    return tuple(prepare(one, device) for one in bound)


def _check(device: Device, q: Any, k: Any, v: Any, variant: Variant | None) -> dict[str, View]:
    """Refuse arrays that are no draft block and its context; the views by name."""
    kv = dict(variant.params).get("kv", "f32") if variant else "f32"
    context = "[keys][n_kv_heads][head_dim]"
    views = {
        "q": _view(device, "q", q, "f32", "[rows][n_heads][head_dim]"),
        "k": _view(device, "k", k, kv, context),
        "v": _view(device, "v", v, kv, context),
    }
    (rows, n_heads, head_dim), k_shape = views["q"].shape, views["k"].shape
    check_heads(rows, n_heads, k_shape[1], head_dim)
    if views["v"].shape != k_shape:
        raise InputError(f"v has shape {views['v'].shape}; required: the shape of k, {k_shape}")
    if k_shape[2] != head_dim:
        raise InputError(f"k has shape {k_shape}; required: the head_dim of q, {head_dim}")
    if k_shape[0] < rows:
        raise InputError(
            f"k has {k_shape[0]} keys for {rows} query rows; required: context and block, at least the rows"
        )
    return views


def _view(device: Device, name: str, array: Any, dtype: str, wanted: str) -> View:
    view = device.view(name, array)
    if view.dtype != dtype:
        raise InputError(f"{name} has dtype {view.dtype}; required: {dtype} {wanted}")
    if len(view.shape) != 3:
        raise InputError(f"{name} has shape {view.shape}; required: 3 dimensions {wanted}")
    return view
