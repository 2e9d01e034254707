"""Conversations in use: refusals that harm nothing, cancelling, errors, threads, asyncio."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from model_lab import BLOCKS, DRAFT, PROMPT, TARGET, draft_tensors, target_tensors, write_checkpoint

from hipfire_kernels import CheckpointError, InputError
from hipfire_kernels.model import Conversation, Engine, Tokenizer, demo_pair_path, load_draft, load_target
from hipfire_kernels.model.dflash import DFlashDraft, DFlashSession
from hipfire_kernels.model.qwen35 import Target
from hipfire_kernels.model.stopping import StopStrings


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_target(write_checkpoint(tmp_path_factory.mktemp("target"), TARGET, target_tensors(TARGET)))


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> DFlashDraft:
    return load_draft(write_checkpoint(tmp_path_factory.mktemp("draft"), DRAFT, draft_tensors(DRAFT)))


@pytest.fixture
def engine(target: Target, draft: DFlashDraft) -> Engine:
    return Engine(target, draft, kv_format="f32")


def cold(engine: Engine, prompt: Sequence[int], count: int) -> list[int]:
    return engine.generate(list(prompt), count, stop=(), block_size=1).tokens


def assert_next_turn(conversation: Conversation, engine: Engine, cached: int | None = None) -> None:
    """The next turn is right; it is warm up to all that is resident, or to `cached`."""
    prompt = [*(conversation.tokens or PROMPT[:9]), 17, 4]
    got = conversation.generate(prompt, 12, stop=(), **BLOCKS)
    assert got.tokens == cold(engine, prompt, 12)
    assert got.cached_prefix == (len(prompt) - 2 if cached is None else cached)


# Bad input.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_ids": []}, "prompt_ids is empty"),
        ({"prompt_ids": [96]}, r"prompt_ids\[0\] is 96"),
        ({"prompt_ids": [1] * 250}, r"250 tokens and max_new_tokens is 12; .*256"),
        ({"stop": [-1]}, r"stop\[0\] is -1; token ids of this target go from 0 to 95"),
        ({"stop": [5, 96]}, r"stop\[1\] is 96"),
        ({"temperature": -0.5}, "temperature is -0.5"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"block_size": 9}, "block_size is 9"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"min_new_tokens": 13}, "min_new_tokens is 13"),
        ({"stop_strings": "x"}, "stop_strings is 'x'"),
        ({"stop_strings": ["x"]}, "tokenizer is None"),
    ],
)
def test_a_refused_request_harms_nothing(engine: Engine, options: dict[str, Any], message: str) -> None:
    conversation = engine.conversation()
    conversation.generate(PROMPT[:20], 9, stop=(), **BLOCKS)
    before = conversation.tokens
    for run in (conversation.generate, conversation.stream):
        with pytest.raises(InputError, match=message):
            run(**{"prompt_ids": PROMPT, "max_new_tokens": 12, **options})
    assert conversation.tokens == before
    assert_next_turn(conversation, engine)


def test_a_tokenizer_of_another_model(engine: Engine) -> None:
    conversation = engine.conversation()
    with pytest.raises(CheckpointError, match=r"ids up to 4095, target .* from 0 to 95"):
        conversation.generate(PROMPT, 5, stop_strings=["x"], tokenizer=Tokenizer(demo_pair_path() / "target"))


@pytest.mark.parametrize("value", [-1, 1.5, True, None])
def test_checkpoints_argument(engine: Engine, value: Any) -> None:
    with pytest.raises(InputError, match=r"checkpoints is .*; legal are whole numbers from 0"):
        engine.conversation(checkpoints=value)


def test_repair_argument(target: Target) -> None:
    with pytest.raises(InputError, match="repair is 'redo'; legal are 'replay', 'reset'"):
        Engine(target, kv_format="f32", repair="redo")  # type: ignore[arg-type]


def test_two_requests_at_once(engine: Engine) -> None:
    conversation = engine.conversation()
    running = conversation.stream(PROMPT[:20], 30, stop=(), **BLOCKS)
    tokens = next(running) + next(running)
    for run in (conversation.generate, conversation.stream):
        with pytest.raises(InputError, match=r"runs a request already; .* Finish or cancel it"):
            run(PROMPT[:10], 5)
    assert tokens + [t for part in running for t in part] == cold(engine, PROMPT[:20], 30)
    assert_next_turn(conversation, engine)


# Ends.


def test_what_a_conversation_gives_first_is_what_the_engine_gives(engine: Engine) -> None:
    got, want = (
        engine.conversation().generate(PROMPT, 30, stop=(), **BLOCKS),
        engine.generate(PROMPT, 30, stop=(), **BLOCKS),
    )
    assert (got.tokens, got.produced, got.accepted) == (want.tokens, want.produced, want.accepted)
    parts = list(engine.conversation().stream(PROMPT, 30, stop=(), **BLOCKS))
    assert [len(part) for part in parts] == [1, *want.produced]


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_cancelled_between_cycles(engine: Engine, steps: int) -> None:
    conversation = engine.conversation()
    generation = conversation.stream(PROMPT[:20], 30, stop=(), **BLOCKS)
    for _ in range(steps):
        next(generation)
    generation.cancel()
    assert next(generation, None) is None
    assert generation.result.stop_reason == "cancelled"
    assert generation.result.tokens == cold(engine, PROMPT[:20], 30)[: len(generation.result.tokens)]
    covered = (*PROMPT[:20], *generation.result.tokens[:-1]) if steps else ()
    assert conversation.tokens == covered
    assert_next_turn(conversation, engine, None if steps else 0)


def test_cancelled_inside_the_prefill(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hipfire_kernels.model.state.PREFILL_ROWS", 10)
    conversation = engine.conversation()
    generation = conversation.stream(PROMPT, 30, stop=(), **BLOCKS)
    forward, passes = Target.forward, []

    def second_pass_cancels(self: Target, tokens: Sequence[int], *args: Any, **options: Any) -> Any:
        passes.append(len(tokens))
        if len(passes) == 2:
            generation.cancel()
        return forward(self, tokens, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Target, "forward", second_pass_cancels)
        assert list(generation) == []
    assert (passes, generation.result.prefill_tokens, generation.result.tokens) == ([10, 10], 20, [])
    assert conversation.tokens == tuple(PROMPT[:20])
    assert conversation.generate(PROMPT, 12, stop=()).cached_prefix == 20


def test_an_end_is_not_overwritten_by_cancel(engine: Engine) -> None:
    generation = engine.stream(PROMPT[:20], 3, stop=())
    list(generation)
    generation.cancel()
    assert generation.result.stop_reason == "length"


def test_what_nobody_holds_any_more_is_over(engine: Engine) -> None:
    conversation = engine.conversation()
    generation = conversation.stream(PROMPT[:20], 30, stop=(), **BLOCKS)
    next(generation), next(generation)
    del generation
    gc.collect()
    assert_next_turn(conversation, engine)


FORWARD, PROPOSE, CUT = Target.forward, DFlashSession.propose, StopStrings.cut


def half_a_forward(self: Target, tokens: Sequence[int], state: Any, **options: Any) -> Any:
    """Fails with the first recurrent layer advanced and the others not."""
    saved = [layer.snapshot() for layer in state.delta_states()]
    FORWARD(self, tokens, state, **options)
    for layer, before in list(zip(state.delta_states(), saved, strict=True))[1:]:
        layer.restore(before)
    state.length -= len(tokens)
    raise MemoryError("no room")


def failing(error: BaseException) -> Callable[..., Any]:
    def fail(*args: Any, **options: Any) -> Any:
        raise error

    return fail


@pytest.mark.parametrize("after", [0, 1, 3])
@pytest.mark.parametrize(
    ("owner", "name", "broken", "error"),
    [
        (Target, "forward", half_a_forward, MemoryError),
        (Target, "forward", failing(InputError("HIPFIRE_X does not parse")), InputError),
        (DFlashSession, "propose", failing(KeyboardInterrupt()), KeyboardInterrupt),
        (DFlashSession, "extend", failing(RuntimeError("device lost")), RuntimeError),
    ],
)
def test_an_error_gives_the_state_up(
    engine: Engine, after: int, owner: Any, name: str, broken: Any, error: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation = engine.conversation()
    conversation.generate(PROMPT[:20], 9, stop=(), **BLOCKS)
    generation = conversation.stream([*conversation.tokens, 3], 30, stop=(), **BLOCKS)
    for _ in range(after or (name == "propose")):
        next(generation)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, broken)
        with pytest.raises(error):
            next(generation)
    assert generation.result.stop_reason == "failed"
    assert next(generation, None) is None
    assert conversation.tokens == ()
    assert_next_turn(conversation, engine, 0)


def test_plain_requests_keep_the_draft_informed(engine: Engine) -> None:
    """block_size=1 in between: the draft knows the tokens all the same, and drafts as in a cold run."""
    conversation = engine.conversation()
    full = [*PROMPT[:20], *conversation.generate(PROMPT[:20], 9, stop=(), block_size=1).tokens]
    prompt = [*full, 5]
    got, want = conversation.generate(prompt, 30, stop=(), **BLOCKS), engine.generate(prompt, 30, stop=(), **BLOCKS)
    assert (got.tokens, got.accepted, got.cached_prefix) == (want.tokens, want.accepted, len(full) - 1)


def test_sampled_turns_are_repeatable(engine: Engine) -> None:
    prompts = [PROMPT[:20], [*PROMPT[:20], 3, 4, 5], PROMPT[:12]]
    runs = []
    for _ in range(2):
        conversation = engine.conversation()
        runs.append([conversation.generate(p, 20, (), 1.0, 11, **BLOCKS).tokens for p in prompts])
    assert runs[0] == runs[1]


# Threads and asyncio.


def test_a_second_thread_is_refused_and_cancel_is_not(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    conversation = engine.conversation()
    generation = conversation.stream(PROMPT[:20], 30, stop=(), **BLOCKS)
    next(generation)
    inside, go_on = threading.Event(), threading.Event()

    def slow(self: DFlashSession, anchor: int, rows: int) -> list[int]:
        inside.set()
        assert go_on.wait(600)
        return PROPOSE(self, anchor, rows)

    monkeypatch.setattr(DFlashSession, "propose", slow)
    rest: list[list[int]] = []
    worker = threading.Thread(target=lambda: rest.extend(generation))
    worker.start()
    assert inside.wait(600)
    with pytest.raises(InputError, match="another thread is inside this conversation"):
        next(generation)
    with pytest.raises(InputError, match="another thread is inside"):
        generation.truncate(1)
    with pytest.raises(InputError, match="runs a request already"):
        conversation.generate(PROMPT, 3)
    generation.cancel()
    with pytest.raises(InputError, match="runs a request already"):
        conversation.generate(PROMPT, 3)  # the cycle has not ended yet
    go_on.set()
    worker.join(600)
    assert len(rest) == 1
    assert generation.result.stop_reason == "cancelled"
    assert conversation.tokens == (*PROMPT[:20], *generation.result.tokens[:-1])
    assert_next_turn(conversation, engine)


@pytest.mark.parametrize("kv_format", ["f32", "q8_0"])
def test_conversations_of_one_engine_in_threads(target: Target, draft: DFlashDraft, kv_format: str) -> None:
    engine = Engine(target, draft, kv_format=kv_format)
    said = [[1], [2, 3], [4]]
    want, got = {}, {}

    def talk(seed: int, into: dict[int, list[int]]) -> None:
        conversation, history = engine.conversation(), PROMPT[seed : seed + 15]
        for more in said:
            history = [*history, *conversation.generate(history, 8, stop=(), **BLOCKS).tokens, *more]
        into[seed] = history

    for seed in range(4):
        talk(seed, want)
    threads = [threading.Thread(target=talk, args=(seed, got)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert got == want


def test_async_for(engine: Engine) -> None:
    async def talk(start: int) -> list[int]:
        conversation, tokens = engine.conversation(), []
        async for part in conversation.stream(PROMPT[start:20], 15, stop=(), **BLOCKS):
            tokens += part
        return tokens

    async def both() -> list[list[int]]:
        return await asyncio.gather(talk(0), talk(5))

    assert asyncio.run(both()) == [cold(engine, PROMPT[n:20], 15) for n in (0, 5)]


def test_a_cancelled_task_leaves_the_conversation_free_and_exact(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation = engine.conversation()
    inside, go_on = threading.Event(), threading.Event()

    def slow(self: DFlashSession, anchor: int, rows: int) -> list[int]:
        inside.set()
        assert go_on.wait(600)
        return PROPOSE(self, anchor, rows)

    monkeypatch.setattr(DFlashSession, "propose", slow)

    async def cancelled() -> str | None:
        generation = conversation.stream(PROMPT[:20], 30, stop=(), **BLOCKS)
        task = asyncio.ensure_future(anext_all(generation))
        while not inside.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.sleep(0.01)
        assert not task.done(), "it ends with the cycle that it is in"
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        return generation.result.stop_reason

    async def anext_all(generation: Any) -> None:
        async for _ in generation:
            pass

    assert asyncio.run(cancelled()) == "cancelled"
    assert len(conversation.tokens) >= 21
    assert_next_turn(conversation, engine)


def test_an_error_reaches_the_task(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails() -> None:
        async for _ in engine.stream(PROMPT, 9, **BLOCKS):
            pass

    monkeypatch.setattr(Target, "forward", failing(RuntimeError("device lost")))
    with pytest.raises(RuntimeError, match="device lost"):
        asyncio.run(fails())


def test_prompts_may_be_arrays(engine: Engine) -> None:
    conversation = engine.conversation()
    first = conversation.generate(np.array(PROMPT[:20]), 5, stop=()).tokens
    assert conversation.generate(np.array([*PROMPT[:20], *first]), 5, stop=()).cached_prefix == 24
