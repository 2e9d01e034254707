"""The draft: a DFlash block decoder that reads the target's hidden states and proposes a block at once.

Embedding and head are the target's, unless the checkpoint brings its own. A block is [anchor, MASK, ..., MASK]; its
keys and values, and those of the context (the tapped target outputs through fc and one norm), come from the same
projections.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hipfire_kernels.dispatch import policy
from hipfire_kernels.errors import CheckpointError, NumericsError
from hipfire_kernels.model.attention import Attention, KVCache
from hipfire_kernels.model.config import TargetConfig
from hipfire_kernels.model.draft_config import DraftConfig
from hipfire_kernels.model.layers import Array, GatedMlp, Rope, first_broken_row, project_rows, rms_norm
from hipfire_kernels.model.qwen35 import Target

_PENDING_ROWS = 512


@dataclass(frozen=True)
class DraftLayer:
    """One draft layer. All norms hold the plain factor w.

    Attributes:
        q_proj: float32 [n_heads * head_dim, hidden].
        kv_proj: float32 [2 * n_kv_heads * head_dim, hidden], k above v.
        o_proj: float32 [hidden, n_heads * head_dim].
        q_norm, k_norm: float32 [head_dim].
        mlp: the gated MLP.
        attention_norm, mlp_norm: float32 [hidden].
        window: visible keys, 0 for all.
        causal: whether a block row sees only what is not after it.
    """

    q_proj: Array
    kv_proj: Array
    o_proj: Array
    q_norm: Array
    k_norm: Array
    mlp: GatedMlp
    attention_norm: Array
    mlp_norm: Array
    window: int
    causal: bool


@dataclass(frozen=True)
class DFlashDraft:
    """A loaded DFlash draft.

    Attributes:
        config: its sizes.
        layers: first layer first.
        fc: float32 [hidden, n_taps * hidden].
        context_norm: float32 [hidden], applied once to fc's output.
        norm: float32 [hidden], before the head.
        embedding: float32 [vocab, hidden], None for the target's.
        lm_head: float32 [draft vocab, hidden], None for the target's.
        target_ids: int64 [draft vocab], the target's id of every row of `lm_head`; None where the ids are the same.
    """

    config: DraftConfig
    layers: tuple[DraftLayer, ...]
    fc: Array
    context_norm: Array
    norm: Array
    embedding: Array | None = None
    lm_head: Array | None = None
    target_ids: NDArray[np.int64] | None = None

    @property
    def block_size(self) -> int:
        """The most rows of a block: the anchor and block_size - 1 proposals."""
        return self.config.block_size

    @property
    def tap_ids(self) -> tuple[int, ...]:
        """The target layers whose outputs `DFlashSession.extend` is given."""
        return self.config.target_layer_ids

    def check_pairing(self, target: TargetConfig) -> None:
        """Whether this draft was made for a target of this shape.

        Raises:
            CheckpointError: it was not; the message names both models.
        """
        c, layers = self.config, len(target.full_attention)
        faults = [
            f"{what}: the draft has {mine}, the target {theirs}"
            for what, mine, theirs in (
                ("hidden_size", c.hidden_size, target.hidden_size),
                ("vocab_size", c.vocab_size, target.vocab_size),
                ("num_target_layers", c.num_target_layers or layers, layers),
            )
            if mine != theirs
        ]
        if beyond := [i for i in c.target_layer_ids if i >= layers]:
            faults.append(f"target_layer_ids: the draft taps {beyond}, the target has layers 0 to {layers - 1}")
        if faults:
            raise CheckpointError(
                f"draft {c.source} was not made for target {target.source}; "
                + "; ".join(faults)
                + ". Pair it with the target it was trained on"
            )

    def session(self, target: Target, attention: Attention) -> DFlashSession:
        """A draft of one sequence of `target`."""
        return DFlashSession(self, target, attention)


class DFlashSession:
    """The draft's side of one sequence: the keys and values of its context, per layer.

    Taps are projected when the next block is drafted, together with it, or when many have come together.

    Attributes:
        length: positions of context.
        max_context: keys of context up to which it is asked to propose; None for any number.
    """

    def __init__(self, draft: DFlashDraft, target: Target, attention: Attention) -> None:
        self.length = 0
        self._draft = draft
        self._target = target
        self._attention = attention
        switches = policy.current()
        self._windows = tuple(_narrowed(layer.window, switches.draft_window) for layer in draft.layers)
        # Attention without a window costs context times block; with one, the context no longer matters.
        capped = bool(switches.draft_ctx_cap) and not any(self._windows)
        self.max_context = switches.draft_ctx_cap if capped else None
        dims = draft.config.attention
        self._rope = Rope(dims.head_dim, draft.config.rope_theta, draft.config.yarn)
        self._caches = [KVCache((dims.n_kv_heads, dims.head_dim), np.float32) for _ in draft.layers]
        self._projected = 0
        self._pending: list[Array] = []

    def extend(self, tokens: Sequence[int], taps: Array) -> None:
        """As `DraftSession.extend`. What the tokens are does not matter here, their taps say more."""
        self._pending.append(taps)
        self.length += len(taps)
        if self.length - self._projected > _PENDING_ROWS:
            context, table = self._context(0)
            for layer, cache in zip(self._draft.layers, self._caches, strict=True):
                self._store(layer, cache, context, table)
            self._settle()

    def crop(self, length: int) -> None:
        """As `DraftSession.crop`."""
        self._pending = [self._taps()[: max(0, length - self._projected)]]
        self._projected, self.length = min(self._projected, length), min(self.length, length)

    def propose(self, anchor: int, rows: int) -> list[int]:
        """Greedy proposals for the rows - 1 positions after the anchor, as ids of the target.

        Args:
            anchor: the last known token; the target has not seen it yet.
            rows: of the block, at least 2.

        Raises:
            NumericsError: the logits are not all finite. The session is as after a block all the same.
        """
        chosen, ids = self.logits(anchor, rows).argmax(axis=1), self._draft.target_ids
        proposals: list[int] = (chosen if ids is None else ids[chosen]).tolist()
        return proposals

    def logits(self, anchor: int, rows: int) -> Array:
        """What `propose` chooses from, float32 [rows - 1, draft vocab]."""
        draft, config = self._draft, self._draft.config
        context, table = self._context(rows)
        embedding = self._target.embedding if draft.embedding is None else draft.embedding
        x = embedding[[anchor] + [config.mask_token_id] * (rows - 1)] * np.float32(config.input_scale)
        for layer, window, cache in zip(draft.layers, self._windows, self._caches, strict=True):
            x = x + self._attend(layer, window, cache, context, x, table)
            x = x + layer.mlp(rms_norm(x, layer.mlp_norm, config.rms_norm_eps))
        self._settle()
        return self._head(rms_norm(x[1:], draft.norm, config.rms_norm_eps))

    def _taps(self) -> Array:
        return np.concatenate([np.empty((0, self._draft.fc.shape[1]), np.float32), *self._pending])

    def _context(self, rows: int) -> tuple[Array, tuple[Array, Array]]:
        """The pending taps as context [n, hidden]; cos and sin of their positions and of `rows` that follow."""
        draft = self._draft
        context = rms_norm(project_rows(self._taps(), draft.fc), draft.context_norm, draft.config.rms_norm_eps)
        return context, self._rope.table(np.arange(self._projected, self.length + rows))

    def _settle(self) -> None:
        """The pending context is in the caches. A block's own rows lie beyond it: the next ones overwrite them."""
        self._projected, self._pending = self.length, []

    def _head(self, hidden: Array) -> Array:
        lm_head, config = self._draft.lm_head, self._draft.config
        logits = self._target.head(hidden) if lm_head is None else project_rows(hidden, lm_head)
        if config.output_scale != 1:
            logits = logits * np.float32(config.output_scale)
        if (row := first_broken_row(logits)) is not None:  # a cap would make a number of it
            raise NumericsError(
                f"the draft's logits for position {self.length + 1 + row} hold NaN or infinity; nothing is proposed "
                f"from such a block. Look for the weights or activations of {config.source} that overflow"
            )
        if config.softcap is not None:
            logits = np.float32(config.softcap) * np.tanh(logits / np.float32(config.softcap))
        return logits

    def _attend(
        self, layer: DraftLayer, window: int, cache: KVCache, context: Array, x: Array, table: tuple[Array, Array]
    ) -> Array:
        config = self._draft.config
        dims, eps, rows = config.attention, config.rms_norm_eps, len(x)
        hidden = rms_norm(x, layer.attention_norm, eps)
        end = self._store(layer, cache, np.concatenate([context, hidden]), table)
        q = project_rows(hidden, layer.q_proj).reshape(rows, dims.n_heads, dims.head_dim)
        q = self._rope(rms_norm(q, layer.q_norm, eps), (table[0][-rows:], table[1][-rows:]))
        out = self._attention.draft(q, cache.k[:end], cache.v[:end], window=window, causal=layer.causal)
        return project_rows(out.reshape(rows, -1), layer.o_proj)

    def _store(self, layer: DraftLayer, cache: KVCache, rows: Array, table: tuple[Array, Array]) -> int:
        """Keys and values of `rows` [n, hidden], behind those of the projected context; where they end."""
        config, dims = self._draft.config, self._draft.config.attention
        kv = project_rows(rows, layer.kv_proj).reshape(len(rows), 2 * dims.n_kv_heads, dims.head_dim)
        begin, end = self._projected, self._projected + len(rows)
        cache.reserve(end)
        k = rms_norm(kv[:, : dims.n_kv_heads], layer.k_norm, config.rms_norm_eps)
        cache.k[begin:end], cache.v[begin:end] = self._rope(k, table), kv[:, dims.n_kv_heads :]
        return end


def _narrowed(declared: int, asked: int | None) -> int:
    """The window of a layer that declares one (0: none), under `HIPFIRE_DFLASH_WINDOW`."""
    if not asked:
        return declared if asked is None else 0
    return min(declared or asked, asked)
