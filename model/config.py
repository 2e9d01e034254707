"""What config.json, or the copy of it in a container, says about a target and a draft, checked while it is read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .checkpoint import read_config
from .hfq import DRAFT, TARGET, read_container


@dataclass(frozen=True)
class DeltaDims:
    """Sizes of a Gated DeltaNet layer."""

    kernel: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: q, k and v side by side."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True)
class AttentionDims:
    """Sizes of a softmax attention layer. head_dim need not be hidden_size / n_heads."""

    n_heads: int
    n_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class TargetConfig:
    """A Qwen3.5 dense text model.

    Attributes:
        source: the checkpoint folder or container, for messages.
        full_attention: per layer, True for softmax attention and False for Gated DeltaNet.
        rotary_dim: leading dimensions of a head that RoPE turns.
        max_positions: capacity in tokens.
        eos_ids: tokens that end a generation by default.
    """

    source: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    full_attention: tuple[bool, ...]
    attention: AttentionDims
    delta: DeltaDims
    rotary_dim: int
    rope_theta: float
    rms_norm_eps: float
    max_positions: int
    tied: bool
    eos_ids: tuple[int, ...]


@dataclass(frozen=True)
class DraftConfig:
    """A DFlash draft.

    Attributes:
        source: the checkpoint folder or container, for messages.
        windows: per layer, the sliding window in keys; 0 for full attention.
        causal: per layer, whether a block row sees only itself and what is before it.
        block_size: rows of a draft block: the anchor and block_size - 1 proposals.
        target_layer_ids: the target layers whose outputs are the draft's context.
        num_target_layers: layers of the target it was made for, None when the file does not say.
    """

    source: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    attention: AttentionDims
    windows: tuple[int, ...]
    causal: tuple[bool, ...]
    rope_theta: float
    rms_norm_eps: float
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None


class _Reader:
    """Required and optional keys of one JSON object; every complaint names the file and the key."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def fail(self, key: str, need: str) -> CheckpointError:
        if key not in self.values:
            return CheckpointError(f"{self.where}: required key {key!r} is missing; it must be {need}")
        return CheckpointError(f"{self.where}: {key} is {self.values[key]!r}; it must be {need}")

    def count(self, key: str, least: int = 1) -> int:
        value = self.values.get(key)
        if type(value) is not int or value < least:
            raise self.fail(key, f"a whole number of at least {least}")
        return value

    def number(self, key: str) -> float:
        value = self.values.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise self.fail(key, "a positive number")
        return float(value)

    def only(self, key: str, legal: tuple[Any, ...]) -> None:
        """`key` may be absent, null or one of `legal`: anything else asks for arithmetic that is not here."""
        value = self.values.get(key)
        if value is not None and value not in legal:
            raise self.fail(key, " or ".join(["absent", *map(repr, legal)]) + " (nothing else is implemented)")


def _attention(reader: _Reader) -> AttentionDims:
    reader.only("attention_bias", (False,))
    reader.only("hidden_act", ("silu",))
    dims = AttentionDims(
        n_heads=reader.count("num_attention_heads"),
        n_kv_heads=reader.count("num_key_value_heads"),
        head_dim=reader.count("head_dim"),
    )
    if dims.n_heads % dims.n_kv_heads:
        raise reader.fail("num_attention_heads", f"a multiple of num_key_value_heads ({dims.n_kv_heads})")
    return dims


def _rope(reader: _Reader) -> _Reader:
    """The RoPE settings: rope_parameters, or the older rope_theta, partial_rotary_factor and rope_scaling."""
    values = dict(reader.values)
    for key in ("rope_scaling", "rope_parameters"):
        inner = reader.values.get(key) or {}
        if not isinstance(inner, Mapping):
            raise reader.fail(key, "an object or null")
        for kind in ("rope_type", "type"):
            # Three equal position grids, which is what text has, make mrope the plain form.
            _Reader(inner, f"{reader.where} ({key})").only(kind, ("default", "mrope"))
        values.update(inner)
    return _Reader(values, reader.where)


def _layer_types(reader: _Reader, layers: int, legal: tuple[str, ...]) -> tuple[str, ...] | None:
    types = reader.values.get("layer_types")
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != layers or any(kind not in legal for kind in types):
        raise reader.fail("layer_types", f"a list of {layers} (num_hidden_layers) of {' or '.join(legal)}")
    return tuple(types)


def _ids(value: Any) -> tuple[int, ...] | None:
    """A tuple of token or layer ids from a number or a list of numbers, None when it is neither."""
    items = value if isinstance(value, list) else [value]
    return tuple(items) if all(type(item) is int and item >= 0 for item in items) else None


def read_target_config(path: Path) -> TargetConfig:
    """Parse the config of a target: the text model's own, or the multimodal wrapper's with a text_config.

    Raises:
        CheckpointError: a required key is missing or illegal, or the file describes another architecture.
    """
    top, where = read_config(path, TARGET)
    text = top.get("text_config", top)
    if not isinstance(text, dict):
        raise CheckpointError(f"{where}: text_config must be an object, not {text!r}")
    reader = _Reader(text, where)
    if text.get("model_type") not in ("qwen3_5_text", "qwen3_5"):
        raise reader.fail("model_type", "'qwen3_5_text' (a Qwen3.5 dense text model)")
    reader.only("attn_output_gate", (True,))
    layers = reader.count("num_hidden_layers")
    types = _layer_types(reader, layers, ("linear_attention", "full_attention"))
    if types is None:
        interval = reader.count("full_attention_interval") if "full_attention_interval" in text else 4
        types = tuple("linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers))
    attention, rope = _attention(reader), _rope(reader)
    eos = _ids(text.get("eos_token_id", top.get("eos_token_id")) or [])
    if eos is None:
        raise reader.fail("eos_token_id", "a token id, a list of them, or null")
    return TargetConfig(
        source=str(path),
        vocab_size=reader.count("vocab_size"),
        hidden_size=reader.count("hidden_size"),
        intermediate_size=reader.count("intermediate_size"),
        full_attention=tuple(kind == "full_attention" for kind in types),
        attention=attention,
        delta=_delta(reader),
        rotary_dim=_rotary_dim(rope, attention.head_dim),
        rope_theta=rope.number("rope_theta"),
        rms_norm_eps=reader.number("rms_norm_eps"),
        max_positions=reader.count("max_position_embeddings"),
        tied=bool(text.get("tie_word_embeddings", top.get("tie_word_embeddings", False))),
        eos_ids=eos,
    )


def _rotary_dim(rope: _Reader, head_dim: int) -> int:
    dim = int(head_dim * rope.number("partial_rotary_factor"))
    if dim % 2 or not 0 < dim <= head_dim:
        raise rope.fail("partial_rotary_factor", f"a share of head_dim ({head_dim}) that is an even number")
    return dim


def _delta(reader: _Reader) -> DeltaDims:
    dims = DeltaDims(
        kernel=reader.count("linear_conv_kernel_dim", least=2),
        key_heads=reader.count("linear_num_key_heads"),
        value_heads=reader.count("linear_num_value_heads"),
        key_dim=reader.count("linear_key_head_dim"),
        value_dim=reader.count("linear_value_head_dim"),
    )
    if dims.value_heads % dims.key_heads:
        raise reader.fail("linear_num_value_heads", f"a multiple of linear_num_key_heads ({dims.key_heads})")
    return dims


# Keys of dflash_config that are read; and those that would change the arithmetic, with the values that do
# not.
_DFLASH_READ = {"mask_token_id", "target_layer_ids", "block_size", "causal"}
_DFLASH_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "use_swa": (False,),
    "sample_from_anchor": (False,),
    "attention_sink_bias": (False,),
    "input_embedding_scale": (1.0,),
    "output_multiplier": (1.0,),
    "final_logit_softcapping": (),
}


def read_draft_config(path: Path) -> DraftConfig:
    """Parse the config of a DFlash draft.

    block_size, mask_token_id and target_layer_ids stand at top level or in dflash_config. A setting that the
    draft here does not implement is refused by name.

    Raises:
        CheckpointError: a required key is missing or illegal, or a setting is not implemented.
    """
    top, where = read_config(path, DRAFT)
    reader = _Reader(top, where)
    dflash = top.get("dflash_config", {})
    if not isinstance(dflash, dict):
        raise reader.fail("dflash_config", "an object")
    inner = _Reader({**top, **dflash}, f"{where} (top level or dflash_config)")
    for key in sorted(dflash.keys() - _DFLASH_READ):
        if key not in _DFLASH_NEUTRAL:
            raise CheckpointError(f"{inner.where}: {key} is set; that kind of draft is not implemented")
        inner.only(key, _DFLASH_NEUTRAL[key])
    taps = _ids(inner.values.get("target_layer_ids"))
    if not taps or len(set(taps)) != len(taps):
        raise inner.fail("target_layer_ids", "a list of different target layer numbers")
    windows, causal = _draft_masks(reader, inner)
    rope = _rope(reader)
    vocab = reader.count("vocab_size")
    mask = inner.count("mask_token_id", least=0)
    if mask >= vocab:
        raise inner.fail("mask_token_id", f"a token id below vocab_size ({vocab})")
    config = DraftConfig(
        source=str(path),
        vocab_size=vocab,
        hidden_size=reader.count("hidden_size"),
        intermediate_size=reader.count("intermediate_size"),
        attention=_attention(reader),
        windows=windows,
        causal=causal,
        rope_theta=rope.number("rope_theta"),
        rms_norm_eps=reader.number("rms_norm_eps"),
        block_size=inner.count("block_size", least=2),
        mask_token_id=mask,
        target_layer_ids=taps,
        num_target_layers=reader.count("num_target_layers") if "num_target_layers" in top else None,
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


def _draft_masks(reader: _Reader, inner: _Reader) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Window and causality per layer: sliding layers are causal, full ones not, unless the file says so."""
    layers = reader.count("num_hidden_layers")
    types = _layer_types(reader, layers, ("sliding_attention", "full_attention"))
    sliding = tuple(kind == "sliding_attention" for kind in types or ("full_attention",) * layers)
    if any(sliding) and reader.values.get("use_sliding_window") is False:
        raise reader.fail("use_sliding_window", "true where layer_types names sliding_attention")
    window = reader.count("sliding_window") if any(sliding) else 0
    said = inner.values.get("causal", reader.values.get("is_causal"))
    if said not in (None, True, False):
        raise inner.fail("causal", "true, false or absent")
    return (
        tuple(window if slides else 0 for slides in sliding),
        tuple(slides if said is None else bool(said) for slides in sliding),
    )
