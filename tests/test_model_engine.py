"""What an engine refuses, at construction and per request; the tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_lab import (
    DRAFT,
    PROMPT,
    TARGET,
    ScriptedDraft,
    changed,
    draft_tensors,
    target_tensors,
    write_checkpoint,
)

from hipfire_kernels import CheckpointError, InputError
from hipfire_kernels.model import Engine, Tokenizer, demo_pair_path, load_draft, load_target
from hipfire_kernels.model.dflash import DFlashDraft
from hipfire_kernels.model.qwen35 import Target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_target(write_checkpoint(tmp_path_factory.mktemp("target"), TARGET, target_tensors(TARGET)))


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> DFlashDraft:
    return load_draft(write_checkpoint(tmp_path_factory.mktemp("draft"), DRAFT, draft_tensors(DRAFT)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 40}, "hidden_size: the draft has 40, the target 48"),
        ({"vocab_size": 95}, "vocab_size: the draft has 95, the target 96"),
        ({"num_target_layers": 8}, "num_target_layers: the draft has 8, the target 5"),
        (
            {"dflash_config": {"mask_token_id": 94, "target_layer_ids": [1, 3, 5]}},
            r"taps \[5\], .* layers 0 to 4",
        ),
    ],
)
def test_draft_of_another_target(tmp_path: Path, target: Target, changes: dict[str, Any], message: str) -> None:
    config = changed(DRAFT, **changes)
    other = load_draft(write_checkpoint(tmp_path, config, draft_tensors(config)))
    with pytest.raises(CheckpointError, match=message) as caught:
        Engine(target, other, kv_format="f32")
    assert other.config.source in str(caught.value)
    assert target.config.source in str(caught.value)


def test_draft_without_num_target_layers_pairs_by_its_taps(tmp_path: Path, target: Target) -> None:
    config = changed(DRAFT, num_target_layers=None)
    Engine(target, load_draft(write_checkpoint(tmp_path, config, draft_tensors(config))), kv_format="f32")


def test_block_beyond_a_verify_block(target: Target) -> None:
    with pytest.raises(CheckpointError, match="block_size is 33; a verify block has 2 to 32 rows"):
        Engine(target, ScriptedDraft([], [0], 33, 96), kv_format="f32")


def test_engine_arguments(target: Target) -> None:
    with pytest.raises(InputError, match=r"kv_format is 'bf16'; legal are 'q8_0', 'f32'"):
        Engine(target, kv_format="bf16")
    with pytest.raises(InputError, match="runs on 'host', not on 'hip:0'"):
        Engine(target, device="hip:0", kv_format="f32")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_ids": []}, "prompt_ids is empty"),
        ({"prompt_ids": [1, 96]}, r"prompt_ids\[1\] is 96; .* from 0 to 95"),
        ({"prompt_ids": [-1]}, r"prompt_ids\[0\] is -1"),
        ({"prompt_ids": [1.0]}, "float64"),
        ({"prompt_ids": [True]}, "bool"),
        ({"prompt_ids": [[1, 2]]}, r"shape \(1, 2\)"),
        ({"prompt_ids": "text"}, "one flat sequence of whole numbers"),
        ({"prompt_ids": [[1, 2], [3]]}, "prompt_ids must be one flat sequence of whole numbers, not ragged lists"),
        ({"prompt_ids": 5}, r"one flat sequence of whole numbers, not int64 of shape \(\)"),
        ({"prompt_ids": None}, "one flat sequence of whole numbers"),
        (
            {"prompt_ids": [1] * 250},
            r"250 tokens and max_new_tokens is 10; .*256 \(max_position_embeddings\)",
        ),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_new_tokens": 257}, "max_new_tokens is 257"),
        ({"max_new_tokens": 2.0}, "max_new_tokens is 2.0"),
        ({"max_new_tokens": "4"}, "max_new_tokens is '4'"),
        ({"stop": [96]}, r"stop\[0\] is 96"),
        ({"stop": 5}, "stop is 5; required: a sequence"),
        ({"stop": [[1], [2, 3]]}, "stop must be one flat sequence"),
        ({"stop": ["a"]}, "stop must be one flat sequence"),
        ({"stop_strings": 5}, "stop_strings is 5; required: a sequence"),
        ({"stop_strings": None}, "stop_strings is None; required: a sequence"),
        ({"stop_strings": ["a"], "tokenizer": 5}, "stop_strings are given and tokenizer is 5"),
        ({"adaptive_b": 5}, "adaptive_b is 5; required: True or False"),
        ({"trace": 5}, "trace is 5; required: a text file"),
        ({"block_size": 0}, "block_size is 0; legal are whole numbers from 1 to 8"),
        ({"block_size": 9}, "block_size is 9"),
    ],
)
def test_refused_request(target: Target, draft: DFlashDraft, options: dict[str, Any], message: str) -> None:
    engine = Engine(target, draft, kv_format="f32")
    request = {"prompt_ids": PROMPT, "max_new_tokens": 10, **options}
    for run in (engine.generate, engine.stream):
        with pytest.raises(InputError, match=message):
            run(**request)


def test_numpy_integers_are_numbers_of_a_request(target: Target, draft: DFlashDraft) -> None:
    engine = Engine(target, draft, kv_format="f32")
    want = engine.generate(PROMPT, 10, [3], block_size=4, min_new_tokens=2)
    given = engine.generate(
        np.array(PROMPT), np.int64(10), np.array([3]), block_size=np.int32(4), min_new_tokens=np.uint8(2)
    )
    assert given.tokens == want.tokens
    assert {type(rows) for rows in given.block_sizes} <= {int}


def test_block_size_needs_a_draft(target: Target) -> None:
    with pytest.raises(InputError, match="this engine has no draft"):
        Engine(target, kv_format="f32").generate(PROMPT, block_size=8)


def test_the_capacity_can_be_filled_to_the_last_position(target: Target, draft: DFlashDraft) -> None:
    engine = Engine(target, draft, kv_format="f32")
    prompt = np.array(PROMPT * 6)[:240]
    assert len(engine.generate(prompt, 16, stop=()).tokens) == 16


def test_stop_defaults_to_the_ids_of_the_config(tmp_path: Path, target: Target) -> None:
    free = Engine(target, kv_format="f32").generate(PROMPT, 40, stop=()).tokens
    config = changed(TARGET, eos_token_id=[3, free[5]])
    stopping = Engine(load_target(write_checkpoint(tmp_path, config, target_tensors(TARGET))), kv_format="f32")
    assert stopping.generate(PROMPT, 40).tokens == free[: free.index(free[5]) + 1]
    assert stopping.generate(PROMPT, 40, stop=()).tokens == free


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(demo_pair_path() / "target")


TEXT = "def naïve():\n    return '日本語 🎉 ' + \"é\"  # ok"


def test_tokenizer_round_trip(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_streamed_text_never_splits_a_character(tokenizer: Tokenizer, size: int) -> None:
    ids = tokenizer.encode(TEXT)
    decoder = tokenizer.stream()
    text = ""
    for begin in range(0, len(ids), size):
        part = decoder.push(ids[begin : begin + size])
        assert "\ufffd" not in part
        text += part
        # Nothing that is complete is held back.
        assert text == tokenizer.decode(ids[: begin + size]).rstrip("\ufffd")
    assert text + decoder.finish() == TEXT


def test_an_unfinished_character_comes_out_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ab🎉")
    decoder = tokenizer.stream()
    assert decoder.push(ids[:-1]).startswith("ab")
    assert set(decoder.finish()) == {"\ufffd"}
    assert decoder.finish() == ""


def test_special_tokens_are_not_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([0, *tokenizer.encode("x"), 2]) == "x"


def test_absent_or_broken_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no tokenizer\.json"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="not a tokenizer"):
        Tokenizer(tmp_path)
