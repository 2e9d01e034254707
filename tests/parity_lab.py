"""What the parity tests and the script that records for them share, and what needs no torch."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from hipfire_kernels.model import load_draft, load_target
from hipfire_kernels.model.attention import Float32Attention

FIXTURES = Path(__file__).parent / "fixtures" / "transformers"
SEED = 20
VARIANTS = ("plain", "tied", "sharded", "bf16", "wrapped")
TOKENS = [int(t) for t in np.random.default_rng(5).integers(0, 96, 48)]
FEEDS = {"one shot": [48], "step by step": [1], "chunks": [7, 16, 1, 3, 21]}
"""How many tokens arrive at a time, the last repeated."""

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
"""Over the rope_parameters of `plain`: the same weights, another context, whose ramp lies among its four pairs."""

DRAFT: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 6,
    "use_sliding_window": True,
    "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"},
    "block_size": 8,
    "num_target_layers": 4,
    "dflash_config": {"mask_token_id": 95, "target_layer_ids": [0, 1, 2]},
}
FULL = ["full_attention"] * 3
DRAFT_VARIANTS: dict[str, dict[str, Any]] = {
    "sliding causal": {},
    "full": {"layer_types": FULL},
    "full causal": {"layer_types": FULL, "is_causal": True},
    "sliding non-causal": {"is_causal": False},
}
"""Per kind of layer, what config.json has beside `DRAFT`. Where a kind slides, the third layer is full."""

CYCLES = ((11, 8), (3, 8), (1, 5), (8, 8), (2, 3), (4, 8))
"""Context rows that a cycle brings, and rows of its block."""


def rewritten(source: Path, folder: Path, config: dict[str, Any]) -> Path:
    """The checkpoint of `source` under another config."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    return folder


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def older_keys(config: dict[str, Any]) -> dict[str, Any]:
    """A config of transformers 5 in the keys of transformers 4."""
    older = copy.deepcopy(config)
    rope = older.pop("rope_parameters")
    older["torch_dtype"] = older.pop("dtype")
    older["rope_theta"], older["partial_rotary_factor"] = rope.pop("rope_theta"), rope.pop("partial_rotary_factor")
    older["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}
    return older


def computed(folder: Path, tokens: Sequence[int], sizes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Logits [tokens, vocab], and the outputs of all layers but the last side by side, of the target in a folder."""
    target = load_target(folder)
    state, at, parts, left = target.new_state(Float32Attention(Counter())), 0, [], list(sizes)
    while at < len(tokens):
        size = left.pop(0) if len(left) > 1 else left[0]
        taps = range(len(target.layers) - 1)
        parts.append(target.forward(tokens[at : at + size], state, tap_ids=taps, all_logits=True))
        at += size
    return np.concatenate([p.logits for p in parts]), np.concatenate([p.taps for p in parts])


def draft_inputs(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """An embedding [vocab, hidden], and the taps that all cycles bring, float32."""
    rng, h = np.random.default_rng(seed), DRAFT["hidden_size"]
    shapes = (DRAFT["vocab_size"], h), (sum(new for new, _ in CYCLES), 3 * h)
    embedding, taps = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    return embedding, taps


def drafted(folder: Path, seed: int) -> np.ndarray:
    """The hidden states of rows 1.. of all cycles, one behind the other, of the draft in a folder."""
    embedding, taps = draft_inputs(seed)
    target: Any = SimpleNamespace(embedding=embedding, head=lambda hidden: hidden)
    session, at, hidden = load_draft(folder).session(target, Float32Attention(Counter())), 0, []
    for cycle, (new, rows) in enumerate(CYCLES):
        session.extend(range(at, at + new), taps[at : at + new])
        hidden.append(session.logits(cycle, rows))
        at += new
    return np.concatenate(hidden)
