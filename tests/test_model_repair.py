"""Stops inside a block: what the state is afterwards, through both repairs, and what the next turn makes of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from budget import some
from model_lab import BLOCKS, PROMPT, TARGET, Letters, OracleDraft, target_tensors, write_checkpoint

from hipfire_kernels import InputError
from hipfire_kernels.model import Conversation, Engine, Generation, GenerationResult, load_target
from hipfire_kernels.model.attention import Float32Attention
from hipfire_kernels.model.deltanet import DeltaState
from hipfire_kernels.model.qwen35 import Target, TargetState
from hipfire_kernels.model.state import WarmState

BLOCK = 8
TURN = [5, 77, 31]  # what the user says next


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_target(write_checkpoint(tmp_path_factory.mktemp("target"), TARGET, target_tensors(TARGET)))


def free(target: Target, prompt: Sequence[int], count: int, **options: Any) -> list[int]:
    """Plain decoding, cold."""
    return Engine(target, kv_format="f32").generate(list(prompt), count, **{"stop": (), **options}).tokens


class Speculating:
    """A conversation with a draft that knows plain decoding's tokens; `accepted` of each block are right."""

    def __init__(self, target: Target, repair: Any = "replay", accepted: int = BLOCK - 1) -> None:
        self.target = target
        self.draft = OracleDraft(BLOCK, lambda: accepted)
        self.conversation: Conversation = Engine(target, self.draft, kv_format="f32", repair=repair).conversation()

    def stream(self, prompt: Sequence[int], count: int = 60, **options: Any) -> Generation:
        self.draft.sequence = [*prompt, *free(self.target, prompt, min(2 * count, 256 - len(prompt)))]
        return self.conversation.stream(list(prompt), count, **{"stop": (), **BLOCKS, **options})

    def run(self, prompt: Sequence[int], count: int = 60, **options: Any) -> GenerationResult:
        generation = self.stream(prompt, count, **options)
        for _ in generation:
            pass
        return generation.result


def assert_covers(target: Target, state: TargetState, tokens: Sequence[int]) -> None:
    """The state is, in every bit, that of decoding `tokens` one by one, keys and values included."""
    stepped = target.new_state(Float32Attention(Counter()))
    for token in tokens:
        target.forward([token], stepped)
    assert state.length == len(tokens)
    for got, want in zip(state.layers, stepped.layers, strict=True):
        if isinstance(got, DeltaState) and isinstance(want, DeltaState):
            pairs = [(got.s, want.s), (got.conv, want.conv)]
        else:
            pairs = [(got.k[: len(tokens)], want.k[: len(tokens)]), (got.v[: len(tokens)], want.v[: len(tokens)])]  # type: ignore[union-attr]
        for mine, theirs in pairs:
            np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("repair", ["replay", "reset"])
@pytest.mark.parametrize("position", some(range(1, BLOCK + 1), 3))
def test_stop_at_every_position_of_a_block(target: Target, position: int, repair: str) -> None:
    """The first block holds tokens 1 to BLOCK; the token at `position` of them stops."""
    prompt = PROMPT[:20]
    truth = free(target, prompt, 60)
    assert len(set(truth[: BLOCK + 1])) == BLOCK + 1, "the stop must not occur earlier"
    stop = [truth[position]]
    lab = Speculating(target, repair)
    got, want = (
        lab.run(prompt, stop=stop),
        (twin := Engine(target, kv_format="f32").conversation()).generate(prompt, 60, stop=stop),
    )
    assert got.tokens == want.tokens == truth[: position + 1]
    assert (want.repair, want.replayed_tokens) == ("none", 0)
    if position == BLOCK:
        assert (got.repair, got.replayed_tokens) == ("none", 0)
    elif repair == "replay":
        # The seed (the anchor) and all that was consumed but the last.
        assert (got.repair, got.replayed_tokens) == ("replayed", 1 + position - 1)
    else:
        assert (got.repair, got.replayed_tokens) == ("reset", 0)
    cold = repair == "reset" and position < BLOCK
    if not cold:
        assert lab.conversation.tokens == twin.tokens == (*prompt, *truth[:position])
        assert_covers(target, lab.conversation._warm.target_state, lab.conversation.tokens)
    second = [*prompt, *got.tokens, *TURN]
    got, want = lab.run(second, 30), twin.generate(second, 30, stop=())
    assert got.tokens == want.tokens == free(target, second, 30)
    assert (got.cached_prefix, got.prefill_tokens) == ((0, len(second)) if cold else (20 + position, 1 + len(TURN)))
    assert (want.cached_prefix, want.prefill_tokens) == (20 + position, 1 + len(TURN))


@pytest.mark.parametrize("accepted", some(range(BLOCK), 3))
def test_stop_on_the_bonus_token_repairs_nothing(target: Target, accepted: int) -> None:
    prompt = PROMPT[:20]
    truth = free(target, prompt, 60)
    got = Speculating(target, accepted=accepted).run(prompt, stop=[truth[accepted + 1]])
    assert (got.tokens, got.repair, got.replayed_tokens) == (truth[: accepted + 2], "none", 0)


@pytest.mark.parametrize("count", some(range(2, 10), 4))
def test_the_end_of_the_budget_is_no_repair(target: Target, count: int) -> None:
    lab = Speculating(target)
    got = lab.run(PROMPT[:20], count)
    assert (len(got.tokens), got.repair, lab.conversation.tokens) == (count, "none", (*PROMPT[:20], *got.tokens[:-1]))
    assert_covers(target, lab.conversation._warm.target_state, lab.conversation.tokens)


@pytest.mark.parametrize("repair", ["replay", "reset"])
@pytest.mark.parametrize("count", some(range(1, BLOCK + 1), 3))
def test_truncated_by_the_caller(target: Target, count: int, repair: str) -> None:
    prompt = PROMPT[:20]
    lab = Speculating(target, repair)
    generation = lab.stream(prompt)
    next(generation)
    assert len(next(generation)) == BLOCK
    generation.truncate(count)
    result = generation.result
    assert next(generation, None) is None
    assert (result.stop_reason, result.tokens) == ("caller", free(target, prompt, 1 + count))
    assert (sum(result.produced), sum(result.accepted)) == (count, min(count, BLOCK - 1))
    whole = count == BLOCK
    assert result.repair == ("none" if whole else {"replay": "replayed", "reset": "reset"}[repair])
    assert result.replayed_tokens == (0 if whole or repair == "reset" else count)
    second = [*prompt, *result.tokens, *TURN]
    got = lab.run(second, 20)
    assert got.tokens == free(target, second, 20)
    assert got.cached_prefix == (0 if repair == "reset" and not whole else 20 + count)


def test_truncated_twice_and_after_a_stop_inside_the_block(target: Target) -> None:
    prompt = PROMPT[:20]
    lab = Speculating(target)
    generation = lab.stream(prompt, stop=[free(target, prompt, 8)[7]])
    assert [len(part) for part in generation] == [1, 7]
    for count in (5, 2):
        generation.truncate(count)
        assert generation.result.repair == "replayed"
        assert_covers(target, generation.state, [*prompt, *generation.result.tokens[:-1]])
    assert generation.result.replayed_tokens == 7 + 5 + 2
    assert lab.run([*prompt, *generation.result.tokens, *TURN], 9).cached_prefix == 22


@pytest.mark.parametrize("count", [1, 4, 7])
@pytest.mark.parametrize("checkpoints", [8, 0])
def test_a_request_that_goes_on_is_realigned(target: Target, count: int, checkpoints: int) -> None:
    prompt = PROMPT[:20]
    draft = OracleDraft(BLOCK, lambda: BLOCK - 1)
    draft.sequence = [*prompt, *free(target, prompt, 90)]
    engine = Engine(target, draft, kv_format="f32")
    generation = engine.conversation(checkpoints=checkpoints).stream(prompt, 60, stop=(), **BLOCKS)
    next(generation)
    next(generation)
    generation.truncate(count, resume=True)
    result = generation.result
    assert (result.repair, result.stop_reason, len(result.tokens)) == ("realigned", None, 1 + count)
    assert result.replayed_tokens == (count if checkpoints else 20 + count)
    assert_covers(target, generation.state, [*prompt, *result.tokens[:-1]])
    for _ in generation:
        pass
    assert result.tokens == free(target, prompt, 60)
    assert sum(result.produced) + 1 == 60


def test_what_was_realigned_has_no_block_to_go_back_into(target: Target, caplog: pytest.LogCaptureFixture) -> None:
    lab, prompt = stopped_inside(target)
    lab.generation.truncate(5, resume=True)  # type: ignore[attr-defined]
    assert_reset_and_right(target, lab, prompt, replayed=5)
    assert not caplog.records


@pytest.mark.parametrize("at", some(range(2, BLOCK), 3))
def test_stop_strings_inside_a_block(target: Target, at: int) -> None:
    """The string spans the tokens at - 1 and `at`; the state is repaired as after a stop token."""
    prompt, letters = PROMPT[:20], Letters()
    truth = free(target, prompt, 20)
    text = letters.push(truth[at - 1 : at + 1])
    lab = Speculating(target)
    got = lab.run(prompt, stop_strings=[text], tokenizer=letters)
    assert (got.tokens, got.stop_reason, got.repair) == (truth[: at + 1], "stop_string", "replayed")
    assert got.text_end == len(letters.push(truth[: at - 1]))
    assert_covers(target, lab.conversation._warm.target_state, [*prompt, *truth[:at]])


@pytest.mark.parametrize("kept", range(1, 5))
def test_stop_strings_after_tokens_were_given_back(target: Target, kept: int) -> None:
    """The string begins among the tokens that stay or those that are given back, and is found once, where it is."""
    prompt, letters = PROMPT[:20], Letters()
    truth = free(target, prompt, 20)
    lab = Speculating(target, accepted=4)
    generation = lab.stream(prompt, stop_strings=[letters.push(truth[4:7])], tokenizer=letters)
    assert [next(generation), next(generation)] == [truth[:1], truth[1:6]]
    generation.truncate(kept, resume=True)
    for _ in generation:
        pass
    assert (generation.result.tokens, generation.result.stop_reason) == (truth[:7], "stop_string")
    assert generation.result.text_end == len(letters.push(truth[:4]))


def test_what_truncate_refuses(target: Target) -> None:
    lab = Speculating(target)
    generation = lab.stream(PROMPT[:20])
    with pytest.raises(InputError, match="count is 1; the last list has 0 tokens"):
        generation.truncate(1)
    next(generation)
    generation.truncate(1, resume=True)  # all of it: nothing to do
    next(generation)
    for count in (0, 9, True, 2.0):
        with pytest.raises(InputError, match=f"count is {count}; the last list has 8 tokens, legal are 1 to that"):
            generation.truncate(count)  # type: ignore[arg-type]
    generation.cancel()
    assert lab.conversation.tokens == (*PROMPT[:20], *generation.result.tokens[:-1])
    lab.stream(PROMPT[:20])
    with pytest.raises(InputError, match="comes too late"):
        generation.truncate(1)


def stopped_inside(target: Target) -> tuple[Speculating, list[int]]:
    """A conversation two tokens into a block, about to be truncated to one, and its prompt."""
    lab = Speculating(target)
    generation = lab.stream(PROMPT[:20])
    next(generation), next(generation)
    lab.generation = generation  # type: ignore[attr-defined]
    return lab, PROMPT[:20]


def assert_reset_and_right(target: Target, lab: Any, prompt: list[int], replayed: int = 0) -> None:
    """The repair gave the state up; the tokens stand, and the next turn is cold and right."""
    lab.generation.truncate(3)
    assert (lab.generation.result.repair, lab.generation.result.replayed_tokens) == ("reset", replayed)
    assert lab.generation.result.tokens == free(target, prompt, 4)
    assert lab.conversation.tokens == ()
    second = [*prompt, *lab.generation.result.tokens, *TURN]
    got = lab.run(second, 20)
    assert (got.cached_prefix, got.tokens) == (0, free(target, second, 20))


def test_a_missing_identity_resets(target: Target) -> None:
    lab, prompt = stopped_inside(target)
    lab.conversation._warm.window = None
    assert_reset_and_right(target, lab, prompt)


@pytest.mark.parametrize("change", ["position", "anchor", "draft"])
def test_another_identity_resets(target: Target, change: str) -> None:
    lab, prompt = stopped_inside(target)
    warm = lab.conversation._warm
    assert warm.window is not None
    before, block = warm.window.before, warm.window.block
    if change == "position":
        before = before._replace(length=before.length - 1)
    else:
        at = 0 if change == "anchor" else 1
        block = (*block[:at], (block[at] + 1) % 96, *block[at + 1 :])
    warm.window = type(warm.window)(before, block)
    assert_reset_and_right(target, lab, prompt)


@pytest.mark.parametrize("failing", ["tape lost", "layer fails", "draft fails", "draft disagrees"])
def test_a_failing_repair_fails_closed(
    target: Target, failing: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lab, prompt = stopped_inside(target)
    warm = lab.conversation._warm
    owner, name = (DeltaState, "replay") if failing == "layer fails" else (type(warm.session), "crop")
    right, calls = getattr(owner, name), []

    def once(self: Any, *args: Any) -> None:
        """The second layer's replay, or the first crop, fails."""
        calls.append(args)
        if len(calls) != (2 if failing == "layer fails" else 1):
            right(self, *args)
        elif failing == "draft disagrees":
            right(self, args[0] - 1)
        else:
            raise ValueError("broken")

    if failing == "tape lost":
        warm.target_state.delta_states()[1].tape = None
    else:
        monkeypatch.setattr(owner, name, once)
    assert_reset_and_right(target, lab, prompt)
    assert "the repair of a conversation failed" in caplog.text


def test_what_a_repair_does_not_cost(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the last verify: no forward, and as many recurrence steps at any context."""
    steps: list[int] = []
    forward, advance = Target.forward, DeltaState.advance

    def counted_forward(self: Target, tokens: Sequence[int], *args: Any, **options: Any) -> Any:
        result = forward(self, tokens, *args, **options)
        steps.clear()
        return result

    def counted_advance(self: DeltaState, tape: Any, out: Any = None, count: int | None = None) -> None:
        steps.append(len(tape.u) if count is None else count)
        advance(self, tape, out, count)

    costs = []
    for length in (12, 40, 160):
        prompt = (PROMPT * 4)[:length]
        truth = free(target, prompt, 20)
        stop = next(i for i in range(3, BLOCK) if truth[i] not in truth[:i])
        lab = Speculating(target)
        generation = lab.stream(prompt, 20, stop=[truth[stop]])
        with monkeypatch.context() as patch:
            patch.setattr(Target, "forward", counted_forward)
            patch.setattr(DeltaState, "advance", counted_advance)
            assert [len(part) for part in generation] == [1, stop]
        assert generation.result.repair == "replayed"
        costs.append((stop, tuple(steps)))
    # One replay of `stop` tokens in each of the three recurrent layers; the accepted block itself was whole.
    assert costs == [(stop, (stop,) * 3) for stop, _ in costs]


# What these tests must catch: each fault is put in, and the next turn or the state has to be wrong.

right_replay = WarmState.replay


def one_more(self: WarmState, window: Any, length: int) -> None:
    right_replay(self, window, length + 1)


def kv_only(self: WarmState, window: Any, length: int) -> None:
    self.target_state.length = length
    self._shorten(length)


def draft_kept(self: WarmState, window: Any, length: int) -> None:
    self.target_state.rollback(window.before, length - window.before.length)
    del self.tokens[length:]


def tokens_kept(self: WarmState, window: Any, length: int) -> None:
    self.target_state.rollback(window.before, length - window.before.length)
    if self.session:
        self.session.crop(length)


@pytest.mark.parametrize("fault", [one_more, kv_only, draft_kept, tokens_kept])
def test_fault_is_caught(target: Target, fault: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WarmState, "replay", fault)
    with pytest.raises((AssertionError, ValueError, RuntimeError)):
        test_stop_at_every_position_of_a_block(target, 3, "replay")
