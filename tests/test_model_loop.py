"""The speculative loop on a small random target: no token changed, exact state after every rollback."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import model_reference
import numpy as np
import pytest
from model_lab import (
    BLOCKS,
    DRAFT,
    PROMPT,
    TARGET,
    ScriptedDraft,
    draft_tensors,
    target_tensors,
    write_checkpoint,
)

from hipfire_kernels.model import Engine, GenerationResult, load_draft, load_target
from hipfire_kernels.model.attention import Float32Attention
from hipfire_kernels.model.deltanet import DeltaState
from hipfire_kernels.model.dflash import DFlashDraft, DFlashSession
from hipfire_kernels.model.qwen35 import Target, TargetState

BLOCK = 8


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_target(write_checkpoint(tmp_path_factory.mktemp("target"), TARGET, target_tensors(TARGET)))


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> DFlashDraft:
    return load_draft(write_checkpoint(tmp_path_factory.mktemp("draft"), DRAFT, draft_tensors(DRAFT)))


def plain(target: Target, prompt: list[int], count: int, **options: Any) -> GenerationResult:
    return Engine(target, kv_format="f32").generate(prompt, count, **{"stop": (), **options})


def scripted(target: Target, prompt: list[int], pattern: list[int], block: int = BLOCK) -> ScriptedDraft:
    """A draft with plain decoding's continuation of `prompt` as its script."""
    truth = plain(target, prompt, 90).tokens
    return ScriptedDraft(truth, pattern, block, TARGET["vocab_size"])


def speculate(target: Target, draft: Any, prompt: list[int], count: int, **options: Any) -> GenerationResult:
    return Engine(target, draft, kv_format="f32").generate(prompt, count, **{"stop": (), **BLOCKS, **options})


def test_plain_decoding_takes_the_argmax_of_the_naive_form(target: Target) -> None:
    tokens = plain(target, PROMPT, 6).tokens
    _, logits = model_reference.target(TARGET, target_tensors(TARGET), [*PROMPT, *tokens[:-1]])
    assert tokens == logits[len(PROMPT) - 1 :].argmax(axis=1).tolist()


@pytest.mark.parametrize("seed", range(30))
def test_speculation_changes_no_token(target: Target, seed: int) -> None:
    rng = np.random.default_rng(seed)
    block = int(rng.integers(2, 17))
    prompt = PROMPT[: int(rng.integers(1, 41))]
    pattern = [int(a) for a in rng.integers(0, block, 9)]
    count = int(rng.integers(1, 60))
    got = speculate(target, scripted(target, prompt, pattern, block), prompt, count)
    assert got.tokens == plain(target, prompt, count).tokens
    assert sum(got.produced) + 1 == len(got.tokens) == count
    # The script is obeyed in every cycle but the last, which the budget may cut.
    assert got.accepted[:-1] == (pattern * 99)[: got.cycles][:-1]
    assert all(a <= p <= a + 1 for a, p in zip(got.accepted, got.produced, strict=True))


def test_a_real_draft_changes_no_token(target: Target, draft: DFlashDraft) -> None:
    got = speculate(target, draft, PROMPT, 40)
    assert got.tokens == plain(target, PROMPT, 40).tokens
    assert got.cycles == len(got.accepted) == len(got.produced)
    assert got.tau == sum(got.accepted) / got.cycles
    assert got.acceptance_length == got.tau + 1


def assert_state_is_that_of(target: Target, state: TargetState, tokens: list[int]) -> None:
    """The state after a rollback, against a fresh prefill (close) and token by token (every bit)."""
    assert state.length == len(tokens)
    fresh, stepped = (target.new_state(Float32Attention(Counter())) for _ in range(2))
    target.forward(tokens, fresh)
    for token in tokens:
        target.forward([token], stepped)
    for got, want, same in zip(state.delta_states(), fresh.delta_states(), stepped.delta_states(), strict=True):
        np.testing.assert_allclose(got.s, want.s, atol=1e-4)
        np.testing.assert_allclose(got.conv, want.conv, atol=1e-4)
        np.testing.assert_array_equal(got.s, same.s)
        np.testing.assert_array_equal(got.conv, same.conv)
    logits = [target.forward([17], s).logits for s in (state, fresh)]
    np.testing.assert_allclose(*logits, atol=1e-4)


@pytest.mark.parametrize("accepted", range(BLOCK))
def test_state_after_every_accepted_count(target: Target, accepted: int) -> None:
    # The rows of a prompt of at most BLOCK_ROWS tokens are independent: the states can agree in every bit.
    prompt = PROMPT[:20]
    engine = Engine(target, scripted(target, prompt, [accepted]), kv_format="f32")
    generation = engine.stream(prompt, 60, stop=(), **BLOCKS)
    for cycle in range(3):
        next(generation)
        tokens = [*prompt, *generation.result.tokens]
        assert generation.result.produced == [accepted + 1] * cycle
    assert_state_is_that_of(target, generation.state, tokens[:-1])


@pytest.mark.parametrize("position", range(1, BLOCK + 1))
def test_stop_at_every_position_of_a_block(target: Target, position: int) -> None:
    prompt = PROMPT[:20]
    truth = plain(target, prompt, 90).tokens
    stop = truth[position]
    end = truth.index(stop) + 1
    engine = Engine(target, scripted(target, prompt, [BLOCK - 1]), kv_format="f32")
    generation = engine.stream(prompt, 60, stop=[stop], **BLOCKS)
    assert [token for part in generation for token in part] == truth[:end]
    result = generation.result
    assert result.stop_reason == "stop"
    assert sum(result.produced) + 1 == end
    assert sum(result.accepted) == max(0, min(end - 1, BLOCK - 1))
    assert_state_is_that_of(target, generation.state, [*prompt, *truth[: end - 1]])


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 10])
def test_the_budget_cuts_the_block(target: Target, count: int) -> None:
    draft = scripted(target, PROMPT, [BLOCK - 1])
    got = speculate(target, draft, PROMPT, count)
    assert got.tokens == plain(target, PROMPT, count).tokens
    assert got.stop_reason == "length"
    left, rows = count - 1, []
    while left:
        rows.append(min(BLOCK, left + 1))
        left -= min(rows[-1], left)
    assert [call[2] for call in draft.calls] == rows


def test_first_token_can_be_the_stop(target: Target, draft: DFlashDraft) -> None:
    first = plain(target, PROMPT, 1).tokens
    got = speculate(target, draft, PROMPT, 20, stop=first)
    assert (got.tokens, got.stop_reason, got.cycles, got.tau) == (first, "stop", 0, 0.0)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_prompts_shorter_than_the_convolution(target: Target, draft: DFlashDraft, length: int) -> None:
    prompt = PROMPT[:length]
    assert speculate(target, draft, prompt, 12).tokens == plain(target, prompt, 12).tokens


def test_block_size_one_is_plain_decoding(target: Target) -> None:
    draft = scripted(target, PROMPT, [BLOCK - 1])
    got = speculate(target, draft, PROMPT, 12, block_size=1, speculation="auto")
    assert got == plain(target, PROMPT, 12)
    assert (got.produced, got.accepted, draft.calls) == ([1] * 11, [0] * 11, [])


def test_a_smaller_block_size_is_obeyed(target: Target) -> None:
    draft = scripted(target, PROMPT, [7])
    got = speculate(target, draft, PROMPT, 20, block_size=4)
    assert {call[2] for call in draft.calls} == {4}
    assert got.tokens == plain(target, PROMPT, 20).tokens


def test_streaming_gives_what_generate_gives(target: Target) -> None:
    draft = scripted(target, PROMPT, [2, 0, 5])
    generation = Engine(target, draft, kv_format="f32").stream(PROMPT, 30, stop=(), **BLOCKS)
    parts = []
    for part in generation:
        parts.append(part)
        assert [t for p in parts for t in p] == generation.result.tokens
    assert [len(part) for part in parts] == [1, *generation.result.produced]
    assert next(generation, None) is None
    assert generation.result == speculate(target, scripted(target, PROMPT, [2, 0, 5]), PROMPT, 30)


def test_one_engine_runs_interleaved_requests(target: Target, draft: DFlashDraft) -> None:
    engine = Engine(target, draft, kv_format="f32")
    running = [engine.stream(PROMPT[:n], 15, stop=(), **BLOCKS) for n in (9, 25)]
    while [next(generation, None) for generation in running] != [None, None]:
        pass
    for n, generation in zip((9, 25), running, strict=True):
        assert generation.result.tokens == plain(target, PROMPT[:n], 15).tokens


def test_long_prompts_are_prefilled_in_chunks(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = scripted(target, PROMPT, [3])
    want = speculate(target, whole, PROMPT, 20)
    monkeypatch.setattr("hipfire_kernels.model.state.PREFILL_ROWS", 7)
    parts = scripted(target, PROMPT, [3])
    assert speculate(target, parts, PROMPT, 20).tokens == want.tokens
    assert want.prefill_tokens == len(PROMPT)
    for (_, got_taps, _), (_, want_taps, _) in zip(parts.calls, whole.calls, strict=True):
        np.testing.assert_allclose(got_taps, want_taps, atol=1e-4)


# What the suite must catch. Each fault is put in, and the check that guards against it has to fail.


def check_lossless(target: Target, draft: DFlashDraft) -> None:
    guide = scripted(target, PROMPT, [3, 0, 6, 1])
    assert speculate(target, guide, PROMPT, 60).tokens == plain(target, PROMPT, 60).tokens


def check_state(target: Target, draft: DFlashDraft) -> None:
    test_state_after_every_accepted_count(target, 3)


def check_draft_input(target: Target, draft: DFlashDraft) -> None:
    """What the draft computes inside the engine, against the naive target and draft on the tokens so far."""
    seen: list[np.ndarray] = []
    head = Target.head

    def spy(self: Target, hidden: np.ndarray) -> np.ndarray:
        seen.append(hidden)
        return head(self, hidden)

    generation = Engine(target, draft, kv_format="f32").stream(PROMPT[:12], 12, stop=(), **BLOCKS)
    with pytest.MonkeyPatch.context() as patch:
        next(generation)
        patch.setattr(Target, "head", spy)
        for _ in range(2):
            seen.clear()
            tokens = [*PROMPT[:12], *generation.result.tokens]
            rows = min(BLOCK, 12 - len(generation.result.tokens) + 1)
            next(generation)
            outputs, _ = model_reference.target(TARGET, target_tensors(TARGET), tokens[:-1])
            taps = np.concatenate([outputs[i] for i in DRAFT["dflash_config"]["target_layer_ids"]], axis=1)
            block = target.embedding[[tokens[-1]] + [94] * (rows - 1)]
            want = model_reference.draft(DRAFT, draft_tensors(DRAFT), taps, block)[1:]
            np.testing.assert_allclose(seen[0], want, atol=5e-5)


def keep_recurrent_state(self: TargetState, snapshot: Any, keep: int) -> None:
    self.length = snapshot.length + keep


def replay_without_convolution(self: DeltaState, snapshot: Any, keep: int) -> None:
    conv = self.conv
    right_replay(self, snapshot, keep)
    self.conv = conv


def replay_onto_old_convolution(self: DeltaState, snapshot: Any, keep: int) -> None:
    right_replay(self, snapshot, keep)
    self.conv = snapshot[0]


def replay_one_less(self: DeltaState, snapshot: Any, keep: int) -> None:
    right_replay(self, snapshot, keep - 1)


def mask_in_slot_zero(self: DFlashSession, anchor: int, rows: int) -> list[int]:
    return right_propose(self, 94, rows)


def keep_block_rows(self: DFlashSession, anchor: int, rows: int) -> list[int]:
    result = right_propose(self, anchor, rows)
    self._projected += rows
    self.length += rows
    return result


right_replay = DeltaState.replay
right_propose = DFlashSession.propose
taps_of_the_layer_before = property(lambda self: tuple(i - 1 for i in (1, 2, 3)))

FAULTS = {
    "kv_only_crop": (TargetState, "rollback", keep_recurrent_state, (check_lossless, check_state)),
    "conv_not_replayed": (DeltaState, "replay", replay_without_convolution, (check_lossless, check_state)),
    "conv_of_snapshot": (DeltaState, "replay", replay_onto_old_convolution, (check_lossless, check_state)),
    "replay_one_less": (DeltaState, "replay", replay_one_less, (check_lossless, check_state)),
    "tap_off_by_one": (DFlashDraft, "tap_ids", taps_of_the_layer_before, (check_draft_input,)),
    "mask_in_slot_0": (DFlashSession, "propose", mask_in_slot_zero, (check_draft_input,)),
    "block_rows_kept": (DFlashSession, "propose", keep_block_rows, (check_draft_input,)),
}


@pytest.mark.parametrize("check", [check_lossless, check_state, check_draft_input])
def test_checks_pass_without_a_fault(target: Target, draft: DFlashDraft, check: Callable[..., None]) -> None:
    check(target, draft)


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_caught(target: Target, draft: DFlashDraft, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, broken, checks = FAULTS[fault]
    monkeypatch.setattr(owner, name, broken)
    for check in checks:
        with pytest.raises(AssertionError):
            check(target, draft)


def test_tensors_reach_the_loop_from_disk(tmp_path: Path) -> None:
    """bf16 storage in shards under the multimodal prefix decodes like the same values stored as f32."""
    tensors = target_tensors(TARGET)
    rounded = {name: (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32) for name, x in tensors.items()}
    stored = write_checkpoint(tmp_path / "a", TARGET, rounded, prefix="model.language_model.", dtype="BF16", shards=4)
    simple = write_checkpoint(tmp_path / "b", TARGET, rounded)
    results = [plain(load_target(folder), PROMPT, 10).tokens for folder in (stored, simple)]
    assert results[0] == results[1]
