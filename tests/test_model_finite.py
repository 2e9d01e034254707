"""Numbers that are not finite: an error that names the position where a token depends on them, a count in a draft."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from model_lab import (
    BLOCKS,
    DRAFT,
    PROMPT,
    TARGET,
    OracleDraft,
    changed,
    draft_tensors,
    target_tensors,
    write_checkpoint,
)

from hipfire_kernels import HipfireError, NumericsError
from hipfire_kernels.cli import app
from hipfire_kernels.model import Engine, load_draft, load_target, loop
from hipfire_kernels.model.dflash import DFlashDraft, DFlashSession
from hipfire_kernels.model.layers import first_broken_row, rms_norm
from hipfire_kernels.model.qwen35 import Target

BLOCK = 8
SAMPLED = {"temperature": 1.0, "seed": 5, "top_k": 20, "top_p": 0.9}
MODES: list[dict[str, Any]] = [{}, SAMPLED]
BAD = [np.nan, np.inf, -np.inf]
FORWARD = Target.forward


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_target(write_checkpoint(tmp_path_factory.mktemp("target"), TARGET, target_tensors(TARGET)))


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> DFlashDraft:
    return load_draft(write_checkpoint(tmp_path_factory.mktemp("draft"), DRAFT, draft_tensors(DRAFT)))


def spoil(patch: pytest.MonkeyPatch, value: float, position: int) -> None:
    """The logits that decide this position hold `value` at id 7."""

    def forward(self: Target, tokens: Sequence[int], state: Any, **options: Any) -> Any:
        begin = state.length
        out = FORWARD(self, tokens, state, **options)
        first = begin + 1 if options.get("all_logits") else begin + len(tokens)
        if 0 <= position - first < len(out.logits):
            out.logits[position - first, 7] = value
        return out

    patch.setattr(Target, "forward", forward)


def plain(target: Target, count: int, **options: Any) -> list[int]:
    return Engine(target, kv_format="f32").generate(PROMPT, count, stop=(), **options).tokens


# ---- what a token depends on -------------------------------------------------------------------------------


@pytest.mark.parametrize("options", MODES)
@pytest.mark.parametrize(("new", "value"), list(zip([0, 1, 5], BAD, strict=True)))
@pytest.mark.parametrize("accepted", [None, 0, BLOCK - 1])
def test_logits_that_decide_a_token_are_an_error_with_its_position(
    target: Target,
    accepted: int | None,
    new: int,
    value: float,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    truth = plain(target, 20, **options)
    draft = None
    if accepted is not None:
        draft = OracleDraft(BLOCK, lambda: accepted)
        draft.sequence = [*PROMPT, *truth]
    conversation = Engine(target, draft, kv_format="f32").conversation()
    trace = io.StringIO()
    generation = conversation.stream(PROMPT, 20, stop=(), trace=trace, **options, **(BLOCKS if draft else {}))
    with monkeypatch.context() as patch:
        spoil(patch, value, len(PROMPT) + new)
        with pytest.raises(
            NumericsError, match=rf"logits for position {40 + new} .* hold -?(nan|inf) at token id 7, 1"
        ):
            for _ in generation:
                pass
    # As for any failure: what was out is right, the state is given up, the next request is cold and right.
    result = generation.result
    assert result.stop_reason == "failed"
    assert result.tokens == truth[: len(result.tokens)]
    assert len(result.tokens) <= new
    assert next(generation, None) is None
    assert conversation.tokens == ()
    assert json.loads(trace.getvalue().splitlines()[-1])["stop_reason"] == "failed"
    again = conversation.generate(PROMPT, 20, stop=(), **options, speculation="off")
    assert (again.tokens, again.cached_prefix) == (truth, 0)


@pytest.mark.parametrize("options", MODES)
@pytest.mark.parametrize(("row", "value"), list(zip(range(2, BLOCK), BAD * 2, strict=True)))
def test_a_row_behind_a_refused_draft_decides_nothing(
    target: Target, row: int, value: float, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One draft of the block is right, so its rows 0 and 1 are used. Plain decoding never has the others."""
    truth = plain(target, 12, **options)
    draft = OracleDraft(BLOCK, lambda: 1)
    draft.sequence = [*PROMPT, *truth]
    engine = Engine(target, draft, kv_format="f32")
    generation = engine.stream(PROMPT, 12, stop=(), **options, **BLOCKS)
    assert next(generation) == truth[:1]
    with monkeypatch.context() as patch:
        spoil(patch, value, 41 + row)
        assert next(generation) == truth[1:3]
    for _ in generation:
        pass
    assert generation.result.tokens == truth


def test_every_row_of_a_block_that_is_used_is_looked_at(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    truth = plain(target, 12)
    for row in range(BLOCK):
        for accepted in range(BLOCK):
            draft = OracleDraft(BLOCK, lambda accepted=accepted: accepted)  # type: ignore[misc]
            draft.sequence = [*PROMPT, *truth]
            generation = Engine(target, draft, kv_format="f32").stream(PROMPT, 12, stop=(), **BLOCKS)
            next(generation)
            with monkeypatch.context() as patch:
                spoil(patch, np.nan, 41 + row)
                if row <= accepted:
                    with pytest.raises(NumericsError, match=f"position {41 + row} "):
                        next(generation)
                else:
                    assert next(generation) == truth[1 : 2 + accepted]


def test_stop_tokens_that_are_masked_are_no_fault(target: Target) -> None:
    for options in MODES:
        got = Engine(target, kv_format="f32").generate(PROMPT, 9, stop=range(0, 96, 2), min_new_tokens=9, **options)
        assert len(got.tokens) == 9


def test_an_error_reaches_a_task(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async for _ in Engine(target, kv_format="f32").stream(PROMPT, 9, stop=()):
            pass

    spoil(monkeypatch, np.nan, 44)
    with pytest.raises(NumericsError, match="position 44"):
        asyncio.run(run())


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("at", [3, 42])
def test_keys_that_no_code_holds_are_an_error_with_their_position(
    target: Target, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under Q8_0 the layers end at the first cache. The token at `at` has no number for an embedding."""
    tokens = [*PROMPT, *Engine(target).generate(PROMPT, 9, stop=()).tokens]
    spoilt = target.embedding.copy()
    spoilt[tokens[at]] = np.nan
    first = tokens.index(tokens[at])
    monkeypatch.setitem(target.__dict__, "embedding", spoilt)
    conversation = Engine(target).conversation()
    generation = conversation.stream(PROMPT, 9, stop=())
    with pytest.raises(NumericsError, match=f"the keys of position {first} hold NaN"):
        list(generation)
    assert (generation.result.stop_reason, conversation.tokens) == ("failed", ())


def test_the_error_is_of_the_librarys_tree() -> None:
    assert issubclass(NumericsError, HipfireError)
    assert not issubclass(NumericsError, ValueError)


def test_generate_ends_with_the_message_and_code_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Target, "head", lambda self, hidden: np.full((len(hidden), 4096), np.nan, np.float32))
    for line in (("generate", "--prompt", "x", "--no-draft"), ("demo", "--no-draft")):
        with pytest.raises(SystemExit) as ended:
            app([*line, "--kv-format", "f32", "--json"], prog_name="hfk")
        seen = capsys.readouterr()
        assert ended.value.code == 1
        assert json.loads(seen.out)["error"]["kind"] == "NumericsError"
        assert "Traceback" not in seen.err


@pytest.mark.parametrize("as_json", [True, False])
def test_generate_tells_of_proposals_that_were_no_numbers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    monkeypatch.setattr(DFlashSession, "_head", broken_head(np.nan, lambda call: call % 2 == 0))
    line = ["demo", "--kv-format", "f32", "--max-new-tokens", "12", *(["--json"] if as_json else [])]
    with pytest.raises(SystemExit):
        app(line, prog_name="hfk")
    out = capsys.readouterr().out
    if as_json:
        found = json.loads(out)
        assert found["draft_faults"] > 0
        assert "the draft's logits for position" in found["fallback"]
    else:
        assert " cycles: the draft's logits for position" in out


# ---- what a draft proposes from ----------------------------------------------------------------------------


def broken_head(value: float, cycles: Callable[[int], bool]) -> Callable[..., Any]:
    """A head of the draft that gives `value` in those of its blocks, counted from 0."""
    calls: list[int] = []
    head = DFlashSession._head

    def broken(self: DFlashSession, hidden: np.ndarray) -> Any:
        calls.append(len(hidden))
        if cycles(len(calls) - 1):
            hidden = hidden.copy()
            hidden[-1, 3] = value
        return head(self, hidden)

    return broken


@pytest.mark.parametrize("options", MODES)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_proposals_from_no_numbers_are_counted_with_the_reason(
    target: Target,
    draft: DFlashDraft,
    value: float,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine, trace = Engine(target, draft, kv_format="f32"), io.StringIO()
    monkeypatch.setattr(DFlashSession, "_head", broken_head(value, lambda call: call % 2 == 1))
    with caplog.at_level(logging.WARNING):
        got = engine.generate(PROMPT, 24, stop=(), trace=trace, **options, **BLOCKS)
    cycles = [json.loads(line) for line in trace.getvalue().splitlines()[1:-1]]
    assert got.tokens == plain(target, 24, **options)
    assert got.draft_faults == [cycle["drafted"] for cycle in cycles].count(0) > 2
    assert sum(got.block_sizes.values()) + got.draft_faults + (cycles[-1]["block"] == 1) >= got.cycles
    assert "draft's logits for position" in str(got.fallback)
    assert [record.getMessage() for record in caplog.records] == [got.fallback]


def test_a_draft_without_any_numbers_leaves_plain_decoding(
    target: Target, draft: DFlashDraft, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In "auto" it is asked seldom; the state stays exact, and once there are numbers it drafts again."""
    conversation = Engine(target, draft, kv_format="f32").conversation()
    with monkeypatch.context() as patch:
        patch.setattr(DFlashSession, "_head", broken_head(np.nan, lambda call: True))
        patch.setattr(loop, "perf_counter", iter(np.arange(0.0, 4000.0)).__next__)
        for mode in ("auto", "on"):
            got = conversation.generate(PROMPT, 100, stop=(), speculation=mode)
            assert got.tokens == plain(target, 100)
            assert got.draft_faults == (99 if mode == "on" else 1)
            assert (got.probes, got.block_sizes) == (0, {})
    again = conversation.generate(PROMPT, 20, stop=(), **BLOCKS)
    want = Engine(target, draft, kv_format="f32").generate(PROMPT, 20, stop=(), **BLOCKS)
    assert (again.tokens, again.accepted, again.draft_faults, again.fallback) == (want.tokens, want.accepted, 0, None)


def test_a_cap_makes_no_number_of_infinity(tmp_path: Any, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    config = changed(DRAFT, dflash_config={**DRAFT["dflash_config"], "final_logit_softcapping": 30.0})
    capped = load_draft(write_checkpoint(tmp_path, config, draft_tensors(config)))
    monkeypatch.setattr(Target, "head", lambda self, hidden: np.full((len(hidden), 96), np.inf, np.float32))
    session = capped.session(target, Engine(target, kv_format="f32").conversation()._warm.attention)
    session.extend([1, 2], np.zeros((2, 3 * 48), np.float32))
    with pytest.raises(NumericsError, match="draft's logits for position 3 "):
        session.propose(5, 8)


# ---- the pieces --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", BAD)
def test_first_broken_row(value: float) -> None:
    x = np.random.default_rng(0).standard_normal((6, 3, 5)).astype(np.float32)
    assert first_broken_row(x) is None
    for row in (5, 2):
        x[row, 1, 4] = value
        assert first_broken_row(x) == row
    x[3] = -value  # infinities of both signs cancel in no sum
    assert first_broken_row(x) == 2


def test_large_finite_numbers_are_not_broken() -> None:
    assert first_broken_row(np.full((4, 9), 3e38, np.float32)) is None


@pytest.mark.parametrize("size", [1e19, 1e30, 3e38])
def test_the_norm_of_a_row_whose_squares_overflow_is_right(size: float) -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (3, 64)).astype(np.float32)
    x[1] *= np.float32(size)
    scale = rng.uniform(0.5, 2, 64).astype(np.float32)
    wide = x.astype(np.float64)
    want = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * scale
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(rms_norm(x, scale, 1e-6), want, rtol=2e-6)
        x[1, 2] = np.nan
        assert np.isnan(rms_norm(x, scale, 1e-6)[1]).all()
