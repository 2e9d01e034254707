"""The numpy models against naive float64 forms of the same formulas, and the independence of rows."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import model_reference
import numpy as np
import pytest
from model_lab import DRAFT, PROMPT, TARGET, changed, draft_tensors, target_tensors, write_checkpoint

from hipfire_kernels.model import load_draft, load_target
from hipfire_kernels.model.attention import Block, Float32Attention
from hipfire_kernels.model.layers import BLOCK_ROWS, Rope, project_rows
from hipfire_kernels.model.qwen35 import Target, TargetState


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_target(write_checkpoint(tmp_path_factory.mktemp("target"), TARGET, target_tensors(TARGET)))


def new_state(target: Target) -> TargetState:
    return target.new_state(Float32Attention(Counter()))


def feed(target: Target, tokens: list[int], sizes: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Logits and the taps of all layers when `tokens` arrive in blocks of these sizes, the last repeated."""
    state, logits, taps, at = new_state(target), [], [], 0
    while at < len(tokens):
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        out = target.forward(tokens[at : at + size], state, tap_ids=range(5), all_logits=True)
        logits.append(out.logits)
        taps.append(out.taps)
        at += size
    return np.concatenate(logits), np.concatenate(taps)


@pytest.mark.parametrize("name", ["delta_net", "full_attention"])
def test_one_mixer_equals_its_formulas(target: Target, name: str) -> None:
    index = {"delta_net": 0, "full_attention": 1}[name]
    x = np.random.default_rng(3).standard_normal((12, TARGET["hidden_size"])).astype(np.float32)
    positions = np.arange(12, dtype=np.int32)
    state = new_state(target)
    rope = Rope(target.config.rotary_dim, target.config.rope_theta)
    block = Block(state.attention, positions, rope.table(positions), record=False)
    got = target.layers[index].mixer(x, state.layers[index], block)
    tensors = {key: value.astype(np.float64) for key, value in target_tensors(TARGET).items()}
    want = getattr(model_reference, name)(TARGET, tensors, f"layers.{index}.", list(x.astype(np.float64)))
    np.testing.assert_allclose(got, want, atol=2e-6)


@pytest.mark.parametrize("sizes", [[40], [1], [7], [34, 1, 5], [3, 16]])
def test_target_equals_the_naive_form_however_the_tokens_arrive(target: Target, sizes: list[int]) -> None:
    outputs, want = model_reference.target(TARGET, target_tensors(TARGET), PROMPT)
    logits, taps = feed(target, PROMPT, sizes)
    np.testing.assert_allclose(taps, np.concatenate(outputs, axis=1), atol=2e-4)
    np.testing.assert_allclose(logits, want, atol=2e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": True},
        {"linear_num_value_heads": 2},
        {"linear_num_value_heads": 6},
        {"linear_conv_kernel_dim": 2},
        {"num_key_value_heads": 4},
        {"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 1.0}},
    ],
)
def test_other_shapes(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = changed(TARGET, **changes)
    tensors = target_tensors(config, seed=5)
    _, want = model_reference.target(config, tensors, PROMPT[:20])
    logits, _ = feed(load_target(write_checkpoint(tmp_path, config, tensors)), PROMPT[:20], [9])
    np.testing.assert_allclose(logits, want, atol=2e-4)


@pytest.mark.parametrize(
    "norm", ["layers.0.input_layernorm", "layers.1.self_attn.q_norm", "layers.0.linear_attn.norm", "norm"]
)
def test_norm_conventions(tmp_path: Path, norm: str) -> None:
    """All norms of the target multiply by 1 + w, but the DeltaNet output norm by w."""
    tensors = target_tensors(TARGET)
    plain = norm == "layers.0.linear_attn.norm"
    tensors[f"{norm}.weight"] = np.full_like(tensors[f"{norm}.weight"], 1.0 if plain else 0.0)
    neutral = load_target(write_checkpoint(tmp_path / "neutral", TARGET, tensors))
    factors = {
        "layers.0.input_layernorm": neutral.layers[0].mixer_norm,
        "layers.1.self_attn.q_norm": getattr(neutral.layers[1].mixer, "q_norm", None),
        "layers.0.linear_attn.norm": getattr(neutral.layers[0].mixer, "norm", None),
        "norm": neutral.norm,
    }
    np.testing.assert_array_equal(factors[norm], 1.0)


def draft_steps(folder: Path, config: dict[str, Any], new: list[int]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Hidden states of rows 1.. of a session that gets `new` context rows per call, and the naive ones."""
    tensors = draft_tensors(config)
    draft = load_draft(write_checkpoint(folder, config, tensors))
    rng = np.random.default_rng(2)
    embedding = rng.standard_normal((96, 48)).astype(np.float32)
    all_taps = rng.standard_normal((sum(new), 3 * 48)).astype(np.float32)
    seen: list[np.ndarray] = []

    def head(hidden: np.ndarray) -> np.ndarray:
        seen.append(hidden)
        return hidden @ embedding.T

    session = draft.session(
        SimpleNamespace(embedding=embedding, head=head),  # type: ignore[arg-type]
        Float32Attention(Counter()),
    )
    pairs, start = [], 0
    for i, count in enumerate(new):
        rows = 8 if i % 2 == 0 else 5
        session.extend(range(count), all_taps[start : start + count])
        proposals = session.propose(10 + i, rows)
        start += count
        block = embedding[[10 + i] + [94] * (rows - 1)]
        want = model_reference.draft(config, tensors, all_taps[:start], block)[1:]
        assert proposals == (seen[-1] @ embedding.T).argmax(axis=1).tolist()
        pairs.append((seen[-1], want))
    return pairs


@pytest.mark.parametrize("causal", [None, True, False])
@pytest.mark.parametrize("kinds", ["ssf", "fff", "sss"])
def test_draft_equals_the_naive_form_over_cached_cycles(tmp_path: Path, kinds: str, causal: bool | None) -> None:
    names = {"s": "sliding_attention", "f": "full_attention"}
    dflash = changed(DRAFT["dflash_config"], causal=causal)
    config = changed(DRAFT, layer_types=[names[kind] for kind in kinds], dflash_config=dflash)
    for got, want in draft_steps(tmp_path, config, [11, 3, 1, 8, 2, 4]):
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_a_row_does_not_depend_on_the_other_rows_bit_for_bit(target: Target) -> None:
    one, one_taps = feed(target, PROMPT, [1])
    for sizes in ([2], [5], [16], [BLOCK_ROWS], [1, 3, 13]):
        logits, taps = feed(target, PROMPT, sizes)
        np.testing.assert_array_equal(logits, one)
        np.testing.assert_array_equal(taps, one_taps)


def test_a_growing_cache_keeps_its_rows() -> None:
    attention = Float32Attention(Counter())
    cache = attention.cache(2, 4)
    rows = np.random.default_rng(0).standard_normal((700, 2, 4)).astype(np.float32)
    for at in range(0, 700, 50):
        positions = np.arange(at, at + 50, dtype=np.int32)
        attention.write(cache, rows[at : at + 50], -rows[at : at + 50], positions)
        np.testing.assert_array_equal(cache.k[: at + 50], rows[: at + 50])
        np.testing.assert_array_equal(cache.v[: at + 50], -rows[: at + 50])
    assert len(cache.k) == len(cache.v) == 1024


@pytest.mark.parametrize(("n_out", "n_in"), [(7, 33), (1028, 256), (5000, 64), (3, 200_000)])
def test_project_rows(n_out: int, n_in: int) -> None:
    rng = np.random.default_rng(1)
    weight = rng.standard_normal((n_out, n_in)).astype(np.float32)
    x = rng.standard_normal((BLOCK_ROWS + 1, n_in)).astype(np.float32)
    want = x.astype(np.float64) @ weight.astype(np.float64).T
    few = project_rows(x[:BLOCK_ROWS], weight)
    np.testing.assert_allclose(few, want[:BLOCK_ROWS], atol=1e-6 * n_in)
    np.testing.assert_allclose(project_rows(x, weight), want, atol=1e-6 * n_in)
    np.testing.assert_array_equal(project_rows(x[3:5], weight), few[3:5])
