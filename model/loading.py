"""From a checkpoint to a model: which tensors there must be, and where each of them goes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from os import PathLike
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hipfire_kernels.errors import CheckpointError
from hipfire_kernels.model.checkpoint import VOCABULARY_MAP, Checkpoint, LoadProgress, draft_name, target_name
from hipfire_kernels.model.config import TargetConfig, read_target_config
from hipfire_kernels.model.deltanet import DeltaNet
from hipfire_kernels.model.dflash import DFlashDraft, DraftLayer
from hipfire_kernels.model.draft_config import DraftConfig, is_draft, read_draft_config
from hipfire_kernels.model.hfq import DRAFT, read_container
from hipfire_kernels.model.jsonfile import listed, read_json
from hipfire_kernels.model.layers import Array, GatedMlp, Rope
from hipfire_kernels.model.qwen35 import FullAttention, Layer, Target

_log = logging.getLogger(__name__)

Shapes = dict[str, tuple[int, ...]]
Progress = Callable[[LoadProgress], None]


def load_target(path: str | PathLike[str], *, progress: Progress | None = None) -> Target:
    """Load a Qwen3.5 target: a Hugging Face checkpoint folder (config.json, safetensors), or a .hfq container.

    Every format becomes float32. Vision and multi-token-prediction tensors are skipped.

    Args:
        path: the folder or the container.
        progress: called after each tensor; what it raises ends the load.

    Raises:
        CheckpointError: it is not exactly a Qwen3.5 dense text model; the message names what is wrong.
    """
    config, tensors = open_target(Path(path))
    _log_notes(config)
    tensors.progress = progress
    embedding = tensors.read("embed_tokens.weight")
    return Target(
        config=config,
        layers=tuple(_target_layer(config, tensors, i) for i in range(len(config.full_attention))),
        embedding=embedding,
        norm=1 + tensors.read("norm.weight"),
        lm_head=_tied_head(tensors, embedding) if config.tied else tensors.read("lm_head.weight"),
    )


def load_draft(path: str | PathLike[str], *, progress: Progress | None = None) -> DFlashDraft:
    """Load a DFlash draft from its checkpoint folder, or from a .hfq container. Arguments as for `load_target`.

    Raises:
        CheckpointError: it is not exactly a DFlash draft; the message names what is wrong.
    """
    config, tensors = open_draft(Path(path))
    _log_notes(config)
    tensors.progress = progress
    embedding, lm_head = (_own(tensors, name) for name in ("embed_tokens.weight", "lm_head.weight"))
    return DFlashDraft(
        config=config,
        layers=tuple(_draft_layer(config, tensors, i) for i in range(len(config.windows))),
        fc=tensors.read("fc.weight"),
        context_norm=tensors.read("hidden_norm.weight"),
        norm=tensors.read("norm.weight"),
        embedding=embedding,
        lm_head=embedding if lm_head is None and config.tied else lm_head,
        target_ids=_target_ids(config, tensors) if VOCABULARY_MAP in tensors.entries else None,
    )


def open_target(path: Path) -> tuple[TargetConfig, Checkpoint]:
    """The config of a target and its tensors, of which none is read yet.

    Raises:
        CheckpointError: as `load_target`.
    """
    config = read_target_config(path)
    head: Shapes = {"lm_head.weight": (config.vocab_size, config.hidden_size)}
    return config, _checked(config, _target_shapes(config), target_name, head if config.tied else {})


def open_draft(path: Path) -> tuple[DraftConfig, Checkpoint]:
    """The config of a draft and its tensors, of which none is read yet.

    Raises:
        CheckpointError: as `load_draft`.
    """
    config = read_draft_config(path)
    tensors = _checked(config, _draft_shapes(config), draft_name, _own_shapes(config))
    needs = ("lm_head.weight", VOCABULARY_MAP)
    reduced = config.draft_vocab_size < config.vocab_size
    if missing := [n for n in needs if n not in tensors.entries and (reduced or VOCABULARY_MAP in tensors.entries)]:
        raise CheckpointError(
            f"{path}: missing {listed(missing)}; a vocabulary of the draft's own (draft_vocab_size is "
            f"{config.draft_vocab_size}, vocab_size {config.vocab_size}) needs both lm_head.weight and {VOCABULARY_MAP}"
        )
    return config, tensors


def open_either(path: Path) -> tuple[TargetConfig | DraftConfig, Checkpoint]:
    """As `open_target` or `open_draft`, by what the folder or the container is.

    Raises:
        CheckpointError: it is neither.
    """
    if path.is_file():
        return open_draft(path) if read_container(path).arch_id == DRAFT else open_target(path)
    return open_draft(path) if is_draft(read_json(path / "config.json")) else open_target(path)


def _checked(
    config: TargetConfig | DraftConfig, required: Shapes, rename: Callable[[str], str | None], optional: Shapes
) -> Checkpoint:
    try:
        return Checkpoint(Path(config.source), required, rename, optional)
    except CheckpointError as error:
        if not config.notes.assumed:
            raise
        assumed = ", ".join(config.notes.assumed)
        raise CheckpointError(
            f"{error}; its config lacks keys, for which is taken what transformers takes: {assumed}"
        ) from error


def _log_notes(config: TargetConfig | DraftConfig) -> None:
    if said := str(config.notes):
        _log.warning("config of %s: %s", config.source, said)


def _layer_shapes(hidden: int, intermediate: int) -> Shapes:
    return {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (intermediate, hidden),
        "mlp.up_proj.weight": (intermediate, hidden),
        "mlp.down_proj.weight": (hidden, intermediate),
    }


def _attention_shapes(config: TargetConfig | DraftConfig, gated: bool) -> Shapes:
    hidden, dims = config.hidden_size, config.attention
    q_dim, kv_dim = dims.n_heads * dims.head_dim, dims.n_kv_heads * dims.head_dim
    return {
        "self_attn.q_proj.weight": (2 * q_dim if gated else q_dim, hidden),
        "self_attn.k_proj.weight": (kv_dim, hidden),
        "self_attn.v_proj.weight": (kv_dim, hidden),
        "self_attn.o_proj.weight": (hidden, q_dim),
        "self_attn.q_norm.weight": (dims.head_dim,),
        "self_attn.k_norm.weight": (dims.head_dim,),
    }


def _delta_shapes(config: TargetConfig) -> Shapes:
    hidden, d = config.hidden_size, config.delta
    value_dim = d.value_heads * d.value_dim
    return {
        "linear_attn.in_proj_qkv.weight": (d.conv_dim, hidden),
        "linear_attn.in_proj_z.weight": (value_dim, hidden),
        "linear_attn.in_proj_b.weight": (d.value_heads, hidden),
        "linear_attn.in_proj_a.weight": (d.value_heads, hidden),
        "linear_attn.conv1d.weight": (d.conv_dim, 1, d.kernel),
        "linear_attn.A_log": (d.value_heads,),
        "linear_attn.dt_bias": (d.value_heads,),
        "linear_attn.norm.weight": (d.value_dim,),
        "linear_attn.out_proj.weight": (hidden, value_dim),
    }


def _numbered(index: int, shapes: Shapes) -> Shapes:
    return {f"layers.{index}.{name}": shape for name, shape in shapes.items()}


def _target_shapes(config: TargetConfig) -> Shapes:
    shapes: Shapes = {
        "embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "norm.weight": (config.hidden_size,),
    }
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    for i, full in enumerate(config.full_attention):
        shapes |= _numbered(i, _layer_shapes(config.hidden_size, config.intermediate_size))
        shapes |= _numbered(i, _attention_shapes(config, gated=True) if full else _delta_shapes(config))
    return shapes


def _draft_shapes(config: DraftConfig) -> Shapes:
    hidden = config.hidden_size
    shapes: Shapes = {
        "fc.weight": (hidden, len(config.target_layer_ids) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for i in range(len(config.windows)):
        shapes |= _numbered(i, _layer_shapes(hidden, config.intermediate_size))
        shapes |= _numbered(i, _attention_shapes(config, gated=False))
    return shapes


def _own_shapes(config: DraftConfig) -> Shapes:
    """What a draft may bring, to use in place of the target's."""
    return {
        "embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "lm_head.weight": (config.draft_vocab_size, config.hidden_size),
        VOCABULARY_MAP: (config.draft_vocab_size,),
    }


def _own(tensors: Checkpoint, name: str) -> Array | None:
    return tensors.read(name) if name in tensors.entries else None


def _tied_head(tensors: Checkpoint, embedding: Array) -> Array:
    """The embedding. Some writers store it a second time as the head, and nothing may differ there."""
    head = _own(tensors, "lm_head.weight")
    if head is not None and not np.array_equal(head, embedding):
        raise CheckpointError(
            f"{tensors.entries['lm_head.weight'].file}: lm_head.weight differs from embed_tokens.weight, but "
            "tie_word_embeddings is true; remove the tensor, or set tie_word_embeddings to false in config.json"
        )
    return embedding


def _target_ids(config: DraftConfig, tensors: Checkpoint) -> NDArray[np.int64]:
    """The target's id of each id i of the draft, int64 [draft vocab]: i + d2t[i], for d2t holds offsets.

    The convention is that of EAGLE-3's reduced vocabularies.
    """
    offsets = tensors.read(VOCABULARY_MAP).astype(np.float64)
    ids = np.arange(len(offsets)) + offsets
    wrong = (ids < 0) | (ids >= config.vocab_size) | (ids != np.trunc(ids))
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        raise CheckpointError(
            f"{config.source}: {VOCABULARY_MAP}[{at}] is {offsets[at]:g}, which makes draft id {at} the target id "
            f"{ids[at]:g}; required: offsets to whole ids from 0 to {config.vocab_size - 1}"
        )
    if len(np.unique(ids)) < len(ids):
        raise CheckpointError(
            f"{config.source}: {VOCABULARY_MAP} maps two draft ids to one target id, required: one each"
        )
    return ids.astype(np.int64)


class _LayerTensors:
    """The tensors of one layer, by their names within it."""

    def __init__(self, tensors: Checkpoint, index: int) -> None:
        self._tensors = tensors
        self._prefix = f"layers.{index}."

    def __call__(self, name: str) -> Array:
        return self._tensors.read(self._prefix + name)

    def stacked(self, *names: str) -> Array:
        """Several projections of the same input as one matrix, in this order."""
        return np.concatenate([self(name) for name in names])

    def mlp(self) -> GatedMlp:
        return GatedMlp(self.stacked("mlp.gate_proj.weight", "mlp.up_proj.weight"), self("mlp.down_proj.weight"))


def _target_layer(config: TargetConfig, tensors: Checkpoint, index: int) -> Layer:
    read = _LayerTensors(tensors, index)
    return Layer(
        mixer=_full_attention(config, read) if config.full_attention[index] else _delta_net(config, read),
        mlp=read.mlp(),
        mixer_norm=1 + read("input_layernorm.weight"),
        mlp_norm=1 + read("post_attention_layernorm.weight"),
    )


def _full_attention(config: TargetConfig, read: _LayerTensors) -> FullAttention:
    return FullAttention(
        dims=config.attention,
        rope=Rope(config.rotary_dim, config.rope_theta, config.yarn),
        eps=config.rms_norm_eps,
        qkv=read.stacked("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        o_proj=read("self_attn.o_proj.weight"),
        q_norm=1 + read("self_attn.q_norm.weight"),
        k_norm=1 + read("self_attn.k_norm.weight"),
    )


def _delta_net(config: TargetConfig, read: _LayerTensors) -> DeltaNet:
    projections = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    return DeltaNet(
        dims=config.delta,
        eps=config.rms_norm_eps,
        in_proj=read.stacked(*(f"linear_attn.{name}.weight" for name in projections)),
        conv=np.ascontiguousarray(read("linear_attn.conv1d.weight")[:, 0].T),
        a_log=read("linear_attn.A_log"),
        dt_bias=read("linear_attn.dt_bias"),
        norm=read("linear_attn.norm.weight"),
        out_proj=read("linear_attn.out_proj.weight"),
    )


def _draft_layer(config: DraftConfig, tensors: Checkpoint, index: int) -> DraftLayer:
    read = _LayerTensors(tensors, index)
    return DraftLayer(
        q_proj=read("self_attn.q_proj.weight"),
        kv_proj=read.stacked("self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        o_proj=read("self_attn.o_proj.weight"),
        q_norm=read("self_attn.q_norm.weight"),
        k_norm=read("self_attn.k_norm.weight"),
        mlp=read.mlp(),
        attention_norm=read("input_layernorm.weight"),
        mlp_norm=read("post_attention_layernorm.weight"),
        window=config.windows[index],
        causal=config.causal[index],
    )
