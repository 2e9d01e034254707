"""What config.json, or the copy of it in a container, says about a DFlash draft, checked while it is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hipfire_kernels.errors import CheckpointError
from hipfire_kernels.model.checkpoint import read_config
from hipfire_kernels.model.config import AttentionDims, read_attention
from hipfire_kernels.model.config_keys import ASKING, Asking, Notes, refuse, unknown
from hipfire_kernels.model.config_reader import Reader, layer_types, token_ids
from hipfire_kernels.model.hfq import DRAFT, read_container
from hipfire_kernels.model.rope_config import read_rope
from hipfire_kernels.model.yarn import Yarn


@dataclass(frozen=True)
class DraftConfig:
    """A DFlash draft.

    Attributes:
        source: the checkpoint folder or container, for messages.
        vocab_size: ids of the target.
        draft_vocab_size: rows of the draft's own head, where it has one; vocab_size unless reduced.
        tied: whether a draft with an embedding but no head of its own uses the embedding for both.
        windows: per layer, the sliding window in keys; 0 for full attention.
        causal: per layer, whether a block row sees only itself and what is before it.
        yarn: the scaling of its RoPE, None for the plain form. RoPE turns the whole head_dim: a
            partial_rotary_factor in a draft's config comes from the target's and is not read.
        block_size: rows of a draft block: the anchor and block_size - 1 proposals.
        target_layer_ids: the target layers whose outputs are the draft's context.
        num_target_layers: layers of the target it was made for, None when the file does not say.
        input_scale: factor on the embeddings of a block.
        output_scale: factor on the logits.
        softcap: c of c * tanh(logits / c), applied to the scaled logits; None for none.
        notes: what of the config was not read, and what was taken for granted.
    """

    source: str
    vocab_size: int
    draft_vocab_size: int
    tied: bool
    hidden_size: int
    intermediate_size: int
    attention: AttentionDims
    windows: tuple[int, ...]
    causal: tuple[bool, ...]
    rope_theta: float
    yarn: Yarn | None
    rms_norm_eps: float
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    input_scale: float
    output_scale: float
    softcap: float | None
    notes: Notes = field(default=Notes(), compare=False)


_SCALE = "output_multiplier"
_CAP = "final_logit_softcapping"  # 0 for none, as the draft's own library reads it
# Keys of dflash_config that are read. draft_vocab_size is at home at top level, is_causal too.
_READ = {
    "mask_token_id",
    "target_layer_ids",
    "block_size",
    "causal",
    "is_causal",
    "use_swa",
    "swa_window_size",
    "draft_vocab_size",
    "input_embedding_scale",
    _SCALE,
    _CAP,
}
_ASKING: Asking = {
    **ASKING,
    "conv_kernel_size": ("taps of the convolutions of DFlash 2 around attention and MLP", (0,)),
    "conv_group_size": ("channels per group of the convolutions of DFlash 2", (0,)),
    "selector_rank": ("rank of the candidate selector of DFlash 2", (0,)),
    "selector_top_k": ("candidates of the candidate selector of DFlash 2", (0,)),
    "sample_from_anchor": ("a proposal from the anchor's own row", (False,)),
    "attn_output_gate": ("an output gate of attention", (False,)),
}
_MARKS = ("dflash_config", "target_layer_ids", "mask_token_id")
"""One of these keys makes a config a draft's."""

_HEAD_DIM, _WINDOW, _FIRST_SLIDING, _EPS = 128, 4096, 28, 1e-6
"""What transformers takes for missing keys of a Qwen3 model."""


def is_draft(config: Mapping[str, Any]) -> bool:
    """Whether it is a draft's config, and not a target's."""
    return any(key in config for key in _MARKS)


def read_draft_config(path: Path) -> DraftConfig:
    """Parse the config of a DFlash draft.

    What is a draft's own stands at top level or in dflash_config. A setting that the draft here does not implement is
    refused by name.

    Raises:
        CheckpointError: a required key is missing or illegal, or a setting is not implemented.
    """
    top, where = read_config(path, DRAFT)
    reader = Reader(top, where)
    inner = _dflash(reader)
    taps = token_ids(inner.get("target_layer_ids"))
    if not taps or len(set(taps)) != len(taps):
        raise inner.fail("target_layer_ids", "a list of different target layer numbers")
    vocab = reader.count("vocab_size")
    rope = read_rope(reader)
    windows, causal = _masks(reader, inner)
    config = DraftConfig(
        source=str(path),
        vocab_size=vocab,
        draft_vocab_size=_draft_vocab(inner, vocab),
        tied=bool(reader.flag("tie_word_embeddings")),
        hidden_size=reader.count("hidden_size"),
        intermediate_size=reader.count("intermediate_size"),
        attention=read_attention(reader, _HEAD_DIM),
        windows=windows,
        causal=causal,
        rope_theta=rope.theta,
        yarn=rope.yarn,
        rms_norm_eps=reader.number("rms_norm_eps", default=_EPS),
        block_size=inner.count("block_size", least=2),
        mask_token_id=_mask_token(inner, vocab),
        target_layer_ids=taps,
        num_target_layers=reader.count("num_target_layers") if "num_target_layers" in top else None,
        input_scale=inner.given("input_embedding_scale") or 1.0,
        output_scale=inner.given(_SCALE) or 1.0,
        softcap=None if inner.get(_CAP) == 0 else inner.given(_CAP),
    )
    _check_dflash(path, config)
    reader.read.add("partial_rotary_factor")  # the target's: see `DraftConfig.yarn`
    unread = unknown(inner.values, reader.read, _ASKING)
    return replace(config, notes=Notes((*unread, *rope.unread), tuple(reader.assumed)))


def dflash_metadata(config: DraftConfig) -> dict[str, Any]:
    """What a container of a draft says again beside its config."""
    return {
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
    }


def _check_dflash(path: Path, config: DraftConfig) -> None:
    """A container's dflash object must say what its config says."""
    if not path.is_file():
        return
    said = read_container(path).metadata.get("dflash")
    if not isinstance(said, dict):
        raise CheckpointError(f"metadata of {path}: dflash is {said!r}; a draft must have the object")
    for key, value in dflash_metadata(config).items():
        if said.get(key) != value:
            raise CheckpointError(
                f"metadata of {path}: dflash has {key} {said.get(key)!r}, config has {value!r}; they must be equal"
            )


def _dflash(reader: Reader) -> Reader:
    """The keys of dflash_config over those at top level, none of which may contradict or ask for what is not here.

    What is unknown in dflash_config is refused as well: all that it holds are settings of the forward pass.
    """
    said = reader.get("dflash_config") if "dflash_config" in reader.values else {}
    if not isinstance(said, dict):
        raise reader.fail("dflash_config", "an object")
    dflash = {key: value for key, value in said.items() if value is not None}
    for key, value in dflash.items():
        if (also := reader.values.get(key)) is not None and value != also:
            raise CheckpointError(
                f"{reader.where}: {key} is {also!r} at top level and {value!r} in dflash_config; required: one value, "
                "that the draft was trained with. Remove the other"
            )
    inner = reader.merged(dflash, f"{reader.where} (top level or dflash_config)")
    refuse(inner.values, inner.where, _ASKING, honoured=_READ)
    if strange := sorted(dflash.keys() - _READ - _ASKING.keys()):
        raise CheckpointError(f"{inner.where}: {strange[0]} is set; that kind of draft is not implemented")
    return inner


def _draft_vocab(inner: Reader, vocab: int) -> int:
    if inner.get("draft_vocab_size") is None:
        return vocab
    if (size := inner.count("draft_vocab_size")) > vocab:
        raise inner.fail("draft_vocab_size", f"at most vocab_size ({vocab})")
    return size


def _mask_token(inner: Reader, vocab: int) -> int:
    if (mask := inner.count("mask_token_id", least=0)) >= vocab:
        raise inner.fail("mask_token_id", f"a token id below vocab_size ({vocab})")
    return mask


def _masks(reader: Reader, inner: Reader) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Window and causality per layer.

    layer_types says which layers slide, without it use_sliding_window; use_swa makes all of them slide where neither
    does. Layers that are said to slide are causal and others not, unless `causal` or `is_causal` says it for all.
    """
    layers = reader.layers()
    named = _sliding(reader, layers)
    use_swa = inner.flag("use_swa")
    slides = (True,) * layers if use_swa and not any(named) else named
    window = _window(reader, inner, use_swa) if any(slides) else 0
    if use_swa is False:
        reader.read.add("swa_window_size")
    said, also = inner.flag("causal"), inner.flag("is_causal")
    if None not in (said, also) and said != also:
        raise inner.fail("causal", f"what is_causal is ({also!r})")
    causal = also if said is None else said
    return tuple(window if slide else 0 for slide in slides), named if causal is None else (causal,) * layers


def _sliding(reader: Reader, layers: int) -> tuple[bool, ...]:
    """Which layers slide, by layer_types, or as transformers derives it: those from max_window_layers on."""
    types = layer_types(reader, layers, ("sliding_attention", "full_attention"))
    asked = reader.flag("use_sliding_window")
    reader.read.update(("sliding_window", "max_window_layers"))
    if types is None:
        if not asked or reader.values.get("sliding_window", _WINDOW) is None:
            return (False,) * layers
        first = reader.count("max_window_layers", least=0, default=_FIRST_SLIDING)
        return tuple(i >= first for i in range(layers))
    named = tuple(kind == "sliding_attention" for kind in types)
    if any(named) and asked is False:
        raise reader.fail("use_sliding_window", "true where layer_types names sliding_attention")
    return named


def _window(reader: Reader, inner: Reader, use_swa: bool | None) -> int:
    """swa_window_size or sliding_window, which agree where a file has both for the same layers."""
    if use_swa is False or (use_swa is None and inner.get("swa_window_size") is None):
        return reader.count("sliding_window", default=_derived_window(reader))
    window = inner.count("swa_window_size")
    if reader.values.get("sliding_window") not in (None, window):
        raise inner.fail("swa_window_size", f"equal to sliding_window ({reader.values['sliding_window']!r})")
    return window


def _derived_window(reader: Reader) -> int | None:
    """The default where transformers derives which layers slide. With layer_types the window must be stated."""
    return None if reader.values.get("layer_types") is not None else _WINDOW
