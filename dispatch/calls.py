"""Run attention: build the request from the arrays, admit it, let the launcher check again, launch.

The launcher's check looks at the device and the arrays, not at the request, and shares no code with the predicates of
the table. When the two disagree the call runs the established route, once, and the disagreement is counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from .. import runtime
from ..attention import (
    VerifyShape,
    attend_tiles,
    check_heads,
    check_positions,
    check_verify,
    draft_attend_rows,
    write_kv,
)
from ..errors import InputError, NotAdmitted
from ..runtime import Device
from . import counters, evidence
from .admission import Decision, admit
from .request import AttendRequest
from .routes import route as route_named

OnDecision = Callable[[Decision], None]


def attend(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    positions: Any,
    *,
    route: str = "auto",
    out: Any = None,
    device: Device | str | None = None,
    stream: Any = None,
    scale: float | None = None,
    tree_bias: Any = None,
    window: int = 0,
    capturing: bool = False,
    recording: bool = False,
    on_decision: OnDecision | None = None,
) -> Any:
    """Attend query rows to a Q8_0 KV cache. Row r sees the keys 0 .. positions[r].

    Args:
        q: float32 [rows, n_heads, head_dim], C-contiguous.
        k_cache, v_cache: uint8 [capacity, n_kv_heads, head_dim // 32, 34].
        positions: int32 [rows], the cache slot of each row; -1 sees no key and gives zeros.
        route: "auto", or a route to insist on.
        out: float32, the shape of q; allocated when None.
        device: where the arrays live; the host by default.
        scale: of the scores; 1 / sqrt(head_dim) by default.
        tree_bias: float32 [rows, block_cols], added to the scores of the last block_cols keys; every row then sees
            the keys 0 .. positions[0] + block_cols - 1.
        window: see only the last `window` keys; 0 for all.
        capturing, recording: see `AttendRequest`.
        on_decision: called with the decision before anything is launched.

    Returns:
        `out`.

    Raises:
        InputError: an argument is not legal; nothing was launched.
        NotAdmitted: no route may run this, or not the one asked for; the message lists the failing checks.
    """
    on = _device(device)
    shape = check_verify(on, q, k_cache, v_cache, positions)
    where = on.to_host(positions)
    ctx = check_positions(where, shape.capacity)
    if tree_bias is not None:
        ctx = _check_tree(on, tree_bias, shape, int(where[0]), window)
    request = AttendRequest(
        arch=on.arch.name,
        workload="verify",
        kv_format="q8_0",
        head_dim=shape.head_dim,
        n_heads=shape.n_heads,
        n_kv_heads=shape.n_kv_heads,
        rows=shape.rows,
        logical_ctx=ctx,
        layout=_layout(where, tree_bias),
        capturing=capturing,
        recording=recording,
        window=window,
    )
    decision = _decide(request, route, on_decision)
    name = _recheck(decision, on, shape, where, capturing, recording)
    out = _output(on, out, (shape.rows, shape.n_heads, shape.head_dim))
    attend_tiles(
        route_named(name).variant(request),
        on,
        q,
        k_cache,
        v_cache,
        positions,
        out,
        # A captured launch must stay right as the context grows: its grid covers the whole cache.
        ctx=shape.capacity if capturing or recording else ctx,
        scale=scale,
        tree_bias=tree_bias,
        window=window,
        stream=stream,
    )
    counters.count_route(name)
    return out


def draft_attend(
    q: Any,
    k: Any,
    v: Any,
    *,
    route: str = "auto",
    window: int = 0,
    causal: bool = False,
    out: Any = None,
    device: Device | str | None = None,
    stream: Any = None,
    scale: float | None = None,
    on_decision: OnDecision | None = None,
) -> Any:
    """Attention of a draft block: the rows stand behind the context, at positions keys - rows .. keys - 1.

    Args:
        q: float32 [rows, n_heads, head_dim].
        k, v: float32 [keys, n_kv_heads, head_dim], context then block.
        window: hide keys at a distance of `window` or more; 0 for none.
        causal: hide keys behind the row.
        out, device, stream, scale, route, on_decision: see `attend`.

    Returns:
        float32 [rows, n_heads, head_dim].
    """
    on = _device(device)
    q_shape, k_shape = on.view("q", q).shape, on.view("k", k).shape
    if len(q_shape) != 3 or len(k_shape) != 3:
        raise InputError(
            f"q has shape {q_shape} and k {k_shape}; required: [rows][n_heads][head_dim], [keys][n_kv_heads][head_dim]"
        )
    check_heads(q_shape[0], q_shape[1], k_shape[1], q_shape[2])
    request = AttendRequest(
        arch=on.arch.name,
        workload="draft",
        kv_format="f32",
        head_dim=q_shape[2],
        n_heads=q_shape[1],
        n_kv_heads=k_shape[1],
        rows=q_shape[0],
        logical_ctx=k_shape[0],
        layout="chain",
        capturing=False,
        recording=False,
        window=window,
        causal=causal,
    )
    decision = _decide(request, route, on_decision)
    out = _output(on, out, q_shape)
    draft_attend_rows(on, q, k, v, out, scale=scale, window=window, causal=causal, stream=stream)
    counters.count_route(str(decision.route))
    return out


def kv_write(
    k: Any, v: Any, k_cache: Any, v_cache: Any, positions: Any, *, device: Device | str | None = None, stream: Any = None
) -> None:
    """Quantise new K and V rows into the cache, in place.

    Args:
        k, v: float32 [rows, n_kv_heads, head_dim], finite.
        k_cache, v_cache: uint8 [capacity, n_kv_heads, head_dim // 32, 34].
        positions: int32 [rows], distinct, inside the capacity.
    """
    on = _device(device)
    cache = on.view("k_cache", k_cache)
    where = on.view("positions", positions)
    if where.dtype != "i32" or len(where.shape) != 1 or not where.shape[0]:
        raise InputError(f"positions has dtype {where.dtype} and shape {where.shape}; required: i32 [rows], rows > 0")
    slots = on.to_host(positions)
    check_positions(slots, cache.shape[0], least=0)
    taken, times = np.unique(slots, return_counts=True)
    if times.max() > 1:
        raise InputError(f"positions holds {taken[times.argmax()]} twice; required: a cache slot of its own for each row")
    write_kv(on, k, v, k_cache, v_cache, positions, stream=stream)


def _device(device: Device | str | None) -> Device:
    if device is None or isinstance(device, str):
        return runtime.device(device or "host")
    return device


def _check_tree(device: Device, tree_bias: Any, shape: VerifyShape, start: int, window: int) -> int:
    """Refuse a tree the kernel cannot honour; return the context its rows see."""
    view = device.view("tree_bias", tree_bias)
    if view.dtype != "f32" or len(view.shape) != 2 or view.shape[0] != shape.rows or not view.shape[1]:
        raise InputError(
            f"tree_bias has dtype {view.dtype} and shape {view.shape}; required: f32 [{shape.rows}][block_cols]"
        )
    if window:
        raise InputError(f"window is {window} with a tree_bias; required: one of the two")
    if start < 0 or start + view.shape[1] > shape.capacity:
        raise InputError(
            f"the tree covers cache slots {start} .. {start + view.shape[1] - 1}; required: 0 .. {shape.capacity - 1}"
        )
    return start + int(view.shape[1])


def _layout(positions: np.ndarray[Any, Any], tree_bias: Any) -> str:
    if tree_bias is not None:
        return "tree"
    return "chain" if bool((np.diff(positions) == 1).all()) else "independent"


def _decide(request: AttendRequest, route: str, on_decision: OnDecision | None) -> Decision:
    decision = admit(request, route_name=route)
    if decision.route is None:
        raise NotAdmitted(f"no route may run this request\n{decision.explain()}", decision)
    if on_decision is not None:
        on_decision(decision)
    return decision


def _recheck(
    decision: Decision, device: Device, shape: VerifyShape, positions: np.ndarray[Any, Any], capturing: bool, recording: bool
) -> str:
    """The route to launch: the admitted one, or the established one if the launcher refuses it."""
    name = str(decision.route)
    if not name.startswith("rows"):
        return name
    reason = _multirow_refusal(int(name[4:]), device, shape, positions, capturing or recording)
    if reason is None:
        return name
    if decision.fallback is None:
        raise NotAdmitted(f"the launcher refuses {name} ({reason}) and no established route may run", decision)
    counters.count_drift(name, reason, decision.fallback)
    return decision.fallback


def _multirow_refusal(
    group: int, device: Device, shape: VerifyShape, positions: np.ndarray[Any, Any], captured: bool
) -> str | None:
    """Why the multi-row launcher will not run on these arrays, or None."""
    if evidence.find(device.arch.name, f"rows{group}", shape.head_dim) is None:
        return f"no evidence for {device.arch.name}"
    if captured:
        return "its grid follows the live context, which a captured launch cannot"
    if shape.head_dim not in (128, 256):
        return f"head_dim {shape.head_dim} has no multi-row kernel"
    if not group <= shape.rows <= 32:
        return f"{shape.rows} rows are not {group} .. 32"
    if int(positions[-1]) - int(positions[0]) != shape.rows - 1 or bool((positions[1:] <= positions[:-1]).any()):
        return "the positions are not consecutive"
    return None


def _output(device: Device, out: Any, shape: tuple[int, ...]) -> Any:
    """The caller's output array once it is known to fit, or a new one."""
    if out is None:
        return device.empty(shape, np.float32)
    view = device.view("out", out)
    if view.dtype != "f32" or view.shape != tuple(shape):
        raise InputError(f"out has dtype {view.dtype} and shape {view.shape}; required: f32 {tuple(shape)}, as q")
    if not view.writable:
        raise InputError("out is read-only; the kernel writes it")
    return out
