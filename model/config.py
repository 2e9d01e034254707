"""What config.json, or the copy of it in a container, says about a target, checked while it is read."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from hipfire_kernels.errors import CheckpointError
from hipfire_kernels.model.checkpoint import read_config, read_generation_config
from hipfire_kernels.model.config_keys import ASKING, Asking, Notes, refuse, unknown
from hipfire_kernels.model.config_reader import Reader, layer_types, token_ids
from hipfire_kernels.model.hfq import TARGET
from hipfire_kernels.model.rope_config import read_rope
from hipfire_kernels.model.yarn import Yarn


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
        yarn: the scaling of its RoPE, None for the plain form.
        max_positions: capacity in tokens; under YaRN at least the original context times its factor.
        eos_ids: tokens that end a generation by default: those of config.json, then those of generation_config.json.
        notes: what of the config was not read, and what was taken for granted.
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
    yarn: Yarn | None
    rms_norm_eps: float
    max_positions: int
    tied: bool
    eos_ids: tuple[int, ...]
    notes: Notes = field(default=Notes(), compare=False)


_ASKING: Asking = {
    **ASKING,
    "attn_output_gate": ("attention without an output gate", (True,)),
    "output_gate_type": ("another gate behind the DeltaNet layers", ("swish", "silu")),
    "use_sliding_window": ("a sliding window in the target", (False,)),
    "is_causal": ("attention that looks ahead", (True,)),
    "linear_conv_bias": ("a bias of the convolution", (False,)),
    "conv_bias": ("a bias of the convolution", (False,)),
    "allow_neg_eigval": ("a DeltaNet whose beta reaches 2", (False,)),
}
_HEAD_DIM, _ROTARY_SHARE, _EPS = 256, 0.25, 1e-6
"""What transformers takes for missing keys of this model, and nothing in the tensors tells."""


def read_attention(reader: Reader, head_dim: int) -> AttentionDims:
    """The dims of full attention that a config states, checked; `head_dim` where it does not state that."""
    dims = AttentionDims(
        n_heads=reader.count("num_attention_heads"),
        n_kv_heads=reader.count("num_key_value_heads"),
        head_dim=reader.count("head_dim", default=head_dim),
    )
    if dims.n_heads % dims.n_kv_heads:
        raise reader.fail("num_attention_heads", f"a multiple of num_key_value_heads ({dims.n_kv_heads})")
    return dims


def read_target_config(path: Path) -> TargetConfig:
    """Parse the config of a target: the text model's own, or the multimodal wrapper's with a text_config.

    Raises:
        CheckpointError: a required key is missing or illegal, the file describes another architecture, or it asks for
            a forward pass that is not implemented.
    """
    top, where = read_config(path, TARGET)
    outer = Reader(top, where)
    text = outer.get("text_config") if "text_config" in top else top
    if not isinstance(text, dict):
        raise CheckpointError(f"{where}: text_config must be an object, not {text!r}")
    reader = Reader(text, where)
    if text.get("model_type") not in ("qwen3_5_text", "qwen3_5"):
        raise reader.fail("model_type", "'qwen3_5_text' (a Qwen3.5 dense text model)")
    for values in (text, top):
        refuse(values, where, _ASKING)
    layers = reader.layers()
    types = layer_types(reader, layers, ("linear_attention", "full_attention"))
    if types is None:
        interval = reader.count("full_attention_interval") if "full_attention_interval" in text else 4
        types = tuple("linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers))
    attention, rope = read_attention(reader, _HEAD_DIM), read_rope(reader)
    config = TargetConfig(
        source=str(path),
        vocab_size=reader.count("vocab_size"),
        hidden_size=reader.count("hidden_size"),
        intermediate_size=reader.count("intermediate_size"),
        full_attention=tuple(kind == "full_attention" for kind in types),
        attention=attention,
        delta=_delta(reader),
        rotary_dim=_rotary_dim(rope.settings, attention.head_dim),
        rope_theta=rope.theta,
        yarn=rope.yarn,
        rms_norm_eps=reader.number("rms_norm_eps", default=_EPS),
        max_positions=_max_positions(reader, rope.yarn),
        tied=_tied([reader, outer]),
        eos_ids=_eos_ids(path, [reader, outer]),
    )
    unread = unknown({**top, **text}, reader.read | outer.read, _ASKING)
    return replace(config, notes=Notes((*unread, *rope.unread), tuple(reader.assumed)))


def _max_positions(reader: Reader, yarn: Yarn | None) -> int:
    stated = reader.count("max_position_embeddings")
    return stated if yarn is None else max(stated, int(yarn.factor * yarn.original_positions))


def _tied(configs: list[Reader]) -> bool:
    """The text model's own word, before that of the wrapper around it."""
    said = [flag for reader in configs if (flag := reader.flag("tie_word_embeddings")) is not None]
    return bool(said) and said[0]


def _eos_ids(path: Path, configs: list[Reader]) -> tuple[int, ...]:
    """Stop ids of config.json and of generation_config.json: the end of a chat turn may stand in the second alone."""
    found: list[int] = []
    vocab = configs[0].count("vocab_size")
    for reader in [*configs, Reader(*read_generation_config(path))]:
        value = reader.get("eos_token_id")
        ids = token_ids([] if value is None else value)
        if ids is None or any(token >= vocab for token in ids):
            raise reader.fail("eos_token_id", f"a token id below vocab_size ({vocab}), a list of them, or null")
        found += ids
    return tuple(dict.fromkeys(found))


def _rotary_dim(rope: Reader, head_dim: int) -> int:
    dim = int(head_dim * rope.number("partial_rotary_factor", default=_ROTARY_SHARE))
    if dim % 2 or not 0 < dim <= head_dim:
        raise rope.fail("partial_rotary_factor", f"a share of head_dim ({head_dim}) that is an even number")
    return dim


def _delta(reader: Reader) -> DeltaDims:
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
