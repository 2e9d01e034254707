"""Run attention: build the request from the arrays, admit it, take a plan from the cache or make one, run it."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hipfire_kernels.dispatch import counters, policy
from hipfire_kernels.dispatch.admission import Decision
from hipfire_kernels.dispatch.planning import Plan, decide, draft_refusal
from hipfire_kernels.dispatch.request import AttendRequest
from hipfire_kernels.dispatch.routes import route as route_named
from hipfire_kernels.errors import InputError, NotAdmitted
from hipfire_kernels.running import devices as runtime
from hipfire_kernels.running.arguments import flag, real, whole, window_keys
from hipfire_kernels.running.attention import (
    VerifyShape,
    check_heads,
    check_positions,
    check_verify,
    check_write,
    context,
    write_kv,
)
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
        ctx: keys that the launch covers; by default as many as the longest row sees. With it, positions on a GPU are
            taken as they are: the rows must be a chain (or a tree), and a row that sees more than `ctx` comes out as
            NaN. Positions in host memory are held against it.
        route: "auto", or a route to insist on.
        out: float32, the shape of q; allocated when None. It lies apart from the others, or is the very array q.
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
        NotAdmitted: no route may run this, or not the one asked for; the message lists the failing checks. One of them
            is that its workspace fits into the device's memory.
        DeviceError: the device has no memory left for it, or the launch failed.
    """
    on = _device(device, q)
    stream = _stream(stream, q)
    shape = check_verify(on, q, k_cache, v_cache)
    window, scale = window_keys(window), None if scale is None else real("scale", scale)
    recording, capturing = flag("recording", recording), flag("capturing", capturing) or on.capturing
    if ctx is not None:
        ctx = whole("ctx", ctx, 0, shape.capacity, f"0 .. {shape.capacity}, the capacity of the cache")
    where = _known_positions(on, positions, ctx)
    block_cols = 0 if tree_bias is None else _check_tree(on, tree_bias, shape, window)
    seen = None if where is None else context(where, shape, block_cols, ctx)
    request = AttendRequest(
        arch=on.arch.name,
        workload="verify",
        kv_format="q8_0",
        head_dim=shape.head_dim,
        n_heads=shape.n_heads,
        n_kv_heads=shape.n_kv_heads,
        rows=shape.rows,
        logical_ctx=seen if ctx is None else ctx,
        layout="tree" if block_cols else _row_layout(where),
        capturing=capturing,
        recording=recording,
        window=window,
        capacity=shape.capacity,
        multiprocessors=on.multiprocessors,
        memory=on.memory_bytes,
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
    window, causal, scale = window_keys(window), flag("causal", causal), None if scale is None else real("scale", scale)
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
        memory=on.memory_bytes,
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

_workspaces: OrderedDict[Owner, DraftWorkspace] = OrderedDict()


@contextlib.contextmanager
def _draft_workspace(device: Device, stream: Any) -> Iterator[DraftWorkspace]:
    """The workspace of this thread and stream, kept for the next call. Taken out meanwhile: calls may be nested."""
    key = _owner(device, stream)
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
        k, v: float32 [rows, n_kv_heads, head_dim], at least one row, finite.
        k_cache, v_cache: uint8 [capacity, n_kv_heads, head_dim // 32, 34]. Each lies apart from all other arrays.
        positions: int32 [rows], distinct, inside the capacity.

    Raises:
        InputError: an argument is not legal; nothing was written.
    """
    on = _device(device, k_cache)
    stream = _stream(stream, k_cache)
    rows, capacity = check_write(on, k, v, k_cache, v_cache)
    slots = on.to_host(positions) if not isinstance(positions, np.ndarray) else positions
    check_positions(slots, rows, capacity, least=0)
    taken, times = np.unique(slots, return_counts=True)
    if times.max() > 1:
        raise InputError(
            f"positions holds {taken[times.argmax()]} twice; required: a cache slot of its own for each row"
        )
    at = on.to_device(positions) if isinstance(positions, np.ndarray) else positions
    write_kv(on, k, v, k_cache, v_cache, at, stream=stream)


WORKSPACE_LIMIT = 1 << 30
"""Bytes of workspace that cached plans may hold together; the least recently used go first."""


class Owner(NamedTuple):
    """Whose a workspace is: this thread's, for this stream. No two threads or streams share one."""

    device: Device
    thread: int
    stream: int


class PlanKey(NamedTuple):
    """What a plan depends on: calls that differ in any of it have another one."""

    route: str | None
    tuning: tuple[tuple[str, int], ...]
    layout: str | None
    windowed: bool
    fixed: bool
    shape: VerifyShape
    covers: int
    block_cols: int
    partials_rows: int
    owner: Owner


_plans: OrderedDict[PlanKey, Plan] = OrderedDict()
_plans_lock = threading.Lock()


def _in_forked_child() -> None:
    """What other threads of the parent held or ran at that moment stays so for ever."""
    global _plans_lock
    _plans_lock = threading.Lock()
    _plans.clear()
    _workspaces.clear()


os.register_at_fork(after_in_child=_in_forked_child)


def _plan_for(decision: Decision, device: Device, shape: VerifyShape, block_cols: int, stream: Any) -> Plan:
    """A plan that covers the request."""
    request = decision.request
    key = PlanKey(
        decision.route,
        tuple(decision.tuning_of(decision.route).values.items()),
        request.layout,
        bool(request.window),
        bool(request.capturing or request.recording),
        shape,
        request.covers,
        block_cols,
        policy.current().partials_rows,
        _owner(device, stream),
    )
    with _plans_lock:
        found = _plans.pop(key, None)
    prepared = found or Plan(decision, device, shape, request.covers, block_cols)
    prepared.decision = decision
    with _plans_lock:
        _plans[key] = prepared
        while len(_plans) > 1 and sum(p.workspace_bytes for p in _plans.values()) > WORKSPACE_LIMIT:
            _plans.popitem(last=False)
    return prepared


def _owner(device: Device, stream: Any) -> Owner:
    return Owner(device, threading.get_ident(), device.stream_handle(stream))


def _device(device: Device | str | None, array: Any) -> Device:
    return runtime.device_of(array) if device is None else runtime.resolve(device)


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


def _row_layout(where: npt.NDArray[Any] | None) -> str:
    """Rows that the caller vouches for are a chain."""
    return "chain" if where is None or bool((np.diff(where) == 1).all()) else "independent"


def _check_tree(device: Device, tree_bias: Any, shape: VerifyShape, window: int) -> int:
    """Refuse a tree the kernel cannot honour; return its columns."""
    view = device.view("tree_bias", tree_bias)
    if view.dtype != "f32" or len(view.shape) != 2 or view.shape[0] != shape.rows or not view.shape[1]:
        raise InputError(
            f"tree_bias has dtype {view.dtype} and shape {view.shape}; required: f32 [{shape.rows}][block_cols]"
        )
    if window:
        raise InputError(f"window is {window} with a tree_bias; required: one of the two")
    return int(view.shape[1])


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
