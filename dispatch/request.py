"""What an engine asks for, in the terms admission decides on."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hipfire_kernels.layout import covering


@dataclass(frozen=True)
class AttendRequest:
    """One attention call, without its tensors. A field left out is unknown, and what is unknown is refused.

    Numbers may be numpy's; they become Python's.

    Attributes:
        arch: as the device reports it; a feature suffix (`:sramecc-:xnack-`) is ignored for the comparison.
        workload: "verify" (query rows against a Q8_0 KV cache) or "draft" (a block against context and itself).
        kv_format: "q8_0" for verify, "f32" or "f16" for draft.
        head_dim: values per head.
        n_heads, n_kv_heads: query heads and KV heads.
        rows: query rows.
        logical_ctx: keys the last row may see; the live context, never the capacity of the cache.
        layout: "chain" (rows at consecutive positions), "tree" (a bias between the rows) or "independent".
        capturing: a graph is being captured: the launch must stay right as the context grows.
        recording: launches are being recorded for replay by the caller. Not the same thing as capturing.
        window: keys a row sees; 0 for all.
        causal: draft only: rows of the block do not see the rows behind them.
        capacity: positions of the KV cache, which a captured or recorded launch covers; `logical_ctx` where unknown.
        multiprocessors: of the device. It decides nothing but whether a tuning is for this device.
        memory: bytes that the device has. Decides nothing but whether a route's workspace can ever fit; where it is
            unknown, that is left to the device.
    """

    arch: str | None = None
    workload: str | None = "verify"
    kv_format: str | None = None
    head_dim: int | None = None
    n_heads: int | None = None
    n_kv_heads: int | None = None
    rows: int | None = None
    logical_ctx: int | None = None
    layout: str | None = None
    capturing: bool | None = None
    recording: bool | None = None
    window: int | None = 0
    causal: bool | None = False
    capacity: int | None = None
    multiprocessors: int | None = None
    memory: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, np.generic):
                object.__setattr__(self, name, value.item())

    @property
    def covers(self) -> int:
        """Keys that a launch of this request is made for: so that a growing context finds the same plan, more than its
        own, but no more than the cache holds; all of those where the launch is captured or recorded."""
        ctx = self.logical_ctx or 0
        most = max(ctx, ctx if self.capacity is None else self.capacity)
        return most if self.capturing or self.recording else min(covering(ctx), most)

    @property
    def group(self) -> int | None:
        """Query heads for each KV head; None where the two numbers give none."""
        heads, kv = self.n_heads, self.n_kv_heads
        known = isinstance(heads, int) and isinstance(kv, int) and heads > 0 and kv > 0 and heads % kv == 0
        return heads // kv if known and heads is not None and kv is not None else None

    def as_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)
