"""What controls speculation: auto, on and off, adaptive blocks, drafts that do not load, n-grams. No token changes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_lab import (
    BLOCKS,
    DRAFT,
    PROMPT,
    TARGET,
    OracleDraft,
    OracleSession,
    changed,
    draft_tensors,
    target_tensors,
    write_checkpoint,
)
from pace_lab import Clock

from hipfire_kernels import CheckpointError, InputError
from hipfire_kernels.model import Engine, GenerationResult, NgramDraft, load_draft, load_target, loop
from hipfire_kernels.model.qwen35 import Target
from hipfire_kernels.model.state import WarmState

BLOCK, COUNT = 8, 160


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_target(write_checkpoint(tmp_path_factory.mktemp("target"), TARGET, target_tensors(TARGET)))


@pytest.fixture(scope="module")
def truth(target: Target) -> list[int]:
    return plain(target, PROMPT, 200)


def plain(target: Target, prompt: list[int], count: int, **options: Any) -> list[int]:
    return Engine(target, kv_format="f32").generate(prompt, count, stop=(), **options).tokens


class Oracle(OracleDraft):
    """Knows what comes and gets so many proposals right, the pattern over and over. `asked`: rows of its blocks."""

    def __init__(self, sequence: list[int], *pattern: int) -> None:
        self.asked: list[int] = []
        super().__init__(BLOCK, lambda: pattern[(len(self.asked) - 1) % len(pattern)])
        self.sequence = sequence


def oracle(target: Target, truth: list[int], *pattern: int) -> Engine:
    return Engine(target, Oracle([*PROMPT, *truth], *pattern), kv_format="f32")


def asked(engine: Engine) -> list[int]:
    assert isinstance(engine.draft, Oracle)
    return engine.draft.asked


@pytest.fixture(autouse=True)
def _counted(monkeypatch: pytest.MonkeyPatch) -> None:
    propose = OracleSession.propose

    def proposed(session: Any, anchor: int, rows: int) -> list[int]:
        session._draft.asked.append(rows)
        return propose(session, anchor, rows)

    monkeypatch.setattr(OracleSession, "propose", proposed)


def run(engine: Engine, clock: Clock, **options: Any) -> tuple[GenerationResult, float]:
    """A request, and its time as a multiple of plain decoding's."""
    began = clock.now
    got = engine.generate(PROMPT, COUNT, stop=(), **options)
    return got, (clock.now - began) / (COUNT - 1)


# ---- auto, on, off -----------------------------------------------------------------------------------------


def test_a_useless_draft_is_retired_by_auto_alone(
    target: Target, truth: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, draft=1.3, row=0.3)
    seen = {}
    for mode in ("auto", "on", "off"):
        engine = oracle(target, truth, 0)
        seen[mode], slower = run(engine, clock, speculation=mode)
        assert seen[mode].tokens == truth[:COUNT]
        if mode == "auto":
            assert 1 < slower <= 1.05
            assert len(asked(engine)) == seen[mode].probes == 2
        elif mode == "on":
            assert slower > 2
            assert len(asked(engine)) == seen[mode].cycles
        else:
            assert slower == 1
            assert asked(engine) == []
    counts = [(got.retired_cycles, got.probes, sum(got.block_sizes.values())) for got in seen.values()]
    assert counts == [(COUNT - 1, 2, 0), (0, 0, COUNT - 1), (0, 0, 0)]


def test_a_good_draft_is_used_by_auto(target: Target, truth: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, draft=0.1, row=0.01)
    engine = oracle(target, truth, 7)
    first, one = run(engine, clock)
    second, two = run(engine, clock)
    best, on = run(oracle(target, truth, 7), clock, speculation="on")
    assert first.tokens == second.tokens == best.tokens == truth[:COUNT]
    # The first request of an engine has to find out what rows cost; the next one knows.
    assert on < two < one < 0.5
    assert two < 0.25
    assert 3 < second.retired_cycles <= first.retired_cycles < 12
    assert second.block_sizes[BLOCK] > 10


def test_projecting_the_prompt_may_take_its_share_of_the_prefill(
    target: Target, truth: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, prefill, propose = Clock(monkeypatch, draft=1.0, row=0.3), WarmState.prefill, OracleSession.propose

    def prefilled(warm: WarmState, *args: Any) -> Any:
        clock.now += 100
        return prefill(warm, *args)

    def projecting(session: Any, anchor: int, rows: int) -> list[int]:
        clock.now += 0 if session._draft.asked else 2.5
        return propose(session, anchor, rows)

    monkeypatch.setattr(WarmState, "prefill", prefilled)
    monkeypatch.setattr(OracleSession, "propose", projecting)
    engine = oracle(target, truth, 0)
    for _ in range(2):
        engine._prices.note_draft(1.0)
    got, _ = run(engine, clock)
    assert got.probes == 2
    assert engine._prices.draft == 1


def test_auto_leaves_a_draft_that_fails_and_comes_back(
    target: Target, truth: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, draft=0.1, row=0.02)
    got, slower = run(oracle(target, truth, *[7] * 5, *[0] * 24, *[7] * 40), clock)
    assert got.tokens == truth[:COUNT]
    assert slower < 0.6
    good = [a > 0 for a in got.accepted]
    bad = good.index(False, good.index(True))
    assert True in good[bad:]
    assert got.probes > 1


def test_the_mode_of_each_request_of_a_conversation(
    target: Target, truth: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    Clock(monkeypatch, draft=0.02, row=0.02)
    engine = oracle(target, truth, 3)
    engine._prices.fund = 4.0  # else requests this short would only earn finding out
    conversation, history = engine.conversation(), list(PROMPT)
    for turn, mode in enumerate(("off", "auto", "on", "auto", "off", "on")):
        asked(engine).clear()
        got = conversation.generate(history, 20, stop=(), speculation=mode)
        assert got.tokens == truth[len(history) - len(PROMPT) :][:20]
        assert got.cached_prefix == (len(history) - 1 if turn else 0)
        history += got.tokens
        assert bool(asked(engine)) == (mode != "off")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("seed", range(12))
def test_whatever_the_times_are_the_tokens_are_those_of_plain_decoding(
    target: Target, seed: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(seed)
    options: dict[str, Any] = {"temperature": temperature, "seed": seed, "top_k": 8}
    prompt = PROMPT[: int(rng.integers(1, 41))]
    want = plain(target, prompt, 60, **options)
    draft = Oracle([*prompt, *want], *(int(a) for a in rng.integers(0, BLOCK, 9)))
    engine = Engine(target, draft, kv_format="f32")
    times = np.cumsum(rng.exponential(1.0, 1000) * rng.choice([0.1, 1, 20], 1000)).tolist()
    monkeypatch.setattr(loop, "perf_counter", lambda: times.pop(0))
    mode = ["auto", "auto", "on"][seed % 3]
    got = engine.generate(prompt, 60, stop=(), speculation=mode, adaptive_b=bool(seed % 2), **options)
    assert got.tokens == want
    assert sum(got.produced) + 1 == 60


# ---- adaptive blocks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["auto", "on"])
def test_adaptive_b_verifies_fewer_rows_of_whole_blocks(
    target: Target, truth: list[int], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, draft=0.02, row=0.02)
    seen = {}
    for adaptive in (True, False):
        engine = oracle(target, truth, 1, 2, 1)
        seen[adaptive], _ = run(engine, clock, speculation=mode, adaptive_b=adaptive)
        assert seen[adaptive].tokens == truth[:COUNT]
        # The draft always gets its own block size, but for the budget.
        assert set(asked(engine)[:-7]) == {BLOCK}
    assert set(seen[False].block_sizes) <= {BLOCK, *range(2, 8)}
    assert seen[False].block_sizes[BLOCK] > 30
    assert max(seen[True].block_sizes, key=lambda rows: seen[True].block_sizes[rows]) == 3
    assert seen[True].block_sizes[BLOCK] < 10


# ---- a draft that cannot be had ----------------------------------------------------------------------------


def missing(folder: Path) -> Callable[[], Any]:
    return lambda: load_draft(folder / "nowhere")


def unpaired(folder: Path) -> Callable[[], Any]:
    config = changed(DRAFT, num_target_layers=8)
    return lambda: load_draft(write_checkpoint(folder, config, draft_tensors(config)))


@pytest.mark.parametrize(
    ("loader", "message"), [(missing, "nowhere"), (unpaired, "num_target_layers: the draft has 8")]
)
def test_a_draft_that_cannot_be_loaded(
    tmp_path: Path,
    target: Target,
    truth: list[int],
    loader: Callable[[Path], Any],
    message: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        engine = Engine(target, loader(tmp_path), kv_format="f32")
    assert message in caplog.text
    for opened in (engine, engine.conversation()):
        with pytest.raises(CheckpointError, match=rf"speculation is 'on': the draft cannot be used: .*{message}"):
            opened.generate(PROMPT, 9, stop=(), speculation="on")
        for options in ({}, {"block_size": 4}):
            got = opened.generate(PROMPT, 9, stop=(), **options)
            assert got.tokens == truth[:9]
            assert message in str(got.fallback)
        assert opened.generate(PROMPT, 9, stop=(), speculation="off").fallback is None


def test_a_loaded_draft_is_no_fallback(tmp_path: Path, target: Target, truth: list[int]) -> None:
    folder = write_checkpoint(tmp_path, DRAFT, draft_tensors(DRAFT))
    engine = Engine(target, lambda: load_draft(folder), kv_format="f32")
    got = engine.generate(PROMPT, 20, stop=(), **BLOCKS)
    assert (got.tokens, got.fallback) == (truth[:20], None)
    assert got.block_sizes[BLOCK] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculation": "always"}, "speculation is 'always'; legal are 'auto', 'on', 'off'"),
        ({"speculation": "on", "block_size": 1}, "speculation is 'on' and block_size is 1"),
    ],
)
def test_refused_modes(target: Target, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        oracle(target, [], 0).generate(PROMPT, 9, **options)


def test_on_needs_a_draft(target: Target) -> None:
    with pytest.raises(
        InputError, match=r"speculation is 'on', but this engine has no draft; give it one \(NgramDraft"
    ):
        Engine(target, kv_format="f32").generate(PROMPT, 9, speculation="on")


# ---- n-grams -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["auto", "on"])
@pytest.mark.parametrize("kv_format", ["f32", "q8_0"])
def test_a_target_without_a_draft_speculates(target: Target, kv_format: str, mode: str) -> None:
    """The second turn asks for what the first one said; its beginning is repeated, so what follows is known."""
    engine = Engine(target, NgramDraft(), kv_format=kv_format)
    bare = Engine(target, kv_format=kv_format)
    conversation, twin = engine.conversation(), bare.conversation()
    prompt = PROMPT * 2
    for _ in range(2):
        got = conversation.generate(prompt, 40, stop=(), speculation=mode)
        want = twin.generate(prompt, 40, stop=())
        assert got.tokens == want.tokens
        assert got.cached_prefix == want.cached_prefix
        prompt = [*prompt, *got.tokens, *prompt[-3:]]
    assert engine.draft == NgramDraft()


def test_n_grams_are_right_where_text_repeats(target: Target) -> None:
    """A target that repeats its prompt, by way of its logits."""
    period = PROMPT[:10]
    truth = [period[i % 10] for i in range(200)]

    def logits(warm: WarmState, anchor: int, drafts: list[int]) -> Any:
        rows = verify(warm, anchor, drafts)
        at = len(warm.tokens) + 1
        rows[:] = 0.0
        rows[np.arange(len(rows)), truth[at : at + len(rows)]] = 1.0
        return rows

    verify = WarmState.verify
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WarmState, "verify", logits)
        engine = Engine(target, NgramDraft(block_size=6), kv_format="f32")
        first = plain(target, truth[:30], 1)[0]
        truth[30] = first
        got = engine.generate(truth[:30], 61, stop=(), speculation="on")
    assert got.tokens == truth[30:91]
    assert got.block_sizes[6] >= 8
    assert got.accepted.count(5) >= 8
