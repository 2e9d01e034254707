"""What an engine asks for, in the terms admission decides on."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class AttendRequest:
    """One attention call, without its tensors. A field left out is unknown, and what is unknown is refused.

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

    @property
    def group(self) -> int | None:
        """Query heads for each KV head; None where the two numbers give none."""
        heads, kv = self.n_heads, self.n_kv_heads
        known = isinstance(heads, int) and isinstance(kv, int) and heads > 0 and kv > 0 and heads % kv == 0
        return heads // kv if known and heads is not None and kv is not None else None

    def as_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)
