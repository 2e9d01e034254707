"""The models against transformers (target) and torch (draft).

What those say is recorded in tests/fixtures/transformers by tests/record_transformers.py. The tests of the `parity`
extra ask them again, about other weights and larger sizes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_lab import draft_tensors, write_checkpoint
from parity_lab import (
    DRAFT,
    DRAFT_VARIANTS,
    FEEDS,
    FIXTURES,
    SEED,
    TOKENS,
    VARIANTS,
    YARN,
    computed,
    config_of,
    drafted,
    older_keys,
    rewritten,
)

TARGET_ATOL, DRAFT_ATOL = 1e-3, 1e-5


@pytest.fixture(scope="module")
def recorded() -> Any:
    return np.load(FIXTURES / "target.npz")


@pytest.mark.parametrize("feed", FEEDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_the_recorded_ones(recorded: Any, variant: str, feed: str) -> None:
    logits, _ = computed(FIXTURES / variant, TOKENS, FEEDS[feed])
    np.testing.assert_allclose(logits, recorded[variant], atol=TARGET_ATOL, rtol=0)


def test_layer_outputs_equal_the_recorded_ones(recorded: Any) -> None:
    _, outputs = computed(FIXTURES / "plain", TOKENS, [48])
    np.testing.assert_allclose(outputs, recorded["plain outputs"], atol=TARGET_ATOL, rtol=0)


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("yarn", [False, True])
def test_both_spellings_of_rope_equal_the_recorded_logits(
    recorded: Any, tmp_path: Path, yarn: bool, older: bool
) -> None:
    config = config_of(FIXTURES / "plain")
    config["rope_parameters"] |= YARN if yarn else {}
    folder = rewritten(FIXTURES / "plain", tmp_path / "it", older_keys(config) if older else config)
    logits, _ = computed(folder, TOKENS, [48])
    np.testing.assert_allclose(logits, recorded["plain yarn" if yarn else "plain"], atol=TARGET_ATOL, rtol=0)


def test_the_recordings_tell_the_variants_apart(recorded: Any) -> None:
    """A recording that any arithmetic would equal shows nothing."""
    assert all(recorded[variant].std() > 0.3 for variant in VARIANTS)
    assert np.abs(recorded["plain yarn"] - recorded["plain"]).max() > 100 * TARGET_ATOL
    draft = np.load(FIXTURES / "draft.npz")
    for one in DRAFT_VARIANTS:
        for two in set(DRAFT_VARIANTS) - {one}:
            assert np.abs(draft[one] - draft[two]).max() > 1000 * DRAFT_ATOL


@pytest.mark.parametrize("variant", DRAFT_VARIANTS)
def test_draft_equals_the_recorded_hidden_states(tmp_path: Path, variant: str) -> None:
    folder = rewritten(FIXTURES / "draft", tmp_path / "it", {**DRAFT, **DRAFT_VARIANTS[variant]})
    want = np.load(FIXTURES / "draft.npz")[variant]
    np.testing.assert_allclose(drafted(folder, SEED), want, atol=DRAFT_ATOL, rtol=0)


@pytest.fixture(scope="module")
def live() -> Any:
    reason = "asks transformers itself: pip install hipfire-kernels[parity]"
    for name in ("torch", "transformers"):
        pytest.importorskip(name, reason=reason)
    import record_transformers

    return record_transformers


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_those_of_transformers(live: Any, tmp_path: Path, variant: str) -> None:
    live.make_target(variant, tmp_path, live.LARGER, seed=SEED + 1)
    tokens = [int(t) for t in np.random.default_rng(6).integers(0, live.LARGER["vocab_size"], 90)]
    for theirs, ours in (([90], [1]), ([1], [33, 1, 16]), ([70, 16, 1], [90])):
        want, outputs = live.reference(tmp_path, tokens, theirs)
        logits, taps = computed(tmp_path, tokens, ours)
        np.testing.assert_allclose(logits, want, atol=TARGET_ATOL, rtol=0)
        np.testing.assert_allclose(taps, outputs, atol=TARGET_ATOL, rtol=0)


@pytest.mark.parametrize("variant", DRAFT_VARIANTS)
def test_draft_equals_the_torch_form(live: Any, tmp_path: Path, variant: str) -> None:
    changes = DRAFT_VARIANTS[variant]
    for seed in (SEED + 1, SEED + 2):
        write_checkpoint(tmp_path / str(seed), DRAFT, draft_tensors(DRAFT, seed))
        want = live.draft_reference(tmp_path / str(seed), changes, seed)
        folder = rewritten(tmp_path / str(seed), tmp_path / f"{seed} changed", {**DRAFT, **changes})
        np.testing.assert_allclose(drafted(folder, seed), want, atol=DRAFT_ATOL, rtol=0)


def test_the_recordings_are_what_transformers_says(live: Any) -> None:
    target, draft = np.load(FIXTURES / "target.npz"), np.load(FIXTURES / "draft.npz")
    for variant in VARIANTS:
        np.testing.assert_allclose(live.reference(FIXTURES / variant, TOKENS, [48])[0], target[variant], atol=1e-4)
    yarn, _ = live.reference(FIXTURES / "plain", TOKENS, [48], YARN)
    np.testing.assert_allclose(yarn, target["plain yarn"], atol=1e-4)
    for variant, changes in DRAFT_VARIANTS.items():
        got = live.draft_reference(FIXTURES / "draft", changes, SEED)
        np.testing.assert_allclose(got, draft[variant], atol=DRAFT_ATOL)
    assert json.loads((FIXTURES / "recorded.json").read_text())["seed"] == SEED
