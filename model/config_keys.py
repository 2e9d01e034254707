"""Keys of a config that nothing here reads: those that ask for another forward pass, and those that change nothing.

A model whose config has a key of the first kind is refused by name, for it would load, run and say something else
than it was trained to. What is neither read nor in one of the tables is listed, in the log and by `hfk doctor`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from hipfire_kernels.errors import CheckpointError

Asking = Mapping[str, tuple[str, tuple[Any, ...]]]
"""Key -> what it asks for, and the values that ask for nothing, beside null."""


def _all(keys: str, meaning: str, *neutral: Any) -> dict[str, tuple[str, tuple[Any, ...]]]:
    return dict.fromkeys(keys.split(), (meaning, neutral))


ASKING: Asking = {
    **_all("hidden_act hidden_activation", "another activation in the MLP", "silu", "swish"),
    **_all("attention_bias qkv_bias", "biases of the projections of attention", False),
    **_all("mlp_bias", "biases of the MLP", False),
    **_all("lm_head_bias", "a bias of the output head", False),
    **_all("use_qk_norm qk_norm qk_layernorm", "attention without norms of q and k", True),
    **_all("query_pre_attn_scalar attention_multiplier", "another scale of the scores of attention"),
    **_all("logits_scaling logit_scale scale_emb", "a factor on embeddings or logits", 1),
    **_all("scale_depth residual_scale", "a factor on what a layer adds", 1),
    **_all("attention_sink_bias attention_sinks use_sinks", "a learned sink in the softmax of attention", False),
    **_all("attention_chunk_size", "attention in chunks", 0),
    **_all("attn_temperature_tuning", "scores of attention that are scaled by position", False),
    **_all("use_bidirectional_attention add_cross_attention", "attention to other tokens", False),
    **_all("use_parallel_residual parallel_residual", "attention and MLP side by side", False),
    **_all("num_kv_shared_layers", "keys and values of another layer", 0),
    **_all("per_layer_config", "layers with sizes of their own", {}),
    **_all("rope_interleave rope_interleaved rotary_interleaved", "RoPE of neighbouring dimensions", False),
    **_all("rope_local_base_freq no_rope_layers no_rope_layer_interval", "layers with another RoPE or none", [], 0),
    **_all("position_embedding_type", "other positions than RoPE", "rope", "rotary"),
    **_all("alibi", "other positions than RoPE", False),
    **_all("quantization_config compression_config", "weights that are stored quantised", {}),
    **_all("num_experts num_local_experts n_routed_experts n_shared_experts", "a mixture of experts", 0),
    **_all("num_experts_per_tok moe_intermediate_size shared_expert_intermediate_size", "a mixture of experts", 0),
}
"""For a target and a draft alike."""

_KINDS = (
    (re.compile(r".*soft_?cap(ping)?"), "a cap on scores or logits", (0,)),
    (re.compile(r".*_multipliers?"), "a factor on activations", (1,)),
)
"""Families of keys that ask for something."""

_INERT = {
    *("architectures", "model_type", "auto_map", "name_or_path", "transformers_version", "torch_dtype", "dtype"),
    *("mamba_ssm_dtype",),
    *("use_cache", "initializer_range", "attention_dropout", "hidden_dropout", "bos_token_id", "pad_token_id"),
    *("eos_token_id",),
    *("output_attentions", "output_hidden_states", "return_dict", "chunk_size_feed_forward", "is_encoder_decoder"),
    *("id2label", "label2id", "num_labels", "problem_type", "pretraining_tp", "tokenizer_class", "processor_class"),
    *("num_nextn_predict_layers", "mlp_only_layers", "full_attention_interval", "max_position_embeddings"),
    *("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
}
"""Where a file comes from, how it was trained, and what of it other parts of a checkpoint use."""

_INERT_PREFIXES = ("_", "mtp_")


@dataclass(frozen=True)
class Notes:
    """What a reader of a config did not read and what it took for granted.

    Attributes:
        unread: keys that it does not know, those of objects inside as "rope_parameters.key".
        assumed: "key value" of keys that are missing, for which transformers has this default.
    """

    unread: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()

    def __str__(self) -> str:
        said = []
        if self.unread:
            said.append(f"keys that are not known here and not read: {', '.join(self.unread)}")
        if self.assumed:
            said.append(f"missing keys, taken as transformers does: {', '.join(self.assumed)}")
        return "; ".join(said)


def refuse(values: Mapping[str, Any], where: str, asking: Asking, honoured: Collection[str] = ()) -> None:
    """Refuse what asks for a forward pass that is not here: keys of `asking` and of `_KINDS`, except `honoured`.

    Raises:
        CheckpointError: every such key, with what it is, what it asks for and what it would have to be.
    """
    faults = []
    for key, value in values.items():
        meaning, neutral = asking.get(key) or next(((m, n) for kind, m, n in _KINDS if kind.fullmatch(key)), ("", ()))
        if meaning and key not in honoured and value is not None and value not in neutral:
            required = " or ".join(["absent", *map(repr, neutral)])
            faults.append(f"{key} is {value!r} ({meaning}; required: {required})")
    if faults:
        raise CheckpointError(
            f"{where}: {'; '.join(faults)}. Such a forward pass is not implemented; use a checkpoint without it"
        )


def unknown(values: Mapping[str, Any], read: Collection[str], asking: Asking) -> tuple[str, ...]:
    """The keys that have a value, were not read and stand in no table, in order."""
    given = {key for key, value in values.items() if value is not None}
    return tuple(
        key
        for key in sorted(given - set(read) - asking.keys() - _INERT)
        if not key.startswith(_INERT_PREFIXES) and not any(kind.fullmatch(key) for kind, _, _ in _KINDS)
    )
