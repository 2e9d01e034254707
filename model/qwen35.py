"""The target: a Qwen3.5 dense text model. Gated DeltaNet and gated softmax attention layers, in numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from hipfire_kernels.model.attention import Attention, Block, KVCache
from hipfire_kernels.model.config import AttentionDims, TargetConfig
from hipfire_kernels.model.deltanet import DeltaState
from hipfire_kernels.model.layers import Array, GatedMlp, Rope, project_rows, rms_norm, sigmoid


@dataclass(frozen=True)
class FullAttention:
    """Softmax attention with an output gate.

    Attributes:
        dims: head counts and sizes.
        rope: turns the leading dimensions of q and k.
        eps: of the q and k norms.
        qkv: float32 [(2 * n_heads + 2 * n_kv_heads) * head_dim, hidden]. Per query head, the first head_dim
            rows are the query and the next head_dim the gate; then come all of k and all of v.
        o_proj: float32 [hidden, n_heads * head_dim].
        q_norm, k_norm: float32 [head_dim], the factor 1 + w.
    """

    dims: AttentionDims
    rope: Rope
    eps: float
    qkv: Array
    o_proj: Array
    q_norm: Array
    k_norm: Array

    def __call__(self, x: Array, cache: KVCache, block: Block) -> Array:
        """x float32 [rows, hidden] -> float32 [rows, hidden]. Writes the rows' K and V, then attends."""
        d, head_dim = self.dims, self.dims.head_dim
        heads = project_rows(x, self.qkv).reshape(len(x), -1, head_dim)
        query_gate = heads[:, : 2 * d.n_heads].reshape(len(x), d.n_heads, 2 * head_dim)
        k, v = heads[:, 2 * d.n_heads : -d.n_kv_heads], np.ascontiguousarray(heads[:, -d.n_kv_heads :])
        q, gate = query_gate[..., :head_dim], query_gate[..., head_dim:]
        q = self.rope(rms_norm(q, self.q_norm, self.eps), block.rope_table)
        k = self.rope(rms_norm(k, self.k_norm, self.eps), block.rope_table)
        block.attention.write(cache, k, v, block.positions)
        out = block.attention.attend(cache, q, block.positions) * sigmoid(gate)
        return project_rows(out.reshape(len(x), -1), self.o_proj)


class Mixer(Protocol):
    """The part of a layer that looks at other tokens; `memory` is the kind of state that it keeps."""

    def __call__(self, x: Array, memory: Any, block: Block, /) -> Array:
        """float32 [rows, hidden] -> float32 [rows, hidden]."""


@dataclass(frozen=True)
class Layer:
    """One decoder layer. Both norms hold the factor 1 + w."""

    mixer: Mixer
    mlp: GatedMlp
    mixer_norm: Array
    mlp_norm: Array


class Snapshot(NamedTuple):
    """What a block changes in place in a TargetState."""

    length: int
    delta: list[tuple[Array, Array]]


class TargetState:
    """One sequence: KV caches and DeltaNet states of all layers, covering `length` tokens."""

    def __init__(self, config: TargetConfig, attention: Attention) -> None:
        self.attention = attention
        self.length = 0
        dims = config.attention
        self.layers: list[KVCache | DeltaState] = [
            attention.cache(dims.n_kv_heads, dims.head_dim) if full else DeltaState(config.delta)
            for full in config.full_attention
        ]

    def delta_states(self) -> list[DeltaState]:
        """The DeltaNet states, first layer first."""
        return [layer for layer in self.layers if isinstance(layer, DeltaState)]

    def snapshot(self) -> Snapshot:
        """A copy of what a block changes in place. KV caches need none: `length` is their watermark."""
        return Snapshot(self.length, [layer.snapshot() for layer in self.delta_states()])

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to `snapshot`, of this sequence, however long ago it was taken."""
        for layer, saved in zip(self.delta_states(), snapshot.delta, strict=True):
            layer.restore(saved)
        self.length = snapshot.length

    def reset(self) -> None:
        """Go back to the empty sequence. The KV caches keep their memory."""
        for layer in self.delta_states():
            layer.reset()
        self.length = 0

    def rollback(self, snapshot: Snapshot, keep: int) -> None:
        """Undo the last recorded block but for its first `keep` tokens."""
        for layer, saved in zip(self.delta_states(), snapshot.delta, strict=True):
            layer.replay(saved, keep)
        self.length = snapshot.length + keep


class Forward(NamedTuple):
    """Result of a block.

    Attributes:
        logits: float32 [rows, vocab], or [1, vocab] for the last row alone.
        taps: float32 [rows, n_taps * hidden]: outputs of the tapped layers side by side.
    """

    logits: Array
    taps: Array


@dataclass(frozen=True)
class Target:
    """A loaded Qwen3.5 target.

    Attributes:
        config: its sizes.
        layers: first layer first.
        embedding: float32 [vocab, hidden].
        norm: float32 [hidden], the factor 1 + w.
        lm_head: float32 [vocab, hidden]; the embedding itself when tied.
    """

    config: TargetConfig
    layers: tuple[Layer, ...]
    embedding: Array
    norm: Array
    lm_head: Array

    def new_state(self, attention: Attention) -> TargetState:
        """The state of an empty sequence."""
        return TargetState(self.config, attention)

    def head(self, hidden: Array) -> Array:
        """Logits float32 [rows, vocab] of float32 [rows, hidden] that went through a final norm."""
        return project_rows(hidden, self.lm_head)

    def forward(
        self,
        tokens: Sequence[int],
        state: TargetState,
        *,
        tap_ids: Sequence[int] = (),
        all_logits: bool = False,
        record: bool = False,
    ) -> Forward:
        """Feed `tokens` after what `state` covers, and advance it.

        Args:
            tokens: token ids, at least one.
            state: the sequence.
            tap_ids: layers whose outputs (residual stream after the MLP) are returned.
            all_logits: logits of every row, not of the last alone.
            record: keep what `TargetState.rollback` needs.
        """
        eps = self.config.rms_norm_eps
        positions = np.arange(state.length, state.length + len(tokens), dtype=np.int32)
        rope = Rope(self.config.rotary_dim, self.config.rope_theta, self.config.yarn)
        block = Block(state.attention, positions, rope.table(positions), record)
        x = self.embedding[np.asarray(tokens, np.intp)]
        outputs: dict[int, Array] = {}
        for index, (layer, memory) in enumerate(zip(self.layers, state.layers, strict=True)):
            x = x + layer.mixer(rms_norm(x, layer.mixer_norm, eps), memory, block)
            x = x + layer.mlp(rms_norm(x, layer.mlp_norm, eps))
            if index in tap_ids:
                outputs[index] = x
        state.length += len(tokens)
        taps = np.concatenate([outputs[i] for i in tap_ids], axis=1) if tap_ids else x[:, :0]
        return Forward(self.head(rms_norm(x if all_logits else x[-1:], self.norm, eps)), taps)
