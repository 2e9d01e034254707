"""Small random checkpoints for the model tests, written to disk in the real layout, and scripted drafts."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hipfire_kernels.model import Tokenizer

TARGET: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # on purpose not hidden_size / num_attention_heads
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 95,
    "tie_word_embeddings": False,
    "layer_types": [
        "linear_attention",
        "full_attention",
        "linear_attention",
        "linear_attention",
        "full_attention",
    ],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}

DRAFT: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["DFlashDraftModel"],
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 7,
    "use_sliding_window": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "block_size": 8,
    "num_target_layers": 5,
    "dflash_config": {"mask_token_id": 94, "target_layer_ids": [0, 2, 3]},
}

BLOCKS: dict[str, Any] = {"speculation": "on", "adaptive_b": False}
"""Whole blocks in every cycle, whatever they bring."""

PROMPT = [int(t) for t in np.random.default_rng(7).integers(0, 94, 40)]


def changed(config: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """A deep copy with keys replaced; a value of None removes the key."""
    result = {**copy.deepcopy(dict(config)), **changes}
    return {key: value for key, value in result.items() if value is not None}


def target_tensors(c: Mapping[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Random target tensors under canonical names. Norm weights are far from their initial value."""
    rng = np.random.default_rng(seed)
    h, inter, vocab = c["hidden_size"], c["intermediate_size"], c["vocab_size"]
    q_dim, kv_dim = c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
    nv, dv = c["linear_num_value_heads"], c["linear_value_head_dim"]
    conv_dim = 2 * c["linear_num_key_heads"] * c["linear_key_head_dim"] + nv * dv

    def matrix(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * 1.2 / np.sqrt(shape[-1])).astype(np.float32)

    def vector(n: int) -> np.ndarray:
        return (rng.standard_normal(n) * 0.3).astype(np.float32)

    t = {"embed_tokens.weight": matrix(vocab, h), "norm.weight": vector(h)}
    if not c["tie_word_embeddings"]:
        t["lm_head.weight"] = matrix(vocab, h)
    for i, kind in enumerate(c["layer_types"]):
        p = f"layers.{i}."
        t |= _shared(p, h, inter, matrix, vector)
        if kind == "full_attention":
            t |= {
                p + "self_attn.q_proj.weight": matrix(2 * q_dim, h),
                p + "self_attn.k_proj.weight": matrix(kv_dim, h),
                p + "self_attn.v_proj.weight": matrix(kv_dim, h),
                p + "self_attn.o_proj.weight": matrix(h, q_dim),
                p + "self_attn.q_norm.weight": vector(c["head_dim"]),
                p + "self_attn.k_norm.weight": vector(c["head_dim"]),
            }
            continue
        p += "linear_attn."
        t |= {
            p + "in_proj_qkv.weight": matrix(conv_dim, h),
            p + "in_proj_z.weight": matrix(nv * dv, h),
            p + "in_proj_b.weight": matrix(nv, h),
            p + "in_proj_a.weight": matrix(nv, h),
            p + "conv1d.weight": matrix(conv_dim, 1, c["linear_conv_kernel_dim"]),
            p + "A_log": vector(nv) - 1,
            p + "dt_bias": vector(nv),
            p + "norm.weight": 1 + vector(dv),
            p + "out_proj.weight": matrix(h, nv * dv),
        }
    return t


def _shared(p: str, h: int, inter: int, matrix: Callable[..., Any], vector: Callable[..., Any]) -> dict[str, Any]:
    return {
        p + "input_layernorm.weight": vector(h),
        p + "post_attention_layernorm.weight": vector(h),
        p + "mlp.gate_proj.weight": matrix(inter, h),
        p + "mlp.up_proj.weight": matrix(inter, h),
        p + "mlp.down_proj.weight": matrix(h, inter),
    }


def draft_tensors(c: Mapping[str, Any], seed: int = 1) -> dict[str, np.ndarray]:
    """Random draft tensors."""
    rng = np.random.default_rng(seed)
    h, d = c["hidden_size"], c["head_dim"]
    q_dim, kv_dim = c["num_attention_heads"] * d, c["num_key_value_heads"] * d

    def matrix(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * 1.2 / np.sqrt(shape[-1])).astype(np.float32)

    def vector(n: int) -> np.ndarray:
        return (1 + rng.standard_normal(n) * 0.3).astype(np.float32)

    taps = c["dflash_config"]["target_layer_ids"]
    t = {"fc.weight": matrix(h, len(taps) * h), "hidden_norm.weight": vector(h), "norm.weight": vector(h)}
    for i in range(c["num_hidden_layers"]):
        p = f"layers.{i}."
        t |= _shared(p, h, c["intermediate_size"], matrix, vector)
        p += "self_attn."
        t |= {
            p + "q_proj.weight": matrix(q_dim, h),
            p + "k_proj.weight": matrix(kv_dim, h),
            p + "v_proj.weight": matrix(kv_dim, h),
            p + "o_proj.weight": matrix(h, q_dim),
            p + "q_norm.weight": vector(d),
            p + "k_norm.weight": vector(d),
        }
    return t


def to_bytes(x: np.ndarray, dtype: str) -> bytes:
    """Little-endian bytes of x in a safetensors dtype; BF16 rounds to nearest even."""
    if dtype == "BF16":
        bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()
    return x.astype({"F16": "<f2", "F32": "<f4"}[dtype]).tobytes()


def header_of(tensors: Mapping[str, np.ndarray], dtype: str = "F32") -> tuple[dict[str, Any], bytes]:
    """The header and the data section of a safetensors file."""
    header: dict[str, Any] = {}
    data = b""
    for name, x in tensors.items():
        raw = to_bytes(x, dtype)
        header[name] = {
            "dtype": dtype,
            "shape": list(x.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    return header, data


def write_file(path: Path, header: Any, data: bytes) -> None:
    """A safetensors file with this header (an object, or raw text) and data."""
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def write_checkpoint(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    *,
    prefix: str = "",
    dtype: str = "F32",
    shards: int = 1,
) -> Path:
    """A checkpoint folder; `prefix` goes before every name but lm_head."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    stored = {name if name.startswith("lm_head") else prefix + name: x for name, x in tensors.items()}
    if shards == 1:
        write_file(folder / "model.safetensors", *header_of(stored, dtype))
        return folder
    weight_map: dict[str, str] = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(list(stored.items())[i::shards])
        write_file(folder / file, *header_of(part, dtype))
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


class ScriptedDraft:
    """A draft that knows the true continuation and gets exactly `pattern[i]` proposals right in cycle i.

    Where the pattern ends it starts over. Keeps what it was given in `calls`: (anchor, taps since the last call, rows).
    For one request.
    """

    tap_ids = (0, 2)
    max_context = None

    def __init__(self, truth: Sequence[int], pattern: Sequence[int], block_size: int, vocab_size: int) -> None:
        self.block_size = block_size
        self.calls: list[tuple[int, np.ndarray, int]] = []
        self._truth = list(truth)
        self._pattern = list(pattern)
        self._vocab_size = vocab_size
        self._taps: list[np.ndarray] = []
        self.length = 0

    def check_pairing(self, target: Any) -> None:
        """Fits every target."""

    def session(self, target: Any, attention: Any) -> ScriptedDraft:
        return self

    def extend(self, tokens: Sequence[int], taps: np.ndarray) -> None:
        assert len(tokens) == len(taps)
        self._taps.append(taps)
        self.length += len(taps)

    def crop(self, length: int) -> None:
        self.length = length

    def propose(self, anchor: int, rows: int) -> list[int]:
        if not self.calls:
            self._prompt = self.length
        at, taps = self.length - self._prompt, np.concatenate(self._taps)
        self._taps = []
        right = self._pattern[len(self.calls) % len(self._pattern)]
        self.calls.append((anchor, taps, rows))
        padded = self._truth + [0] * rows
        ahead = padded[at + 1 : at + rows]
        return [t if i < right else (t + 1) % self._vocab_size for i, t in enumerate(ahead)]


class OracleDraft:
    """A draft for conversations. It is told the whole `sequence` beforehand, proposes what follows in it, the first
    `right()` proposals right, and checks that it is told of exactly the tokens that the target covers."""

    tap_ids = (0, 2)

    def __init__(self, block_size: int, right: Callable[[], int], vocab_size: int = TARGET["vocab_size"]) -> None:
        self.block_size = block_size
        self.sequence: list[int] = []
        self.right = right
        self.vocab_size = vocab_size

    def check_pairing(self, target: Any) -> None:
        """Fits every target."""

    def session(self, target: Any, attention: Any) -> OracleSession:
        return OracleSession(self)


class OracleSession:
    """One sequence of an `OracleDraft`."""

    max_context = None

    def __init__(self, draft: OracleDraft) -> None:
        self._draft = draft
        self.told: list[int] = []

    @property
    def length(self) -> int:
        return len(self.told)

    def extend(self, tokens: Sequence[int], taps: np.ndarray) -> None:
        assert taps.shape == (len(tokens), len(self._draft.tap_ids) * TARGET["hidden_size"])
        self.told += tokens

    def crop(self, length: int) -> None:
        assert length <= len(self.told)
        del self.told[length:]

    def propose(self, anchor: int, rows: int) -> list[int]:
        sequence, at = self._draft.sequence, len(self.told)
        assert [*self.told, anchor] == sequence[: at + 1]
        ahead, right = (sequence + [0] * rows)[at + 1 : at + rows], self._draft.right()
        return [t if i < right else (t + 1) % self._draft.vocab_size for i, t in enumerate(ahead)]


class Letters(Tokenizer):
    """A tokenizer whose every token is one letter, or two letters for ids from 26 on."""

    def __init__(self) -> None:
        pass

    def check_pairing(self, target: Any) -> None:
        """Fits every target."""

    def stream(self) -> Any:
        return self

    def push(self, ids: Sequence[int]) -> str:
        return "".join(("" if i < 26 else chr(65 + i // 26)) + chr(97 + i % 26) for i in ids)
