"""Greedy speculation against plain decoding: 200 random (checkpoint, prompt, block size, acceptance pattern) cases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from budget import some
from model_lab import BLOCKS, TARGET, ScriptedDraft, changed, target_tensors, write_checkpoint

from hipfire_kernels.model import Engine, load_target

CHECKPOINTS, CASES = 40, 5


def random_config(rng: np.random.Generator) -> dict[str, Any]:
    """A target of 3 to 6 layers whose sizes have nothing to do with each other."""
    layers = int(rng.integers(3, 7))
    kv_heads, key_heads = int(rng.integers(1, 3)), int(rng.integers(1, 3))
    return changed(
        TARGET,
        vocab_size=int(rng.integers(40, 97)),
        hidden_size=int(rng.choice([24, 40, 48])),
        intermediate_size=int(rng.integers(20, 90)),
        num_hidden_layers=layers,
        num_attention_heads=kv_heads * int(rng.integers(1, 4)),
        num_key_value_heads=kv_heads,
        head_dim=int(rng.choice([16, 32, 64])),
        linear_key_head_dim=int(rng.integers(4, 20)),
        linear_value_head_dim=int(rng.integers(4, 20)),
        linear_num_key_heads=key_heads,
        linear_num_value_heads=key_heads * int(rng.integers(1, 4)),
        linear_conv_kernel_dim=int(rng.integers(2, 6)),
        eos_token_id=3,
        tie_word_embeddings=bool(rng.random() < 0.3),
        layer_types=[str(kind) for kind in rng.choice(["linear_attention", "full_attention"], layers, p=[0.7, 0.3])],
    )


@pytest.mark.parametrize("seed", some(range(CHECKPOINTS), 12))
def test_greedy_speculation_is_plain_decoding(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    config = random_config(rng)
    target = load_target(write_checkpoint(tmp_path, config, target_tensors(config, seed)))
    for _ in range(CASES):
        prompt = rng.integers(0, config["vocab_size"], int(rng.integers(1, 40)))
        count, block = int(rng.integers(1, 40)), int(rng.integers(1, 17))
        truth = Engine(target, kv_format="f32").generate(prompt, count + 16, stop=()).tokens
        pattern = [int(right) for right in rng.integers(0, block, 7)]
        draft = ScriptedDraft(truth, pattern, max(block, 2), config["vocab_size"])
        options = BLOCKS if block > 1 else {"block_size": 1}
        got = Engine(target, draft, kv_format="f32").generate(prompt, count, stop=(), **options)
        assert got.tokens == truth[:count]
        assert got.accepted[:-1] == (pattern * 40)[: got.cycles][:-1]
