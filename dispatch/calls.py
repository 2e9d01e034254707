"""Run attention: build the request from the arrays, admit it, take a plan from the cache or make one, run it."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from hipfire_kernels.dispatch import counters, policy
from hipfire_kernels.dispatch.admission import Decision
from hipfire_kernels.dispatch.planning import Plan, decide, draft_refusal
from hipfire_kernels.dispatch.request import AttendRequest
from hipfire_kernels.dispatch.routes import route as route_named
from hipfire_kernels.errors import InputError, NotAdmitted
from hipfire_kernels.layout import covering
from hipfire_kernels.running import devices as runtime
from hipfire_kernels.running.attention import VerifyShape, check_heads, check_positions, check_verify, write_kv
from hipfire_kernels.running.devices.protocol import Device
from hipfire_kernels.running.draft import DraftWorkspace, draft_attend_rows

OnDecision = Callable[[Decision], None]


def attend(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    positions: Any,
    *,
    ctx: int | None = None,
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
        positions: int32 [rows], the cache slot of each row; -1 sees no key and gives zeros. In host memory, or on the
            device; there they are read back, which waits for the device, unless `ctx` is given.
        ctx: keys the last row sees. With it, positions on a GPU are taken as they are: the rows must be a chain (or a
            tree), and a row that sees more than `ctx` comes out as NaN.
        route: "auto", or a route to insist on.
        out: float32, the shape of q; allocated when None.
        device: where the arrays live; found from q by default.
        stream: a stream of the device. By default the current one of the library that q comes from (torch, cupy), for
            this library's own arrays the device's default stream.
        scale: of the scores; 1 / sqrt(head_dim) by default.
        tree_bias: float32 [rows, block_cols], added to the scores of the last block_cols keys; every row then sees
            the keys 0 .. positions[0] + block_cols - 1.
        window: see only the last `window` keys; 0 for all.
        capturing, recording: see `AttendRequest`. While the device is capturing a graph, `capturing` is true.
        on_decision: called with the decision before anything is launched.

    Returns:
        `out`.

    Raises:
        InputError: an argument is not legal; nothing was launched.
        NotAdmitted: no route may run this, or not the one asked for; the message lists the failing checks.
    """
    on = _device(device, q)
    stream = _stream(stream, q)
    shape = check_verify(on, q, k_cache, v_cache)
    where = _known_positions(on, positions, ctx)
    block_cols = 0 if tree_bias is None else _check_tree(on, tree_bias, shape, where, window)
    capturing = capturing or on.capturing
    request = AttendRequest(
        arch=on.arch.name,
        workload="verify",
        kv_format="q8_0",
        head_dim=shape.head_dim,
        n_heads=shape.n_heads,
        n_kv_heads=shape.n_kv_heads,
        rows=shape.rows,
        logical_ctx=_context(shape, where, ctx, block_cols),
        layout="tree" if block_cols else _row_layout(where),
        capturing=capturing,
        recording=recording,
        window=window,
        capacity=shape.capacity,
        multiprocessors=on.multiprocessors,
    )
    decision = decide(request, route)
    if on_decision is not None:
        on_decision(decision)
    to = _output(on, out, (shape.rows, shape.n_heads, shape.head_dim))
    prepared = _plan_for(decision, on, shape, block_cols, stream)
    live = None if capturing or recording else request.logical_ctx
    prepared.run(q, k_cache, v_cache, positions, to, stream=stream, ctx=live, scale=scale, tree_bias=tree_bias)
    return to if out is not None else _in_kind(to, q)


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
        k, v: float32 [keys, n_kv_heads, head_dim], context then block. float16 for the routes on matrix units, which
            need evidence for the arch: no other takes it.
        window: hide keys at a distance of `window` or more; 0 for none.
        causal: hide keys behind the row.
        out, device, stream, scale, route, on_decision: see `attend`.

    Returns:
        float32 [rows, n_heads, head_dim].
    """
    on = _device(device, q)
    stream = _stream(stream, q)
    keys = on.view("k", k)
    q_shape, k_shape = on.view("q", q).shape, keys.shape
    if len(q_shape) != 3 or len(k_shape) != 3:
        raise InputError(
            f"q has shape {q_shape} and k {k_shape}; required: [rows][n_heads][head_dim], [keys][n_kv_heads][head_dim]"
        )
    check_heads(q_shape[0], q_shape[1], k_shape[1], q_shape[2])
    request = AttendRequest(
        arch=on.arch.name,
        workload="draft",
        kv_format=keys.dtype,
        head_dim=q_shape[2],
        n_heads=q_shape[1],
        n_kv_heads=k_shape[1],
        rows=q_shape[0],
        logical_ctx=k_shape[0],
        layout="chain",
        capturing=on.capturing,
        recording=False,
        window=window,
        causal=causal,
        multiprocessors=on.multiprocessors,
    )
    decision = decide(request, route)
    if on_decision is not None:
        on_decision(decision)
    to = _output(on, out, q_shape)
    name = _draft_route(decision, on, q_shape[2])
    variant = route_named(name).variant(request)
    tuned = decision.tuning_of(name)
    with _draft_workspace(on, stream) as held:
        held.splits = tuned.splits
        draft_attend_rows(
            on,
            q,
            k,
            v,
            to,
            variant=tuned.of(variant),
            scale=scale,
            window=window,
            causal=causal,
            stream=stream,
            workspace=held,
        )
    counters.count_route(name)
    return to if out is not None else _in_kind(to, q)


def _draft_route(decision: Decision, device: Device, head_dim: int) -> str:
    """The route to launch: the admitted one, or the established one if the launcher refuses it."""
    name = str(decision.route)
    reason = draft_refusal(name, device, head_dim)
    if reason is None:
        return name
    if decision.fallback is None:
        raise NotAdmitted(f"the launcher refuses {name} ({reason}) and no established route may run", decision)
    counters.count_drift(name, reason, decision.fallback)
    return decision.fallback


WORKSPACES = 8
"""Draft workspaces that are kept; the least recently used goes first."""

_workspaces: OrderedDict[tuple[Any, ...], DraftWorkspace] = OrderedDict()


@contextlib.contextmanager
def _draft_workspace(device: Device, stream: Any) -> Iterator[DraftWorkspace]:
    """The workspace of this thread and stream, kept for the next call. Taken out meanwhile: calls may be nested."""
    key = (device, *_owner(stream))
    with _plans_lock:
        held = _workspaces.pop(key, None) or DraftWorkspace()
    try:
        yield held
    finally:
        with _plans_lock:
            _workspaces[key] = held
            while len(_workspaces) > WORKSPACES:
                _workspaces.popitem(last=False)


def kv_write(
    k: Any,
    v: Any,
    k_cache: Any,
    v_cache: Any,
    positions: Any,
    *,
    device: Device | str | None = None,
    stream: Any = None,
) -> None:
    """Quantise new K and V rows into the cache, in place.

    Args:
        k, v: float32 [rows, n_kv_heads, head_dim], finite.
        k_cache, v_cache: uint8 [capacity, n_kv_heads, head_dim // 32, 34].
        positions: int32 [rows], distinct, inside the capacity.
    """
    on = _device(device, k_cache)
    stream = _stream(stream, k_cache)
    cache, new = on.view("k_cache", k_cache), on.view("k", k)
    slots = on.to_host(positions) if not isinstance(positions, np.ndarray) else positions
    check_positions(slots, new.shape[0], cache.shape[0], least=0)
    taken, times = np.unique(slots, return_counts=True)
    if times.max() > 1:
        raise InputError(
            f"positions holds {taken[times.argmax()]} twice; required: a cache slot of its own for each row"
        )
    at = on.to_device(positions) if isinstance(positions, np.ndarray) else positions
    write_kv(on, k, v, k_cache, v_cache, at, stream=stream)


WORKSPACE_LIMIT = 1 << 30
"""Bytes of workspace that cached plans may hold together; the least recently used go first."""

_plans: OrderedDict[tuple[Any, ...], Plan] = OrderedDict()
_plans_lock = threading.Lock()


def _plan_for(decision: Decision, device: Device, shape: VerifyShape, block_cols: int, stream: Any) -> Plan:
    """A plan that covers the request. Two streams or threads never share one, since a plan has one workspace."""
    fixed = decision.request.capturing or decision.request.recording
    ctx = shape.capacity if fixed else int(decision.request.logical_ctx or 0)
    covered = covering(ctx)  # so that a growing context finds the same plan
    key = (
        decision.route,
        tuple(decision.tuning_of(decision.route).values.items()),
        decision.request.layout,
        bool(decision.request.window),
        fixed,
        device,
        shape,
        covered,
        block_cols,
        policy.current().partials_rows,
        _owner(stream),
    )
    with _plans_lock:
        found = _plans.pop(key, None)
    prepared = found or Plan(decision, device, shape, covered, block_cols)
    prepared.decision = decision
    with _plans_lock:
        _plans[key] = prepared
        while len(_plans) > 1 and sum(p.workspace_bytes for p in _plans.values()) > WORKSPACE_LIMIT:
            _plans.popitem(last=False)
    return prepared


def _owner(stream: Any) -> tuple[int, str]:
    """Whose a workspace is: this thread's, for this stream."""
    return (threading.get_ident(), str(getattr(stream, "handle", stream)))


def _device(device: Device | str | None, array: Any) -> Device:
    if device is None:
        return runtime.device_of(array)
    return runtime.device(device) if isinstance(device, str) else device


def _stream(stream: Any, array: Any) -> Any:
    """The stream asked for, else the one that the array's library queues its work on now."""
    library = sys.modules.get(type(array).__module__.partition(".")[0])
    if stream is not None or library is None:
        return stream
    if library.__name__ == "torch" and array.device.type == "cuda":
        return int(library.cuda.current_stream(array.device).cuda_stream)
    if library.__name__ == "cupy":
        return int(library.cuda.get_current_stream().ptr)
    return None


def _known_positions(device: Device, positions: Any, ctx: int | None) -> npt.NDArray[Any] | None:
    """The positions as numpy, or None where the caller vouches for them with a context."""
    if isinstance(positions, np.ndarray):
        return positions
    if ctx is not None:
        return None
    device.view("positions", positions)
    return device.to_host(positions)


def _context(shape: VerifyShape, where: npt.NDArray[Any] | None, ctx: int | None, block_cols: int) -> int:
    """Keys that the longest row sees."""
    if where is not None:
        seen = check_positions(where, shape.rows, shape.capacity)
        return int(where[0]) + block_cols if block_cols else seen
    if not isinstance(ctx, int) or not 0 <= ctx <= shape.capacity:
        raise InputError(f"ctx is {ctx!r}; required: 0 .. {shape.capacity}, the capacity of the cache")
    return ctx


def _row_layout(where: npt.NDArray[Any] | None) -> str:
    """Rows that the caller vouches for are a chain."""
    return "chain" if where is None or bool((np.diff(where) == 1).all()) else "independent"


def _check_tree(device: Device, tree_bias: Any, shape: VerifyShape, where: npt.NDArray[Any] | None, window: int) -> int:
    """Refuse a tree the kernel cannot honour; return its columns."""
    view = device.view("tree_bias", tree_bias)
    if view.dtype != "f32" or len(view.shape) != 2 or view.shape[0] != shape.rows or not view.shape[1]:
        raise InputError(
            f"tree_bias has dtype {view.dtype} and shape {view.shape}; required: f32 [{shape.rows}][block_cols]"
        )
    if window:
        raise InputError(f"window is {window} with a tree_bias; required: one of the two")
    columns = int(view.shape[1])
    if where is not None and not 0 <= int(where[0]) <= shape.capacity - columns:
        start = int(where[0])
        raise InputError(
            f"the tree covers cache slots {start} .. {start + columns - 1}; required: 0 .. {shape.capacity - 1}"
        )
    return columns


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


def _in_kind(result: Any, like: Any) -> Any:
    """The result as an array of the library that `like` comes from, through DLPack, without a copy.

    A library without `from_dlpack` gets this library's own array, which speaks DLPack.
    """
    library = sys.modules[type(like).__module__.partition(".")[0]]
    if type(like) is type(result) or not hasattr(library, "from_dlpack"):
        return result
    return library.from_dlpack(result)
