"""Draft attention against torch's SDPA, in one interleaved run per context: every variant, several numbers of splits.

A block of 16 rows, 32 query heads on 8 KV heads of 128 dims, not causal. torch reads f16, as do our f16kv variants.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from hipfire_kernels import families
from hipfire_kernels.authoring.family import Variant
from hipfire_kernels.bench.kernels import provenance
from hipfire_kernels.checking import reference
from hipfire_kernels.checking.numbers import worst_row
from hipfire_kernels.kernels.arguments import DRAFT
from hipfire_kernels.running.devices.gpu import GpuDevice
from hipfire_kernels.running.draft import DraftWorkspace, draft_launches
from hipfire_kernels.running.timing import Stopwatch

KEYS = (2064, 20688)
SPLITS = (8, 16, 33, 66)
ROWS, HEADS, KV_HEADS, HEAD_DIM = 16, 32, 8, 128

Array = npt.NDArray[Any]
Call = Callable[[], Any]


def measure(device: GpuDevice, rounds: int = 30) -> dict[str, Any]:
    """Median times, and the worst error against the float64 oracle, of every candidate at every context."""
    import torch

    watch = Stopwatch(device)
    rows = [row for keys in KEYS for row in _at(torch, device, watch, keys, rounds)]
    return {**provenance(device), "torch": torch.__version__, "rows": rows}


def candidates() -> dict[str, tuple[Variant, int | None]]:
    """Variant and number of splits by name; None for the default, and for a variant that does not split."""
    found: dict[str, tuple[Variant, int | None]] = {}
    drafts = [v for family in families().values() if family.oracle == DRAFT for v in family.variants()]
    for variant in (v for v in drafts if v.head_dim == HEAD_DIM and not v.sliding):
        found[variant.name] = (variant, None)
        if variant.family.records:
            found |= {f"{variant.name} S{splits}": (variant, splits) for splits in SPLITS}
    return found


def _at(torch: Any, device: GpuDevice, watch: Stopwatch, keys: int, rounds: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(keys)
    q = rng.standard_normal((ROWS, HEADS, HEAD_DIM), np.float32)
    k, v = (rng.standard_normal((keys, KV_HEADS, HEAD_DIM), np.float32).astype(np.float16) for _ in range(2))
    want = reference.draft_attend(q, k, v)
    held = {kind: [device.to_device(x.astype(dtype)) for x in (k, v)] for kind, dtype in (("f16", "f2"), ("f32", "f4"))}
    on = device.to_device(q)
    calls: dict[str, Call] = {}
    outputs: dict[str, Call] = {}
    for name, (variant, splits) in candidates().items():
        out = device.empty(q.shape, np.float32)
        context, values = held[dict(variant.params).get("kv", "f32")]
        launches = draft_launches(device, on, context, values, out, variant=variant, workspace=DraftWorkspace(splits))
        calls[name] = lambda launches=launches: device.launch(launches)  # type: ignore[misc]
        outputs[name] = lambda out=out: device.to_host(out)  # type: ignore[misc]
    calls["torch_sdpa_flash"], outputs["torch_sdpa_flash"] = _sdpa(torch, device, q, k, v)
    times = watch.interleaved(calls, rounds)
    rows = []
    for name in calls:
        error = worst_row(outputs[name](), want)
        rows.append({"keys": keys, "rows": ROWS, "who": name, **times[name].as_dict(), "worst_error": error})
        print(f"keys {keys} {name:<52} {times[name].median:8.1f} us  error {error:.1e}", flush=True)
    return rows


def _sdpa(torch: Any, device: GpuDevice, q: Array, k: Array, v: Array) -> tuple[Call, Call]:
    """torch's flash attention in f16 on this library's stream, and its output as [rows][n_heads][head_dim]."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    on = torch.device("cuda", device.index)
    stream = (
        torch.cuda.ExternalStream(device.default_stream, device=on)
        if device.default_stream
        else torch.cuda.default_stream(on)
    )
    query, keys, values = (torch.from_numpy(x).to(on).half().permute(1, 0, 2).contiguous()[None] for x in (q, k, v))

    def call() -> Any:
        with torch.cuda.stream(stream), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True)

    return call, lambda: call()[0].float().cpu().numpy().transpose(1, 0, 2)
