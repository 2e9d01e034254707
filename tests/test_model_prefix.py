"""The prefix cache: what a later prompt takes over, and that it changes nothing but the work."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_lab import BLOCKS, DRAFT, PROMPT, TARGET, OracleDraft, draft_tensors, target_tensors, write_checkpoint

from hipfire_kernels.model import (
    Conversation,
    Engine,
    Tokenizer,
    demo_pair_path,
    demo_prompts,
    load_demo_pair,
    load_draft,
    load_target,
)
from hipfire_kernels.model.deltanet import DeltaState
from hipfire_kernels.model.dflash import DFlashDraft, DFlashSession
from hipfire_kernels.model.prefix import TAIL_ROWS, Checkpoints, chunk_ends, common_prefix
from hipfire_kernels.model.qwen35 import Snapshot, Target, TargetState
from hipfire_kernels.model.state import WarmState


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_target(write_checkpoint(tmp_path_factory.mktemp("target"), TARGET, target_tensors(TARGET)))


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> DFlashDraft:
    return load_draft(write_checkpoint(tmp_path_factory.mktemp("draft"), DRAFT, draft_tensors(DRAFT)))


def cold(target: Target, prompt: Sequence[int], count: int) -> list[int]:
    return Engine(target, kv_format="f32").generate(list(prompt), count, stop=()).tokens


# The pieces.

TOKENS = st.lists(st.integers(0, 2), max_size=12)


@given(TOKENS, TOKENS)
def test_common_prefix(a: list[int], b: list[int]) -> None:
    n = common_prefix(a, b)
    assert a[:n] == b[:n]
    assert n in (len(a), len(b)) or a[n] != b[n]


@given(st.integers(0, 60), st.integers(0, 60), st.integers(1, 20), st.integers(0, 9))
def test_chunks_cover_the_rest_once(begin: int, end: int, rows: int, tail: int) -> None:
    ends = chunk_ends(begin, end, rows, tail)
    edges = [begin, *ends]
    assert ends == sorted(set(ends))
    assert all(0 < b - a <= max(rows, tail) for a, b in zip(edges, ends, strict=False))
    assert edges[-1] == max(begin, end)
    if tail and begin < end - tail:
        assert end - tail in ends


@settings(max_examples=200)
@given(st.integers(1, 5), st.lists(st.integers(0, 30), max_size=15))
def test_checkpoints(limit: int, lengths: list[int]) -> None:
    ring = Checkpoints(limit)
    known: set[int] = set()
    for length in lengths:
        if length > ring.last:
            known.add(length)
        ring.add(Snapshot(length, []))
        kept = [s.length for s in ring._saved]
        assert kept == sorted(set(kept))
        assert set(kept) <= known
        assert len(kept) <= limit
        assert ring.last == max(known, default=0)
        for asked in range(32):
            found = ring.latest(asked)
            assert (found.length if found else None) == max((k for k in kept if k <= asked), default=None)
    ring.drop_beyond(9)
    assert ring.last <= 9


def test_checkpoints_stay_spread() -> None:
    ring = Checkpoints(8)
    for length in range(100, 2100, 100):
        ring.add(Snapshot(length, []))
    lengths = [s.length for s in ring._saved]
    assert lengths[-3:] == [1800, 1900, 2000]
    assert max(b - a for a, b in zip([0, *lengths], lengths, strict=False)) <= 500


# Turns.


def turn(conversation: Conversation, target: Target, prompt: Sequence[int], count: int, cached: int) -> list[int]:
    """One request: its tokens are those of a cold run, and only what is not cached was processed. Gives all tokens."""
    options = BLOCKS if conversation.limits.block_size else {}
    got = conversation.generate(list(prompt), count, stop=(), **options)
    assert got.tokens == cold(target, prompt, count)
    assert (got.cached_prefix, got.prefill_tokens) == (cached, len(prompt) - cached)
    assert conversation.tokens == (*prompt, *got.tokens[:-1])
    return [*prompt, *got.tokens]


@pytest.mark.parametrize("drafted", [False, True])
def test_turns_process_their_suffix_alone(target: Target, draft: DFlashDraft, drafted: bool) -> None:
    conversation = Engine(target, draft if drafted else None, kv_format="f32").conversation()
    history = turn(conversation, target, PROMPT[:20], 15, 0)
    for said in ([7], [3, 4, 5], PROMPT[20:40]):
        # All but the pending last token is resident.
        history = turn(conversation, target, [*history, *said], 15, len(history) - 1)


def test_turns_on_a_q8_0_cache(target: Target, draft: DFlashDraft) -> None:
    """A hit, the same prompt again, a rewind into the answer: the tokens of cold plain decoding with that cache."""
    plain = Engine(target, kv_format="q8_0")
    conversation = Engine(target, draft, kv_format="q8_0").conversation()
    history = PROMPT[:20]
    for prompt, cached in (
        (history, 0),
        ([*history, *(first := plain.generate(history, 9, stop=()).tokens), 5], 28),
        (history, 12),
        ([*history, *first[:4], 9], 20),
    ):
        got = conversation.generate(prompt, 9, stop=(), **BLOCKS)
        assert got.tokens == plain.generate(prompt, 9, stop=()).tokens
        assert got.cached_prefix == cached
        assert got.routes["numpy"] == 0


def test_prompts_that_leave_the_earlier_ones(target: Target, draft: DFlashDraft) -> None:
    conversation = Engine(target, draft, kv_format="f32").conversation()
    first = PROMPT[:30]
    full = turn(conversation, target, first, 20, 0)
    # Regenerated: the checkpoint before the prompt's last tokens serves.
    turn(conversation, target, first, 20, 30 - TAIL_ROWS)
    # Leaves inside the answer, at its first token, and in the last tokens of the prompt.
    turn(conversation, target, [*full[:37], 1, 2], 5, 30)
    turn(conversation, target, [*first, (full[30] + 1) % 94, 8], 5, 30)
    turn(conversation, target, [*first[:25], 1, 2, 3], 5, 30 - TAIL_ROWS)
    # Nothing in common, though long enough.
    turn(conversation, target, [(t + 1) % 94 for t in first], 5, 0)
    # A prompt that is a prefix of what is resident needs its own last logits.
    turn(conversation, target, [(t + 1) % 94 for t in first[:29]], 5, 30 - TAIL_ROWS)


def test_a_prompt_shorter_than_the_tail(target: Target) -> None:
    conversation = Engine(target, kv_format="f32").conversation()
    turn(conversation, target, PROMPT[:3], 4, 0)
    turn(conversation, target, PROMPT[:3], 4, 0)
    turn(conversation, target, PROMPT[:1], 4, 0)
    turn(conversation, target, [*PROMPT[:1], 5], 4, 1)


def test_without_checkpoints_only_a_hit_is_warm(target: Target) -> None:
    conversation = Engine(target, kv_format="f32").conversation(checkpoints=0)
    full = turn(conversation, target, PROMPT[:30], 10, 0)
    full = turn(conversation, target, [*full, 5], 10, 39)
    turn(conversation, target, [*full[:-3], 93, 92], 10, 0)


def test_long_prompts_and_answers_leave_checkpoints_on_the_way(
    target: Target, draft: DFlashDraft, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hipfire_kernels.model.state.PREFILL_ROWS", 10)
    for engine in (Engine(target, kv_format="f32"), Engine(target, draft, kv_format="f32")):
        conversation = engine.conversation(checkpoints=20)
        full = turn(conversation, target, PROMPT, 60, 0)
        saved = [s.length for s in conversation._warm._checkpoints._saved]
        assert saved[:5] == [10, 20, 30, 32, 40]
        assert all(10 <= b - a < 10 + 8 for a, b in itertools.pairwise(saved[4:]))
        assert saved[-1] > 90 - 8
        turn(conversation, target, [*full[: saved[7] + 1], 93, 92], 10, saved[7])
        turn(conversation, target, [*full[:25], 93, 92], 10, 20)


@pytest.mark.parametrize("capped", [False, True])
def test_the_memory_of_a_conversation_is_bounded(target: Target, draft: DFlashDraft, capped: bool) -> None:
    conversation = Engine(target, draft, kv_format="f32").conversation(checkpoints=3 if capped else 8)
    for start in range(40):
        conversation.generate(PROMPT[start % 7 :], 3, stop=())
        assert len(conversation._warm._checkpoints._saved) <= (3 if capped else 8)
    assert all(len(layer.k) == 256 for layer in conversation._warm.target_state.layers if hasattr(layer, "k"))


def test_the_context_of_the_draft_is_that_of_a_cold_run(target: Target, draft: DFlashDraft) -> None:
    """After hits, a rewind and a stop inside a block: same keys and values, same proposals."""
    conversation = Engine(target, draft, kv_format="f32").conversation()
    full = turn(conversation, target, PROMPT[:30], 20, 0)
    turn(conversation, target, [*full[:37], 1, 2], 10, 30)
    full = turn(conversation, target, [*full[:34], 9], 12, 39 - TAIL_ROWS)
    full = turn(conversation, target, [*full, 9, 4], 12, len(full) - 1)
    warm = conversation._warm.session
    fresh = WarmState(target, draft, conversation._warm.attention, 0)
    for _ in fresh.prefill(full[:-1]):
        pass
    assert isinstance(warm, DFlashSession)
    assert isinstance(fresh.session, DFlashSession)
    np.testing.assert_allclose(warm.logits(full[-1], 8), fresh.session.logits(full[-1], 8), atol=1e-4)
    assert warm.length == fresh.session.length == len(full) - 1
    for mine, theirs in zip(warm._caches, fresh.session._caches, strict=True):
        for name in ("k", "v"):
            np.testing.assert_allclose(
                *(getattr(cache, name)[: warm.length] for cache in (mine, theirs)), atol=1e-4, rtol=1e-4
            )


def test_taps_that_wait_are_projected_in_time(
    target: Target, draft: DFlashDraft, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft that is told but not asked: same logits, whether its context was projected on the way or not."""
    taps = np.random.default_rng(3).standard_normal((40, 3 * 48)).astype(np.float32)
    sessions = []
    for rows in (512, 6):
        monkeypatch.setattr("hipfire_kernels.model.dflash._PENDING_ROWS", rows)
        session = draft.session(target, Engine(target, kv_format="f32").conversation()._warm.attention)
        for begin in range(0, 40, 4):
            session.extend(range(4), taps[begin : begin + 4])
            if begin == 20:
                session.crop(17)
                session.extend(range(7), taps[17:24])
        sessions.append(session)
    assert [s.length for s in sessions] == [40, 40]
    assert [s._projected for s in sessions] == [0, 40]
    np.testing.assert_allclose(*(s.logits(5, 8) for s in sessions), atol=1e-4)


@pytest.mark.parametrize(("kv_format", "limit"), [("f32", 3e-5), ("q8_0", 1e-2)])
def test_warm_logits_are_those_of_a_cold_prefill_up_to_rounding(kv_format: str, limit: float) -> None:
    """What the documents say of the demo pair: up to 1e-5 with f32 caches, up to 3e-3 where codes of Q8_0 flip."""
    target, _ = load_demo_pair()
    tokenizer = Tokenizer(demo_pair_path() / "target")
    differences = []
    for text in demo_prompts()[:3]:
        prompt = tokenizer.encode(text)
        conversation = Engine(target, kv_format=kv_format).conversation()
        full = [*prompt, *conversation.generate(prompt, 24, stop=()).tokens, 5]
        cold = WarmState(target, None, conversation._warm.attention, 0)
        warm, fresh = (list(state.prefill(full))[-1] for state in (conversation._warm, cold))
        differences.append(np.abs(warm - fresh).max())
        assert 2 < fresh.std() < 4
    assert 0 < max(differences) < limit


# What these tests must catch.


def restore_without_convolution(self: DeltaState, snapshot: Any) -> None:
    conv = self.conv
    right_restore(self, snapshot)
    self.conv = conv


def restore_keys_alone(self: TargetState, snapshot: Any) -> None:
    self.length = snapshot.length


def restore_by_reference(self: DeltaState, snapshot: Any) -> None:
    self.conv, self.s = snapshot


def align_beyond_the_checkpoint(self: WarmState, tokens: Sequence[int]) -> int:
    shared = min(common_prefix(tokens, self.tokens), len(tokens) - 1)
    self._shorten(shared)
    self.target_state.length = shared
    return shared


def crop_nothing(self: DFlashSession, length: int) -> None:
    pass


right_restore = DeltaState.restore
FAULTS = {
    "conv_not_restored": (DeltaState, "restore", restore_without_convolution),
    "kv_only": (TargetState, "restore", restore_keys_alone),
    "snapshot_overwritten": (DeltaState, "restore", restore_by_reference),
    "no_checkpoint_needed": (WarmState, "align", align_beyond_the_checkpoint),
    "stale_checkpoints": (Checkpoints, "drop_beyond", lambda self, length: None),
    "draft_not_cropped": (DFlashSession, "crop", crop_nothing),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_caught(target: Target, draft: DFlashDraft, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, broken = FAULTS[fault]
    monkeypatch.setattr(owner, name, broken)
    check = test_the_context_of_the_draft_is_that_of_a_cold_run if fault == "draft_not_cropped" else None
    with pytest.raises(AssertionError):
        (check or test_prompts_that_leave_the_earlier_ones)(target, draft)


def test_an_oracle_is_told_what_the_target_covers(target: Target) -> None:
    """Block after block accepted whole, over hits and a rewind: the proposer's view is checked token by token."""
    oracle = OracleDraft(8, lambda: 7)
    conversation = Engine(target, oracle, kv_format="f32").conversation()
    history: list[int] = []
    for said in (PROMPT[:20], [4, 5], [6]):
        prompt = [*history, *said]
        oracle.sequence = [*prompt, *cold(target, prompt, 40)]
        history = [*prompt, *conversation.generate(prompt, 17, stop=(), **BLOCKS).tokens]
    oracle.sequence = [*history[:30], 1, *cold(target, [*history[:30], 1], 40)]
    got = conversation.generate([*history[:30], 1], 17, stop=(), **BLOCKS)
    assert (got.produced, got.cached_prefix) == ([8, 8], 20)
