"""The trace: a JSON object a line for what a request does, to a file that is given or to one that it opens."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from model_lab import (
    BLOCKS,
    DRAFT,
    PROMPT,
    TARGET,
    ScriptedDraft,
    changed,
    draft_tensors,
    target_tensors,
    write_checkpoint,
)

from hipfire_kernels import InputError
from hipfire_kernels.dispatch import policy
from hipfire_kernels.model import Engine, load_draft, load_target
from hipfire_kernels.model.qwen35 import Target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_target(write_checkpoint(tmp_path_factory.mktemp("target"), TARGET, target_tensors(TARGET)))


@pytest.fixture(scope="module")
def truth(target: Target) -> list[int]:
    return Engine(target, kv_format="f32").generate(PROMPT, 60, stop=()).tokens


def scripted(target: Target, truth: list[int]) -> Engine:
    return Engine(target, ScriptedDraft(truth, [3, 0, 7], 8, 96), kv_format="f32")


def records(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_what_a_request_leaves(target: Target, truth: list[int]) -> None:
    file = io.StringIO()
    got = scripted(target, truth).generate(PROMPT, 30, stop=(), trace=file, **BLOCKS)
    first, *cycles, last = records(file.getvalue())
    assert {first["request"]} == {record["request"] for record in (*cycles, last)}
    assert [first[key] for key in ("event", "context", "prompt", "cached_prefix", "prefill_tokens")] == [
        "prefill",
        0,
        40,
        0,
        40,
    ]
    assert first["seconds"] > 0
    assert first["routes"] == {"numpy": 2}
    assert [cycle["produced"] for cycle in cycles] == got.produced
    assert [cycle["accepted"] for cycle in cycles] == got.accepted
    assert [cycle["context"] for cycle in cycles] == [40 + sum(got.produced[:n]) for n in range(len(cycles))]
    assert [(cycle["drafted"], cycle["block"]) for cycle in cycles[:3]] == [(7, 8)] * 3
    assert {cycle["kind"] for cycle in cycles} == {"verify"}
    assert all(cycle["draft_s"] > 0 and cycle["verify_s"] > 0 and cycle["routes"] == {"numpy": 2} for cycle in cycles)
    assert last == {
        "event": "end",
        "request": first["request"],
        "context": 69,
        "stop_reason": "length",
        "tokens": 30,
        "repair": "none",
        "replayed_tokens": 0,
    }


def test_off_leaves_plain_cycles(target: Target, truth: list[int]) -> None:
    file = io.StringIO()
    scripted(target, truth).generate(PROMPT, 4, stop=(), trace=file, speculation="off")
    cycles = records(file.getvalue())[1:-1]
    assert [(c["kind"], c["drafted"], c["block"], c["accepted"]) for c in cycles] == [("plain", 0, 1, 0)] * 3


def test_probes_and_the_cap_are_told_apart(tmp_path: Path, target: Target) -> None:
    config = changed(DRAFT, layer_types=["full_attention"] * 3, sliding_window=None, use_sliding_window=None)
    engine = Engine(target, load_draft(write_checkpoint(tmp_path, config, draft_tensors(config))), kv_format="f32")
    file = io.StringIO()
    with policy.override(draft_ctx_cap=60):
        got = engine.generate(PROMPT, 80, stop=(), trace=file)
    kinds = [record["kind"] for record in records(file.getvalue())[1:-1]]
    assert kinds[:4] == ["plain"] * 3 + ["probe"]
    assert kinds.count("capped") == got.capped_cycles > 0
    assert kinds.count("probe") == got.probes
    assert kinds.count("plain") + got.probes == got.retired_cycles


def test_a_stop_inside_a_block(target: Target, truth: list[int]) -> None:
    stop = next(token for token in truth[3:] if token not in truth[: truth.index(token)])
    file = io.StringIO()
    got = Engine(target, ScriptedDraft(truth, [7], 8, 96), kv_format="f32").generate(
        PROMPT, 60, stop=[stop], trace=file, **BLOCKS
    )
    end = records(file.getvalue())[-1]
    assert (end["stop_reason"], end["repair"], end["replayed_tokens"]) == ("stop", got.repair, got.replayed_tokens)


def test_the_end_is_told_once_unless_it_changes(target: Target, truth: list[int]) -> None:
    file = io.StringIO()
    generation = Engine(target, ScriptedDraft(truth, [7], 8, 96), kv_format="f32").stream(
        PROMPT, 9, stop=(), trace=file, **BLOCKS
    )
    for _ in generation:
        pass
    assert next(generation, None) is None
    generation.truncate(3)
    ends = [record for record in records(file.getvalue()) if record["event"] == "end"]
    assert [(end["stop_reason"], end["tokens"], end["context"]) for end in ends] == [
        ("length", 9, 48),
        ("caller", 4, 43),
    ]


def test_cancelled_and_failed_requests_have_an_end(
    target: Target, truth: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends(file: io.StringIO) -> list[str]:
        return [record["stop_reason"] for record in records(file.getvalue()) if record["event"] == "end"]

    file = io.StringIO()
    generation = scripted(target, truth).stream(PROMPT, 30, stop=(), trace=file, **BLOCKS)
    next(generation)
    generation.cancel()
    assert list(generation) == []
    assert ends(file) == ["cancelled"]
    file = io.StringIO()
    generation = scripted(target, truth).stream(PROMPT, 30, stop=(), trace=file, **BLOCKS)
    monkeypatch.setattr(ScriptedDraft, "propose", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        list(generation)
    assert ends(file) == ["failed"]


def test_requests_are_numbered_apart_and_share_a_file(tmp_path: Path, target: Target) -> None:
    path = tmp_path / "trace.jsonl"
    engine = Engine(target, kv_format="f32")
    running = [engine.stream(PROMPT, 3, stop=(), trace=where) for where in (path, str(path))]
    for _ in range(4):
        for generation in running:
            next(generation, None)
    found = records(path.read_text())
    one, other = (record["request"] for record in found[:2])
    assert one != other
    for number in (one, other):
        events = [record["event"] for record in found if record["request"] == number]
        assert events == ["prefill", "cycle", "cycle", "end"]


def test_a_path_that_cannot_be_written(tmp_path: Path, target: Target) -> None:
    conversation = Engine(target, kv_format="f32").conversation()
    with pytest.raises(InputError, match=r"trace '.*gone.*' cannot be written \(No such file"):
        conversation.generate(PROMPT, 3, trace=tmp_path / "gone" / "trace.jsonl")
    assert conversation.generate(PROMPT, 3, stop=()).prefill_tokens == len(PROMPT)
