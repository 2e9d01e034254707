"""Far positions and exact ends: angles at position 200,000, the last allowed token, caps at exactly their value.

Each check has faults beside it that it must catch; the last test plants them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from model_lab import (
    BLOCKS,
    DRAFT,
    PROMPT,
    TARGET,
    Letters,
    OracleDraft,
    changed,
    draft_tensors,
    target_tensors,
    write_checkpoint,
)

from hipfire_kernels import InputError
from hipfire_kernels.dispatch import policy
from hipfire_kernels.model import Engine, Generation, dflash, load_draft, load_target, state
from hipfire_kernels.model.attention import Float32Attention
from hipfire_kernels.model.deltanet import DeltaState
from hipfire_kernels.model.dflash import DFlashDraft, DFlashSession
from hipfire_kernels.model.layers import BLOCK_ROWS, Rope
from hipfire_kernels.model.qwen35 import Target, TargetState
from hipfire_kernels.model.request import Limits
from hipfire_kernels.model.state import WarmState
from hipfire_kernels.model.stopping import StopStrings
from hipfire_kernels.model.yarn import Yarn

BLOCK = 8
CAPACITY = TARGET["max_position_embeddings"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_target(write_checkpoint(tmp_path_factory.mktemp("target"), TARGET, target_tensors(TARGET)))


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> DFlashDraft:
    config = changed(DRAFT, layer_types=["full_attention"] * 3, sliding_window=None, use_sliding_window=None)
    return load_draft(write_checkpoint(tmp_path_factory.mktemp("draft"), config, draft_tensors(config)))


def free(target: Target, prompt: Sequence[int], count: int) -> list[int]:
    """Plain decoding, cold."""
    return Engine(target, kv_format="f32").generate(list(prompt), count, stop=()).tokens


def oracle(target: Target, prompt: Sequence[int], count: int, accepted: int = BLOCK - 1) -> OracleDraft:
    """A draft that knows plain decoding's tokens; `accepted` of each block are right."""
    drafting = OracleDraft(BLOCK, lambda: accepted)
    drafting.sequence = [*prompt, *free(target, prompt, count)]
    return drafting


def assert_covers(target: Target, covered: TargetState, tokens: Sequence[int]) -> None:
    """The recurrent state and the keys are those of stepping through `tokens`, to the bit."""
    stepped = target.new_state(Float32Attention(Counter()))
    for token in tokens:
        target.forward([token], stepped)
    assert covered.length == len(tokens)
    for got, want in zip(covered.layers, stepped.layers, strict=True):
        if isinstance(got, DeltaState) and isinstance(want, DeltaState):
            np.testing.assert_array_equal(got.s, want.s)
            np.testing.assert_array_equal(got.conv, want.conv)
        else:
            np.testing.assert_array_equal(got.k[: len(tokens)], want.k[: len(tokens)])  # type: ignore[union-attr]


# ---- far positions -----------------------------------------------------------------------------------------

FAR = [0, 1, 4095, 65_537, 199_999, 200_000, 262_143]


def turned(position: int, frequency: float) -> tuple[float, float]:
    """cos and sin of position * frequency; the product is taken in two parts, which float64 holds exactly enough."""
    high, low = divmod(position, 1024)
    one, two = 1024 * high * frequency, low * frequency
    return (
        math.cos(one) * math.cos(two) - math.sin(one) * math.sin(two),
        math.sin(one) * math.cos(two) + math.cos(one) * math.sin(two),
    )


def assert_turned(table: tuple[Any, Any], positions: Sequence[int], dim: int, theta: float) -> None:
    for got, part in zip(table, (0, 1), strict=True):
        want = [[turned(p, theta ** (-2.0 * j / dim))[part] for j in range(dim // 2)] for p in positions]
        np.testing.assert_allclose(got[:, 0], want, atol=1e-7, rtol=0)


def check_angles(target: Target, draft: DFlashDraft) -> None:
    """A float32 angle of 200,000 radians is off by 8e-3."""
    for dim, theta in ((64, 1e7), (128, 1e4)):
        assert_turned(Rope(dim, theta).table(np.array(FAR, np.int32)), FAR, dim, theta)


def check_yarn_angles(target: Target, draft: DFlashDraft) -> None:
    yarn = Yarn(4.0, 32768, 1.0)
    table = Rope(64, 1e7, yarn).table(np.array(FAR, np.int32))
    frequencies = yarn.frequencies(64, 1e7)
    want = [[turned(p, float(f))[0] for f in frequencies] for p in FAR]
    np.testing.assert_allclose(table[0][:, 0], want, atol=1e-7, rtol=0)


class Spy:
    """A mixer that keeps what it is given."""

    def __call__(self, x: Any, memory: Any, block: Any) -> Any:
        self.block = block
        return x


def check_positions_of_the_target(target: Target, draft: DFlashDraft) -> None:
    """What the layers get far into a sequence: the positions, and the angles of these."""
    spy = Spy()
    spied = replace(target, layers=(replace(target.layers[0], mixer=spy),))
    at = TargetState(target.config, Float32Attention(Counter()))
    at.layers, at.length = at.layers[:1], 200_000
    spied.forward([1, 2, 3], at)
    assert spy.block.positions.tolist() == [200_000, 200_001, 200_002]
    assert_turned(spy.block.rope_table, [200_000, 200_001, 200_002], target.config.rotary_dim, 1e4)


def check_positions_of_the_draft(target: Target, draft: DFlashDraft) -> None:
    session = draft.session(target, Float32Attention(Counter()))
    session.length = session._projected = 200_000
    session.extend([1], np.ones((1, 3 * 48), np.float32))
    _, table = session._context(4)
    assert_turned(table, [200_000 + i for i in range(5)], 32, 1e4)


def angles_in_float32(self: Rope, positions: Any) -> Any:
    if self.yarn is None:
        frequencies = np.power(self.theta, -np.arange(0, self.dim, 2, dtype=np.float64) / self.dim)
    else:
        frequencies = self.yarn.frequencies(self.dim, self.theta)
    angle = positions.astype(np.float32)[:, None, None] * frequencies.astype(np.float32)
    return np.cos(angle), np.sin(angle)


def frequencies_in_float32(self: Rope, positions: Any) -> Any:
    frequencies = np.power(np.float32(self.theta), -np.arange(0, self.dim, 2, dtype=np.float32) / self.dim)
    angle = positions[:, None, None] * frequencies.astype(np.float64)
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def from_the_first_new_token(self: DFlashSession, rows: int) -> Any:
    context = right_context(self, rows)[0]
    return context, self._rope.table(np.arange(len(context) + rows))


def positions_in_float16(self: Target, tokens: Any, state: Any, **options: Any) -> Any:
    length, state.length = state.length, int(np.float16(min(state.length, 65504)))
    out = right_forward(self, tokens, state, **options)
    state.length = length + len(tokens)
    return out


# ---- the last allowed token --------------------------------------------------------------------------------


def check_a_stop_on_the_last_token(target: Target, draft: DFlashDraft) -> None:
    """The stop is what ended it, not the budget, wherever in a block the last token lies."""
    prompt = PROMPT[:20]
    truth = free(target, prompt, 12)
    assert len(set(truth[:9])) == 9, "the stop must not occur earlier"
    for at in (0, 1, 4, 7, 8):
        stop = [truth[at]]
        for drafting in (None, oracle(target, prompt, 40), oracle(target, prompt, 40, 2)):
            conversation = Engine(target, drafting, kv_format="f32").conversation()
            got = conversation.generate(prompt, at + 1, stop, **(BLOCKS if drafting else {}))
            assert (got.tokens, got.stop_reason, got.repair) == (truth[: at + 1], "stop", "none")
            assert conversation.tokens == (*prompt, *truth[:at])
        # One token less allowed, and it is the budget.
        if at:
            assert Engine(target, kv_format="f32").generate(prompt, at, stop).stop_reason == "length"


def check_a_stop_string_on_the_last_token(target: Target, draft: DFlashDraft) -> None:
    prompt, letters = PROMPT[:20], Letters()
    truth = free(target, prompt, 12)
    for at in (1, 4, 8):
        text = letters.push(truth[at - 1 : at + 1])
        for drafting in (None, oracle(target, prompt, 40)):
            got = Engine(target, drafting, kv_format="f32").generate(
                prompt, at + 1, (), stop_strings=[text], tokenizer=letters, **(BLOCKS if drafting else {})
            )
            assert (got.tokens, got.stop_reason) == (truth[: at + 1], "stop_string")
            assert got.text_end == len(letters.push(truth[: at - 1]))


def check_the_minimum_reaches_to_the_last_token(target: Target, draft: DFlashDraft) -> None:
    """Stops are not produced within the minimum, and are from the token right behind it."""
    prompt = PROMPT[:20]
    stop = list(range(0, 96, 2))
    for count in (1, 4, 9):
        got = Engine(target, oracle(target, prompt, 40), kv_format="f32").generate(
            prompt, count, stop, min_new_tokens=count, speculation="off"
        )
        assert (len(got.tokens), got.stop_reason) == (count, "length")
        assert not set(got.tokens) & set(stop)
    everything_but_one = [token for token in range(96) if token != 7]
    got = Engine(target, kv_format="f32").generate(prompt, 9, everything_but_one, min_new_tokens=3)
    assert (got.tokens[:3], len(got.tokens), got.stop_reason) == ([7, 7, 7], 4, "stop")


def check_the_capacity(target: Target, draft: DFlashDraft) -> None:
    """Prompt and new tokens may fill it exactly; one more is refused."""
    prompt = (PROMPT * 7)[: CAPACITY - 9]
    truth = free(target, prompt, 9)
    drafting = OracleDraft(BLOCK, lambda: BLOCK - 1)
    drafting.sequence = [*prompt, *truth]
    conversation = Engine(target, drafting, kv_format="f32").conversation()
    got = conversation.generate(prompt, 9, (), **BLOCKS)
    assert (got.tokens, got.produced, len(conversation.tokens)) == (truth, [8], CAPACITY - 1)
    for options in ({"prompt_ids": [*prompt, 1]}, {"max_new_tokens": 10}):
        with pytest.raises(InputError, match=f"together at most {CAPACITY}"):
            conversation.generate(**{"prompt_ids": prompt, "max_new_tokens": 9, **options})


def budget_before_stop(self: Generation, tokens: list[int]) -> list[int]:
    got = right_emit(self, tokens)
    if len(self.result.tokens) == self._request.max_new_tokens:
        self.result.stop_reason = "length"
    return got


def stop_not_looked_for_at_the_end(self: Generation, tokens: list[int]) -> list[int]:
    left = self._request.max_new_tokens - len(self.result.tokens)
    if len(tokens) < left:
        return right_emit(self, tokens)
    self.result.tokens += tokens[:left]
    self.result.stop_reason = "length"
    return tokens[:left]


def one_early_token_too_many(self: Generation) -> int:
    return max(0, self._request.min_new_tokens - len(self.result.tokens) + 1)


def one_early_token_too_few(self: Generation) -> int:
    return max(0, self._request.min_new_tokens - len(self.result.tokens) - 1)


def one_more_than_fits(self: Limits, prompt_ids: Any, max_new_tokens: int) -> Any:
    return right_prompt(
        replace(self, target=replace(self.target, max_positions=CAPACITY + 1)), prompt_ids, max_new_tokens
    )


def one_less_than_fits(self: Limits, prompt_ids: Any, max_new_tokens: int) -> Any:
    return right_prompt(
        replace(self, target=replace(self.target, max_positions=CAPACITY - 1)), prompt_ids, max_new_tokens
    )


# ---- realigning far behind a checkpoint --------------------------------------------------------------------


def check_realigned_far_behind_a_checkpoint(target: Target, draft: DFlashDraft) -> None:
    """More than one pass of rows lies between the checkpoint and where the request goes on."""
    prompt = PROMPT[:20]
    count = 2 * BLOCK_ROWS + 13
    for checkpoints, begin in ((8, len(prompt)), (0, 0)):
        conversation = Engine(target, oracle(target, prompt, 130), kv_format="f32").conversation(
            checkpoints=checkpoints
        )
        generation = conversation.stream(prompt, 120, (), **BLOCKS)
        while len(generation.result.tokens) < count:
            part = next(generation)
        generation.truncate(len(part) - 3, resume=True)
        result = generation.result
        used = [*prompt, *result.tokens[:-1]]
        assert len(used) - len(prompt) > 2 * BLOCK_ROWS
        assert (result.repair, result.replayed_tokens) == ("realigned", len(used) - begin)
        assert conversation.tokens == tuple(used)
        assert_covers(target, generation.state, used)
        for _ in generation:
            pass
        assert result.tokens == free(target, prompt, 120)
        assert_covers(target, generation.state, [*prompt, *result.tokens[:-1]])


def passes_that_are_products(self: WarmState, tokens: Sequence[int], prompt: int) -> int:
    begin = self.align(tokens)
    for _ in self.prefill(tokens):
        pass
    return len(tokens) - begin


def one_pass_alone(self: WarmState, tokens: Sequence[int], prompt: int) -> int:
    begin = self.align(tokens)
    for _ in self.prefill(tokens[:prompt]):
        pass
    self._process(tokens[len(self.tokens) : len(self.tokens) + BLOCK_ROWS])
    return len(tokens) - begin


def tokens_not_counted(self: WarmState, tokens: Sequence[int], prompt: int) -> int:
    return min(right_refill(self, tokens, prompt), BLOCK_ROWS)


# ---- the context cap ---------------------------------------------------------------------------------------


def check_the_context_cap(target: Target, draft: DFlashDraft) -> None:
    """A draft is asked at exactly so many keys, and not at one more."""
    for cap in (40, 44, 45):
        asked: list[int] = []
        with pytest.MonkeyPatch.context() as patch, policy.override(draft_ctx_cap=cap):
            propose = DFlashSession.propose

            def counted(session: Any, anchor: int, rows: int, propose: Any = propose, asked: Any = asked) -> list[int]:
                asked.append(session.length)
                return [t + 1 if t < 95 else 0 for t in propose(session, anchor, rows)]  # about none is kept

            patch.setattr(DFlashSession, "propose", counted)
            got = Engine(target, draft, kv_format="f32").generate(PROMPT, 12, (), **BLOCKS)
        lengths = [40 + sum(got.produced[:n]) for n in range(got.cycles)]
        assert asked == [length for length in lengths[:-1] if length <= cap]
        assert cap in asked
        assert got.capped_cycles == sum(length > cap for length in lengths)
        assert got.tokens == free(target, PROMPT, 12)


def capped_one_early(self: Generation, rows: int) -> Any:
    session = self._warm.session
    if session is None or session.max_context is None:
        return right_plan(self, rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "max_context", session.max_context - 1)
        return right_plan(self, rows)


def capped_one_late(self: Generation, rows: int) -> Any:
    session = self._warm.session
    if session is None or session.max_context is None:
        return right_plan(self, rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "max_context", session.max_context + 1)
        return right_plan(self, rows)


# ---- passes of exactly their size --------------------------------------------------------------------------


def check_passes_of_exactly_their_size(target: Target, draft: DFlashDraft) -> None:
    """Prompts around the rows of a pass: every token is processed once, and the draft is told of it once."""
    passes: list[int] = []

    def forward(self: Target, tokens: Sequence[int], *args: Any, **options: Any) -> Any:
        passes.append(len(tokens))
        return right_forward(self, tokens, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Target, "forward", forward)
        patch.setattr(state, "PREFILL_ROWS", 16)
        patch.setattr(dflash, "_PENDING_ROWS", 16)
        for length in (15, 16, 17, 31, 32, 33, 24, 40):
            conversation = Engine(target, draft, kv_format="f32").conversation()
            got = conversation.generate(PROMPT[:length], 5, (), **BLOCKS)
            assert max(passes) <= 16
            assert got.tokens == free(target, PROMPT[:length], 5)
            session = conversation._warm.session
            assert session is not None
            assert (got.prefill_tokens, session.length) == (length, length + 4)


def the_end_left_out(begin: int, end: int, rows: int, tail: int = 0) -> list[int]:
    ends = right_ends(begin, end, rows, tail)
    return ends if (end - tail - begin) % rows else ends[:-1]


def a_pass_skipped(begin: int, end: int, rows: int, tail: int = 0) -> list[int]:
    return [at for at in right_ends(begin, end, rows, tail) if at == end or (at - begin) % rows]


def pending_forgotten(self: DFlashSession, tokens: Sequence[int], taps: Any) -> None:
    right_extend(self, tokens, taps)
    if self.length % 16 == 0:
        self.length -= 1


# ---- text_end and stop strings after truncate --------------------------------------------------------------


def stopped(target: Target, first: int, last: int) -> tuple[Generation, list[int], Letters]:
    """A request that a stop string ended, which its new tokens first..last spell; one block gave them all."""
    prompt, letters = PROMPT[:20], Letters()
    truth = free(target, prompt, 40)
    engine = Engine(target, oracle(target, prompt, 60), kv_format="f32")
    text = letters.push(truth[first : last + 1])
    generation = engine.stream(prompt, 30, (), stop_strings=[text], tokenizer=letters, **BLOCKS)
    assert list(generation) == [truth[:1], truth[1 : last + 1]]
    found = (generation.result.stop_reason, generation.result.text_end)
    assert found == ("stop_string", len(letters.push(truth[:first])))
    return generation, truth, letters


def check_text_end_after_truncate(target: Target, draft: DFlashDraft) -> None:
    """Tokens that are given back take the stop string and where it was with them; all of them kept, it stays."""
    generation, truth, letters = stopped(target, 4, 6)
    generation.truncate(6)
    kept = (generation.result.stop_reason, generation.result.text_end, generation.result.tokens)
    assert kept == ("stop_string", len(letters.push(truth[:4])), truth[:7])
    generation.truncate(4)
    kept = (generation.result.stop_reason, generation.result.text_end, generation.result.tokens)
    assert kept == ("caller", None, truth[:5])


def check_stop_strings_after_truncate(target: Target, draft: DFlashDraft) -> None:
    """Going on from inside the string, or from before it, finds it again, at the same place."""
    for kept in (1, 3, 4, 5):
        generation, truth, letters = stopped(target, 4, 6)
        generation.truncate(kept, resume=True)
        assert (generation.result.stop_reason, generation.result.text_end) == (None, None)
        for _ in generation:
            pass
        assert (generation.result.tokens, generation.result.stop_reason) == (truth[:7], "stop_string")
        assert generation.result.text_end == len(letters.push(truth[:4]))


def check_a_stop_after_truncate(target: Target, draft: DFlashDraft) -> None:
    """Going on from before a stop token finds that again too, and the budget counts what is kept alone."""
    prompt = PROMPT[:20]
    truth = free(target, prompt, 40)
    for stop, reason in (([truth[6]], "stop"), ((), "length")):
        generation = Engine(target, oracle(target, prompt, 60), kv_format="f32").stream(prompt, 7, stop, **BLOCKS)
        assert [len(part) for part in generation] == [1, 6]
        generation.truncate(2, resume=True)
        assert generation.result.stop_reason is None
        for _ in generation:
            pass
        assert (generation.result.tokens, generation.result.stop_reason) == (truth[:7], reason)
        assert sum(generation.result.produced) + 1 == 7


def text_end_kept(self: Generation, count: int, resume: bool) -> None:
    end = self.result.text_end
    right_drop(self, count, resume)
    self.result.text_end = end


def stop_strings_not_restarted(self: StopStrings, tokens: Sequence[int]) -> StopStrings:
    return self


def stop_strings_restarted_empty(self: StopStrings, tokens: Sequence[int]) -> StopStrings:
    return StopStrings(self._strings, self._tokenizer)


def produced_kept(self: Generation, count: int, resume: bool) -> None:
    produced = self.result.produced[-1]
    right_drop(self, count, resume)
    self.result.produced[-1] = produced


# ---- all of it ---------------------------------------------------------------------------------------------

right_context, right_extend = DFlashSession._context, DFlashSession.extend
right_forward, right_refill, right_prompt = Target.forward, WarmState.refill, Limits.prompt
right_emit, right_plan, right_drop = Generation._emit, Generation._plan, Generation._drop
right_ends = state.chunk_ends

Check = Callable[[Target, DFlashDraft], None]
FAULTS: dict[Check, list[tuple[Any, str, Any]]] = {
    check_angles: [(Rope, "table", angles_in_float32), (Rope, "table", frequencies_in_float32)],
    check_yarn_angles: [(Rope, "table", angles_in_float32)],
    check_positions_of_the_target: [
        (Rope, "table", angles_in_float32),
        (Target, "forward", positions_in_float16),
    ],
    check_positions_of_the_draft: [
        (Rope, "table", angles_in_float32),
        (DFlashSession, "_context", from_the_first_new_token),
    ],
    check_a_stop_on_the_last_token: [
        (Generation, "_emit", budget_before_stop),
        (Generation, "_emit", stop_not_looked_for_at_the_end),
    ],
    check_a_stop_string_on_the_last_token: [
        (Generation, "_emit", budget_before_stop),
        (Generation, "_emit", stop_not_looked_for_at_the_end),
    ],
    check_the_minimum_reaches_to_the_last_token: [
        (Generation, "_early", one_early_token_too_many),
        (Generation, "_early", one_early_token_too_few),
    ],
    check_the_capacity: [(Limits, "prompt", one_more_than_fits), (Limits, "prompt", one_less_than_fits)],
    check_realigned_far_behind_a_checkpoint: [
        (WarmState, "refill", passes_that_are_products),
        (WarmState, "refill", one_pass_alone),
        (WarmState, "refill", tokens_not_counted),
    ],
    check_the_context_cap: [(Generation, "_plan", capped_one_early), (Generation, "_plan", capped_one_late)],
    check_passes_of_exactly_their_size: [
        (state, "chunk_ends", the_end_left_out),
        (state, "chunk_ends", a_pass_skipped),
        (DFlashSession, "extend", pending_forgotten),
    ],
    check_text_end_after_truncate: [(Generation, "_drop", text_end_kept)],
    check_stop_strings_after_truncate: [
        (Generation, "_drop", text_end_kept),
        (StopStrings, "restarted", stop_strings_not_restarted),
        (StopStrings, "restarted", stop_strings_restarted_empty),
    ],
    check_a_stop_after_truncate: [(Generation, "_drop", produced_kept)],
}


@pytest.mark.parametrize("check", FAULTS, ids=lambda check: check.__name__)
def test_right(target: Target, draft: DFlashDraft, check: Check) -> None:
    check(target, draft)


@pytest.mark.parametrize(
    ("check", "fault"),
    [(check, fault) for check, faults in FAULTS.items() for fault in faults],
    ids=lambda value: value[2].__name__ if isinstance(value, tuple) else value.__name__,
)
def test_fault_is_caught(
    target: Target, draft: DFlashDraft, check: Check, fault: tuple[Any, str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*fault)
    with pytest.raises((AssertionError, pytest.fail.Exception, InputError, ValueError, RuntimeError)):
        check(target, draft)
