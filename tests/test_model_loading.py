"""What a load reports, what it leaves out, and YaRN on a target."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_lab import (
    DRAFT,
    TARGET,
    changed,
    draft_tensors,
    header_of,
    target_tensors,
    write_checkpoint,
    write_file,
)
from parity_lab import FIXTURES

from hipfire_kernels import CheckpointError
from hipfire_kernels.cli import _load
from hipfire_kernels.model import LoadProgress, load_draft, load_target
from hipfire_kernels.model.config import read_target_config
from hipfire_kernels.model.convert import Conversion
from hipfire_kernels.model.yarn import Yarn

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "partial_rotary_factor": 0.25}


def folder(path: Path, **extra: np.ndarray) -> Path:
    tensors = target_tensors(TARGET)
    path.mkdir()
    (path / "config.json").write_text(json.dumps(TARGET))
    write_file(path / "model.safetensors", *header_of({**tensors, **extra}))
    return path


FOREIGN = {
    "mtp.fc.weight": np.zeros((2, 2)),
    "mtp.layers.0.mlp.up_proj.weight": np.zeros((2, 2)),
    "model.visual.blocks.0.attn.qkv.bias": np.zeros(3),
    "visual.patch_embed.proj.weight": np.zeros(3),
}


def test_progress_counts_every_byte_and_names_what_is_left_out(tmp_path: Path) -> None:
    seen: list[LoadProgress] = []
    load_target(folder(tmp_path / "it", **FOREIGN), progress=seen.append)
    tensors = target_tensors(TARGET)
    size = sum(x.nbytes for x in tensors.values())
    assert {p.tensor for p in seen} == tensors.keys()
    assert len(seen) == len(tensors)
    done = [p.done for p in seen]
    assert done == sorted(set(done))
    assert done[-1] == size
    assert {p.total for p in seen} == {size}
    assert {p.skipped for p in seen} == {tuple(FOREIGN)}


@pytest.mark.parametrize("shape", ["tied", "sharded", "draft", "container"])
def test_progress_ends_at_the_total(tmp_path: Path, shape: str) -> None:
    seen: list[LoadProgress] = []
    if shape == "draft":
        load_draft(write_checkpoint(tmp_path, DRAFT, draft_tensors(DRAFT), dtype="BF16"), progress=seen.append)
    elif shape == "container":
        Conversion(FIXTURES / "tied", "q8").write(tmp_path / "it.hfq", lambda tensor: None)
        load_target(tmp_path / "it.hfq", progress=seen.append)
    else:
        load_target(FIXTURES / shape, progress=seen.append)
    assert seen[-1].done == seen[-1].total > 0
    assert seen[-1].skipped == ()


def test_what_progress_raises_ends_the_load(tmp_path: Path) -> None:
    def enough(progress: LoadProgress) -> None:
        seen.append(progress)
        if len(seen) == 3:
            raise KeyboardInterrupt

    seen: list[LoadProgress] = []
    with pytest.raises(KeyboardInterrupt):
        load_target(folder(tmp_path / "it"), progress=enough)
    assert len(seen) == 3


def test_foreign_tensors_by_rule_alone(tmp_path: Path) -> None:
    for name in ("model.mtp_head.weight", "audio.weight", "layers.0.visual.weight"):
        with pytest.raises(CheckpointError, match=f"extra '{name.removeprefix('model.')}'|extra '{name}'"):
            load_target(folder(tmp_path / name, **{name: np.zeros(2)}))


def test_the_wrapped_checkpoint_of_transformers_leaves_out_its_vision(tmp_path: Path) -> None:
    seen: list[LoadProgress] = []
    load_target(FIXTURES / "wrapped", progress=seen.append)
    skipped = seen[-1].skipped
    assert {name.split(".")[0] if name[0] == "m" and name[1] == "t" else name[:12] for name in skipped} == {
        "mtp",
        "model.visual",
    }


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("terminal", [False, True])
def test_a_command_shows_a_bar_on_a_terminal_and_says_what_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, terminal: bool
) -> None:
    err = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", err)
    it, draft = folder(tmp_path / "it", **FOREIGN), write_checkpoint(tmp_path / "draft", DRAFT, draft_tensors(DRAFT))
    assert _load.target(it).config.source == str(it)
    assert _load.draft(draft).config.source == str(draft)
    lines = err.getvalue().splitlines()
    said = f"{it}: 4 tensors left out (mtp, visual)"
    assert any(said in line for line in lines)
    assert (lines != [said]) == terminal


def yarn_config(**changes: Any) -> dict[str, Any]:
    return changed(TARGET, rope_parameters=changed(YARN, **changes))


@pytest.mark.parametrize(
    ("changes", "yarn", "capacity"),
    [
        ({"original_max_position_embeddings": 256}, Yarn(4.0, 256, 1 + np.log(4) / 10), 1024),
        ({}, Yarn(4.0, 256, 1 + np.log(4) / 10), 1024),
        ({"original_max_position_embeddings": 32}, Yarn(4.0, 32, 1 + np.log(4) / 10), 256),
        (
            {"original_max_position_embeddings": 64, "attention_factor": 1.5, "mrope_section": [2, 1, 1]},
            Yarn(4.0, 64, 1.5),
            256,
        ),
        ({"factor": None, "original_max_position_embeddings": 64}, Yarn(4.0, 64, 1 + np.log(4) / 10), 256),
    ],
)
def test_yarn_of_a_target(tmp_path: Path, changes: dict[str, Any], yarn: Yarn, capacity: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(yarn_config(**changes)))
    config = read_target_config(tmp_path)
    assert config.yarn == yarn
    assert config.max_positions == capacity


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"factor": None}, "required key 'factor' is missing"),
        ({"factor": 0.5}, "factor is 0.5; it must be a number of at least 1"),
        ({"beta_fast": 1e-200}, "beta_fast is 1e-200; it must be a positive number"),
        ({"short_factor": [1.0]}, r"\(rope_parameters\): short_factor is set; YaRN with it"),
    ],
)
def test_illegal_yarn_of_a_target_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(yarn_config(**changes)))
    with pytest.raises(CheckpointError, match=message):
        read_target_config(tmp_path)
