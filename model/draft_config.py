"""What config.json, or the copy of it in a container, says about a DFlash draft, checked while it is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hipfire_kernels.errors import CheckpointError
from hipfire_kernels.model.checkpoint import read_config
from hipfire_kernels.model.config import AttentionDims, read_attention
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
    "output_multiplier",
    _CAP,
}
# Keys that ask for a forward pass that is not here, with what they are and the values that ask for nothing.
_REFUSED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "conv_kernel_size": ("taps of the convolutions of DFlash 2 around attention and MLP", (0,)),
    "conv_group_size": ("channels per group of the convolutions of DFlash 2", (0,)),
    "selector_rank": ("rank of the candidate selector of DFlash 2", (0,)),
    "selector_top_k": ("candidates of the candidate selector of DFlash 2", (0,)),
    "sample_from_anchor": ("a proposal from the anchor's own row", (False,)),
    "attention_sink_bias": ("a learned sink in the softmax of attention", (False,)),
}


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
    taps = token_ids(inner.values.get("target_layer_ids"))
    if not taps or len(set(taps)) != len(taps):
        raise inner.fail("target_layer_ids", "a list of different target layer numbers")
    vocab = reader.count("vocab_size")
    rope, yarn = read_rope(reader)
    windows, causal = _masks(reader, inner)
    config = DraftConfig(
        source=str(path),
        vocab_size=vocab,
        draft_vocab_size=_draft_vocab(inner, vocab),
        tied=bool(reader.flag("tie_word_embeddings")),
        hidden_size=reader.count("hidden_size"),
        intermediate_size=reader.count("intermediate_size"),
        attention=read_attention(reader),
        windows=windows,
        causal=causal,
        rope_theta=rope.number("rope_theta"),
        yarn=yarn,
        rms_norm_eps=reader.number("rms_norm_eps"),
        block_size=inner.count("block_size", least=2),
        mask_token_id=_mask_token(inner, vocab),
        target_layer_ids=taps,
        num_target_layers=reader.count("num_target_layers") if "num_target_layers" in top else None,
        input_scale=inner.given("input_embedding_scale") or 1.0,
        output_scale=inner.given("output_multiplier") or 1.0,
        softcap=None if inner.values.get(_CAP) == 0 else inner.given(_CAP),
    )
    _check_dflash(path, config)
    return config


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
    """The keys of dflash_config over those at top level, none of which may be unknown or not implemented."""
    dflash = reader.values.get("dflash_config", {})
    if not isinstance(dflash, dict):
        raise reader.fail("dflash_config", "an object")
    inner = Reader({**reader.values, **dflash}, f"{reader.where} (top level or dflash_config)")
    for key, (meaning, neutral) in _REFUSED.items():
        value = inner.values.get(key)
        if value is not None and value not in neutral:
            raise CheckpointError(f"{inner.where}: {key} is {value!r} ({meaning}); such a draft is not implemented")
    if unknown := sorted(dflash.keys() - _READ - _REFUSED.keys()):
        raise CheckpointError(f"{inner.where}: {unknown[0]} is set; that kind of draft is not implemented")
    return inner


def _draft_vocab(inner: Reader, vocab: int) -> int:
    if inner.values.get("draft_vocab_size") is None:
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

    layer_types says which layers slide; use_swa makes all of them slide where it names none. Layers that layer_types
    calls sliding are causal and others not, unless `causal` or `is_causal` says it for all.
    """
    layers = reader.layers()
    types = layer_types(reader, layers, ("sliding_attention", "full_attention"))
    named = tuple(kind == "sliding_attention" for kind in types or ("full_attention",) * layers)
    if any(named) and reader.values.get("use_sliding_window") is False:
        raise reader.fail("use_sliding_window", "true where layer_types names sliding_attention")
    use_swa = inner.flag("use_swa")
    slides = (True,) * layers if use_swa and not any(named) else named
    window = _window(reader, inner, bool(use_swa)) if any(slides) else 0
    said, also = inner.flag("causal"), inner.flag("is_causal")
    if None not in (said, also) and said != also:
        raise inner.fail("causal", f"what is_causal is ({also!r})")
    causal = also if said is None else said
    return tuple(window if slide else 0 for slide in slides), named if causal is None else (causal,) * layers


def _window(reader: Reader, inner: Reader, use_swa: bool) -> int:
    """swa_window_size under use_swa, sliding_window without. Where a file has both for the same layers, they agree."""
    if not use_swa:
        return reader.count("sliding_window")
    window = inner.count("swa_window_size")
    if reader.values.get("sliding_window") not in (None, window):
        raise inner.fail("swa_window_size", f"equal to sliding_window ({reader.values['sliding_window']!r})")
    return window
