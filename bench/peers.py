"""Peers on NVIDIA: torch SDPA with each backend forced in turn, FlexAttention, FlashInfer where installed.

They read 16-bit K and V; the same values, dequantised from the very Q8_0 cache, and the same bottom-right mask. Each is
timed in the same interleaved run as this library's routes, and its output is checked against the same oracle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hipfire_kernels import dequantize_q8_0
from hipfire_kernels.bench.kernels import Shape, provenance, random_cache, route_variants
from hipfire_kernels.checking import reference
from hipfire_kernels.checking.numbers import worst_row
from hipfire_kernels.running.devices.gpu import GpuDevice
from hipfire_kernels.running.timing import Stopwatch

CONTEXTS = (2048, 4096, 20676, 32768, 131072)
QUICK_CONTEXTS = (20676, 32768)

Call = Callable[[], Any]


def measure(device: GpuDevice, quick: bool = False) -> dict[str, Any]:
    """Every shape with every peer that runs here; the others with the reason why not."""
    import torch

    watch = Stopwatch(device)
    rows = []
    for head_dim in (256,) if quick else (128, 256):
        for ctx in QUICK_CONTEXTS if quick else CONTEXTS:
            rows += _shape_rows(torch, device, watch, Shape(ctx, 16, head_dim))
    return {**provenance(device), "torch": torch.__version__, "rows": rows}


def _shape_rows(torch: Any, device: GpuDevice, watch: Stopwatch, shape: Shape) -> list[dict[str, Any]]:
    rng = np.random.default_rng(shape.ctx + shape.rows)
    q = rng.standard_normal((shape.rows, shape.n_heads, shape.head_dim), np.float32)
    k, v = random_cache(rng, shape), random_cache(rng, shape)
    positions = np.arange(shape.ctx - shape.rows, shape.ctx, dtype=np.int32)
    want = reference.attend(q, k, v, positions)
    ours, outputs = _own_calls(device, shape, (q, k, v, positions))
    peers, refused = _peer_calls(torch, device, shape, q, k, v, outputs)
    times = watch.interleaved({**ours, **peers}, rounds=20)
    rows: list[dict[str, Any]] = [
        {
            "ctx": shape.ctx,
            "rows": shape.rows,
            "head_dim": shape.head_dim,
            "who": name,
            **times[name].as_dict(),
            "worst_error": worst_row(outputs[name](), want),
        }
        for name in times
    ]
    for row in rows:
        print(
            f"d{shape.head_dim} ctx {shape.ctx} {row['who']:<14} {row['us']:9.1f} us  error {row['worst_error']:.1e}",
            flush=True,
        )
    return rows + [
        {"ctx": shape.ctx, "head_dim": shape.head_dim, "who": name, "refused": why} for name, why in refused.items()
    ]


def _own_calls(device: GpuDevice, shape: Shape, arrays: tuple[Any, ...]) -> tuple[dict[str, Call], dict[str, Call]]:
    from hipfire_kernels.running.attention import check_verify, verify_plan

    on = [device.to_device(a) for a in arrays]
    calls: dict[str, Call] = {}
    outputs: dict[str, Call] = {}
    for name, variant in route_variants(device.arch.name, shape).items():
        out = device.empty(arrays[0].shape, np.float32)
        plan = verify_plan(variant, device, check_verify(device, *on[:3]), shape.ctx)
        calls[name] = lambda plan=plan, out=out: plan.run(*on, out)  # type: ignore[misc]
        outputs[name] = lambda out=out: device.to_host(out)  # type: ignore[misc]
    return calls, outputs


def _peer_calls(
    torch: Any, device: GpuDevice, shape: Shape, q: Any, k: Any, v: Any, outputs: dict[str, Call]
) -> tuple[dict[str, Call], dict[str, str]]:
    """A call for each peer that runs once; it works on this library's stream, so that one pair of events holds it."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right

    on = torch.device("cuda", device.index)
    stream = (
        torch.cuda.ExternalStream(device.default_stream, device=on)
        if device.default_stream
        else torch.cuda.default_stream(on)
    )
    dense = [torch.from_numpy(dequantize_q8_0(x)).to(on).to(torch.bfloat16) for x in (k, v)]
    keys, values = (x.permute(1, 0, 2).contiguous()[None] for x in dense)
    query = torch.from_numpy(q).to(on).to(torch.bfloat16).permute(1, 0, 2).contiguous()[None]
    mask = causal_lower_right(shape.rows, shape.ctx)
    calls: dict[str, Call] = {}
    refused: dict[str, str] = {}

    def sdpa(backend: Any) -> Any:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(
                query, keys, values, attn_mask=mask, enable_gqa=True
            )

    candidates: dict[str, Call] = {
        "sdpa_flash": lambda: sdpa(SDPBackend.FLASH_ATTENTION),
        "sdpa_cudnn": lambda: sdpa(SDPBackend.CUDNN_ATTENTION),
        "sdpa_efficient": lambda: sdpa(SDPBackend.EFFICIENT_ATTENTION),
    }
    flex = _flex(torch, shape, query, keys, values)
    if flex is not None:
        candidates["flex"] = flex
    flashinfer = _flashinfer(torch, shape, q, dense, on)
    if isinstance(flashinfer, str):
        refused["flashinfer"] = flashinfer
    else:
        candidates["flashinfer"] = flashinfer
    with torch.cuda.stream(stream):
        for name, call in candidates.items():
            try:
                call()
                torch.cuda.synchronize()
            except Exception as error:  # a peer's refusal is a result
                refused[name] = str(error).splitlines()[0][:200]
                continue
            calls[name] = call
            outputs[name] = lambda call=call: _as_rows(torch, call(), shape)  # type: ignore[misc]
    return calls, refused


def _as_rows(torch: Any, result: Any, shape: Shape) -> Any:
    host = result.float().cpu().numpy()
    return host[0].transpose(1, 0, 2) if host.ndim == 4 else host


def _flex(torch: Any, shape: Shape, query: Any, keys: Any, values: Any) -> Call | None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    past = shape.ctx - shape.rows
    mask = create_block_mask(lambda b, h, i, j: j <= i + past, None, None, shape.rows, shape.ctx, device=query.device)
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(query, keys, values, block_mask=mask, enable_gqa=True)


def _flashinfer(torch: Any, shape: Shape, q: Any, dense: list[Any], on: Any) -> Call | str:
    try:
        import flashinfer
    except ImportError as error:
        return f"not installed: {error}"
    page = 16
    pages = -(-shape.ctx // page)
    cache = torch.zeros(pages, 2, page, shape.n_kv_heads, shape.head_dim, dtype=torch.bfloat16, device=on)
    for which, x in enumerate(dense):
        flat = torch.zeros(pages * page, shape.n_kv_heads, shape.head_dim, dtype=torch.bfloat16, device=on)
        flat[: shape.ctx] = x
        cache[:, which] = flat.view(pages, page, shape.n_kv_heads, shape.head_dim)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        torch.empty(256 << 20, dtype=torch.uint8, device=on), "NHD"
    )

    def ints(*numbers: int) -> Any:
        return torch.tensor(numbers, dtype=torch.int32, device=on)

    wrapper.plan(
        ints(0, shape.rows), ints(0, pages), torch.arange(pages, dtype=torch.int32, device=on),
        ints((shape.ctx - 1) % page + 1), shape.n_heads, shape.n_kv_heads, shape.head_dim, page, causal=True,
        q_data_type=torch.bfloat16,
    )  # fmt: skip
    query = torch.from_numpy(q).to(on).to(torch.bfloat16)
    return lambda: wrapper.run(query, cache)
