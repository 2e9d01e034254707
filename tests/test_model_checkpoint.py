"""Checkpoints: every legal way to store the same values; a named refusal for every damaged or foreign one."""

from __future__ import annotations

import json
from collections.abc import Callable
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

from hipfire_kernels import CheckpointError
from hipfire_kernels.model import load_draft, load_target
from hipfire_kernels.model.checkpoint import Checkpoint
from hipfire_kernels.model.config import read_target_config
from hipfire_kernels.model.convert import Conversion
from hipfire_kernels.model.draft_config import read_draft_config

SMALL = {"a.weight": np.arange(6, dtype=np.float32).reshape(2, 3), "b.weight": np.ones(4, np.float32)}
SHAPES = {name: x.shape for name, x in SMALL.items()}


def open_small(folder: Path) -> Checkpoint:
    return Checkpoint(folder, SHAPES, lambda name: name)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("shards", [1, 2])
def test_values(tmp_path: Path, dtype: str, shards: int) -> None:
    rng = np.random.default_rng(0)
    tensors = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    checkpoint = open_small(write_checkpoint(tmp_path, {}, tensors, dtype=dtype, shards=shards))
    for name, want in tensors.items():
        got = checkpoint.read(name)
        assert got.dtype == np.float32
        assert got.flags.c_contiguous
        np.testing.assert_allclose(got, want, rtol={"BF16": 2**-8, "F16": 2**-10, "F32": 0}[dtype])


def test_bf16_is_exact_for_special_values(tmp_path: Path) -> None:
    values = np.array([0.0, -0.0, 2.0**-133, -255 * 2.0**120], np.float32)  # the least and the largest magnitude
    checkpoint = open_small(write_checkpoint(tmp_path, {}, {**SMALL, "b.weight": values}, dtype="BF16"))
    np.testing.assert_array_equal(checkpoint.read("b.weight").view(np.uint32), values.view(np.uint32))


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_not_finite_is_refused_by_name(tmp_path: Path, dtype: str, value: float) -> None:
    tensors = {**SMALL, "a.weight": np.array([[0, 1, 2], [3, value, 5]], np.float32)}
    checkpoint = open_small(write_checkpoint(tmp_path, {}, tensors, dtype=dtype))
    checkpoint.read("b.weight")
    with pytest.raises(CheckpointError, match=rf"'a\.weight' \({dtype}\) holds -?(nan|inf) at index 4; .* finite"):
        checkpoint.read("a.weight")


@pytest.mark.parametrize("prefix", ["", "model.", "model.language_model."])
@pytest.mark.parametrize("shards", [1, 3])
def test_prefixes_and_foreign_parts(tmp_path: Path, prefix: str, shards: int) -> None:
    tensors = target_tensors(TARGET)
    folder = write_checkpoint(tmp_path, TARGET, tensors, prefix=prefix, shards=shards)
    extra = {
        "mtp.fc.weight": np.zeros((2, 2)),
        "model.visual.blocks.0.w": np.zeros(3),
        "mtp.layers.0.w": np.zeros(1),
    }
    if shards == 1:
        stored = {name if name == "lm_head.weight" else prefix + name: x for name, x in tensors.items()}
        write_file(folder / "model.safetensors", *header_of({**stored, **extra}))
    target = load_target(folder)
    np.testing.assert_array_equal(target.embedding, tensors["embed_tokens.weight"])
    np.testing.assert_array_equal(target.lm_head, tensors["lm_head.weight"])


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])


def edit_header(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        header, data = header_of(SMALL)
        write_file(folder / "model.safetensors", change(header) or header, data)

    return damage


def raw(content: bytes) -> Callable[[Path], Any]:
    return lambda folder: (folder / "model.safetensors").write_bytes(content)


def set_entry(name: str, **values: Any) -> Callable[[Path], None]:
    return edit_header(lambda header: header[name].update(values))


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated data": (cut, r"'b\.weight' ends at byte \d+, the file has \d+"),
    "empty file": (raw(b""), "0 bytes cannot hold the header"),
    "header length beyond the file": (raw((1 << 40).to_bytes(8, "little") + b"{}"), "cannot hold the header"),
    "header not JSON": (raw((3).to_bytes(8, "little") + b"{]}"), "not valid JSON"),
    "header not UTF-8": (raw((2).to_bytes(8, "little") + b"\xff\xfe"), "not UTF-8"),
    "header not an object": (raw((2).to_bytes(8, "little") + b"[]"), "an object is required"),
    "tensor listed twice": (
        edit_header(lambda h: "{" + ",".join([f'"a.weight":{json.dumps(h["a.weight"])}'] * 2) + "}"),
        r"'a\.weight' listed twice",
    ),
    "entry without offsets": (
        edit_header(lambda h: h["a.weight"].pop("data_offsets") and None),
        r"'a\.weight'",
    ),
    "entry of another type": (edit_header(lambda h: h.update({"a.weight": 3})), r"'a\.weight'"),
    "unknown dtype": (set_entry("a.weight", dtype="F8_E4M3"), r"'a\.weight'.*'F8_E4M3' is not readable"),
    "negative shape": (set_entry("a.weight", shape=[-2, -3]), "whole numbers"),
    "fractional offset": (set_entry("a.weight", data_offsets=[0, 24.0]), "whole numbers"),
    "span and shape differ": (set_entry("a.weight", data_offsets=[0, 20]), "span 20 bytes"),
    "offsets out of range": (set_entry("b.weight", data_offsets=[4000, 4016]), "out of range"),
    "overlap": (set_entry("b.weight", data_offsets=[20, 36]), r"'b\.weight' overlaps"),
    "gap": (set_entry("a.weight", shape=[5], data_offsets=[4, 24]), r"'a\.weight' leaves a gap"),
    "bytes after the end": (
        lambda folder: (folder / "model.safetensors").open("ab").write(b"1234"),
        "4 bytes after the last tensor",
    ),
    "missing tensor": (
        lambda folder: write_file(folder / "model.safetensors", *header_of({"a.weight": SMALL["a.weight"]})),
        r"missing 'b\.weight'",
    ),
    "extra tensor": (
        lambda folder: write_file(folder / "model.safetensors", *header_of({**SMALL, "c": np.ones(1)})),
        "extra 'c'",
    ),
    "wrong shape": (
        lambda folder: write_file(folder / "model.safetensors", *header_of({**SMALL, "b.weight": np.ones(3)})),
        r"wrong shape: .*b\.weight \(3,\) \(config\.json needs \(4,\)\)",
    ),
    "no file": (lambda folder: (folder / "model.safetensors").unlink(), "holds neither"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_file_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    damage, message = DAMAGE[kind]
    folder = write_checkpoint(tmp_path, {}, SMALL)
    open_small(folder)
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        open_small(folder)


def edit_index(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        change(index)
        path.write_text(json.dumps(index))

    return damage


FIRST = "model-00001-of-00002.safetensors"
INDEX_DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "shard missing": (lambda folder: (folder / FIRST).unlink(), f"names shard '{FIRST}'"),
    "shard outside the folder": (
        edit_index(lambda i: i["weight_map"].update({"a.weight": "../model.safetensors"})),
        "names shard '../model",
    ),
    "no weight_map": (edit_index(lambda i: i.pop("weight_map")), "needs a weight_map"),
    "tensor in no shard": (edit_index(lambda i: i["weight_map"].update({"c": FIRST})), "'c'"),
    "tensor not in the map": (edit_index(lambda i: i["weight_map"].pop("a.weight")), "missing|does not hold"),
    "shard truncated": (
        lambda folder: (folder / FIRST).write_bytes((folder / FIRST).read_bytes()[:-1]),
        "truncated",
    ),
}


@pytest.mark.parametrize("kind", INDEX_DAMAGE)
def test_damaged_index_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    damage, message = INDEX_DAMAGE[kind]
    tensors = {**SMALL, "a2.weight": np.ones(2, np.float32)}
    folder = write_checkpoint(tmp_path, {}, tensors, shards=2)
    shapes = {name: x.shape for name, x in tensors.items()}
    Checkpoint(folder, shapes, lambda name: name)
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(folder, shapes, lambda name: name)


def test_two_prefixes_at_once_are_refused(tmp_path: Path) -> None:
    tensors = target_tensors(TARGET)
    twice = {**tensors, "model.norm.weight": tensors["norm.weight"]}
    with pytest.raises(CheckpointError, match=r"more than one tensor stands for 'norm\.weight'"):
        load_target(write_checkpoint(tmp_path, TARGET, twice))


def test_every_fault_of_a_checkpoint_is_listed_at_once(tmp_path: Path) -> None:
    tensors = target_tensors(TARGET)
    del tensors["layers.0.linear_attn.A_log"]
    tensors["layers.9.mlp.up_proj.weight"] = np.zeros((1, 1))
    tensors["norm.weight"] = np.zeros(3)
    with pytest.raises(CheckpointError) as caught:
        load_target(write_checkpoint(tmp_path, TARGET, tensors))
    for part in (
        "missing 'layers.0.linear_attn.A_log'",
        "extra 'layers.9.mlp.up_proj.weight'",
        "norm.weight (3,)",
    ):
        assert part in str(caught.value)


def test_tied_checkpoint_has_no_head_of_its_own(tmp_path: Path) -> None:
    config = changed(TARGET, tie_word_embeddings=True)
    target = load_target(write_checkpoint(tmp_path / "tied", config, target_tensors(config)))
    assert target.lm_head is target.embedding
    twice = target_tensors(config)
    twice["lm_head.weight"] = twice["embed_tokens.weight"]
    target = load_target(write_checkpoint(tmp_path / "twice", config, twice))
    assert target.lm_head is target.embedding
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from embed_tokens\.weight, but tie_word"):
        load_target(write_checkpoint(tmp_path / "both", config, target_tensors(TARGET)))
    with pytest.raises(CheckpointError, match=r"missing 'lm_head\.weight'"):
        load_target(write_checkpoint(tmp_path / "neither", TARGET, target_tensors(config)))


def written(folder: Path, config: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_both_config_spellings_mean_the_same(tmp_path: Path) -> None:
    new = read_target_config(written(tmp_path, TARGET))
    old = changed(TARGET, rope_parameters=None, rope_theta=10000.0, partial_rotary_factor=0.25, torch_dtype="float32")
    wrapped = {
        "model_type": "qwen3_5",
        "text_config": changed(old, model_type="qwen3_5_text"),
        "vision_config": {},
    }
    assert read_target_config(written(tmp_path, old)) == new
    assert read_target_config(written(tmp_path, wrapped)) == new


def test_layer_types_from_the_interval(tmp_path: Path) -> None:
    for interval, want in ((None, (3, 7)), (2, (1, 3, 5, 7))):
        config = changed(TARGET, layer_types=None, num_hidden_layers=8, full_attention_interval=interval)
        full = read_target_config(written(tmp_path, config)).full_attention
        assert tuple(np.flatnonzero(full)) == want


OPTIONAL = ("eos_token_id", "tie_word_embeddings", "layer_types", "rope_parameters", "head_dim", "rms_norm_eps")
TARGET_KEYS = [key for key in TARGET if key not in OPTIONAL]


@pytest.mark.parametrize("key", TARGET_KEYS)
def test_missing_target_key_is_named(tmp_path: Path, key: str) -> None:
    with pytest.raises(CheckpointError, match=f"required key '{key}' is missing"):
        read_target_config(written(tmp_path, changed(TARGET, **{key: None})))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "model_type is 'llama'"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"hidden_size": "48"}, "hidden_size is '48'"),
        ({"rms_norm_eps": True}, "rms_norm_eps is True"),
        ({"num_attention_heads": 3}, "multiple of num_key_value_heads"),
        ({"linear_num_value_heads": 3}, "multiple of linear_num_key_heads"),
        ({"layer_types": ["full_attention"]}, "a list of 5"),
        ({"layer_types": ["sliding_attention"] * 5}, "layer_types is"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attn_output_gate": False}, "attn_output_gate is False"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "rope_type is default and yarn"),
        ({"rope_scaling": {"type": "longrope"}}, "type is 'longrope'"),
        ({"rope_scaling": []}, r"rope_scaling is \[\]; it must be an object or null"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; it must be a whole number from 1 to 4096"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps is 1000"),
        ({"eos_token_id": "x"}, "eos_token_id is 'x'"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.1}}, "an even number"),
        ({"text_config": []}, "text_config must be an object"),
    ],
)
def test_illegal_target_config_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_target_config(written(tmp_path, changed(TARGET, **changes)))


@pytest.mark.parametrize("key", ["mask_token_id", "target_layer_ids", "block_size"])
def test_required_draft_key_at_top_level_or_in_dflash_config(tmp_path: Path, key: str) -> None:
    value = DRAFT["dflash_config"].get(key, DRAFT.get(key))
    bare = changed(DRAFT, dflash_config=changed(DRAFT["dflash_config"], **{key: None}), **{key: None})
    want = read_draft_config(written(tmp_path, DRAFT))
    assert read_draft_config(written(tmp_path, changed(bare, **{key: value}))) == want
    inner = changed(bare["dflash_config"], **{key: value})
    assert read_draft_config(written(tmp_path, changed(bare, dflash_config=inner))) == want
    with pytest.raises(CheckpointError, match=f"required key '{key}' is missing"):
        read_draft_config(written(tmp_path, bare))


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size", "sliding_window"])
def test_missing_draft_key_is_named(tmp_path: Path, key: str) -> None:
    with pytest.raises(CheckpointError, match=f"required key '{key}' is missing"):
        read_draft_config(written(tmp_path, changed(DRAFT, **{key: None})))


@pytest.mark.parametrize(
    ("changes", "inner", "message"),
    [
        ({}, {"mask_token_id": 96}, "mask_token_id is 96; it must be a token id below vocab_size"),
        ({}, {"target_layer_ids": []}, r"target_layer_ids is \[\]"),
        ({}, {"target_layer_ids": [1, 1]}, "different target layer"),
        ({}, {"target_layer_ids": [1, -1]}, "target_layer_ids is"),
        ({}, {"selector_rank": 256}, r"selector_rank is 256 \(rank of the candidate selector of DFlash 2;"),
        ({}, {"causal": "no"}, "causal is 'no'"),
        ({"block_size": 1}, {}, "block_size is 1"),
        ({"use_sliding_window": False}, {}, "use_sliding_window is False"),
        ({"rope_scaling": {"rope_type": "linear"}}, {}, "rope_type is 'linear'"),
        ({"dflash_config": 3}, None, "dflash_config is 3"),
    ],
)
def test_illegal_draft_config_is_named(
    tmp_path: Path, changes: dict[str, Any], inner: dict[str, Any] | None, message: str
) -> None:
    if inner is not None:
        changes = {**changes, "dflash_config": changed(DRAFT["dflash_config"], **inner)}
    with pytest.raises(CheckpointError, match=message):
        read_draft_config(written(tmp_path, changed(DRAFT, **changes)))


def test_neutral_draft_settings_are_taken(tmp_path: Path) -> None:
    neutral = {
        "output_multiplier": 1.0,
        "input_embedding_scale": 1,
        "use_swa": False,
        "attention_sink_bias": False,
    }
    config = changed(DRAFT, dflash_config={**DRAFT["dflash_config"], **neutral})
    assert read_draft_config(written(tmp_path, config)) == read_draft_config(written(tmp_path, DRAFT))


def test_draft_and_target_folders_mixed_up(tmp_path: Path) -> None:
    target = write_checkpoint(tmp_path / "target", TARGET, target_tensors(TARGET))
    draft = write_checkpoint(tmp_path / "draft", DRAFT, draft_tensors(DRAFT))
    with pytest.raises(CheckpointError, match="model_type is 'qwen3'"):
        load_target(draft)
    with pytest.raises(CheckpointError, match="'target_layer_ids' is missing"):
        load_draft(target)
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read"):
        load_target(tmp_path / "nowhere")


def eos(folder: Path, generation: Any, **top: Any) -> tuple[int, ...]:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(changed(TARGET, **top)))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return read_target_config(folder).eos_ids


@pytest.mark.parametrize(
    ("top", "generation", "want"),
    [
        (95, None, (95,)),
        (95, {"eos_token_id": [93, 95]}, (95, 93)),
        (95, {"eos_token_id": 0}, (95, 0)),
        (95, {"temperature": 0.6}, (95,)),
        (0, {"eos_token_id": None}, (0,)),
        (None, {"eos_token_id": [1, 2]}, (1, 2)),
        (None, None, ()),
    ],
)
def test_stop_ids_come_from_both_files(tmp_path: Path, top: Any, generation: Any, want: tuple[int, ...]) -> None:
    assert eos(tmp_path, generation, eos_token_id=top) == want


@pytest.mark.parametrize(
    ("top", "generation", "where"),
    [
        (96, None, r"config\.json: eos_token_id is 96; it must be a token id below vocab_size \(96\)"),
        (95, {"eos_token_id": [2, 96]}, r"generation_config\.json: eos_token_id is \[2, 96\]"),
        (95, {"eos_token_id": "x"}, r"generation_config\.json: eos_token_id is 'x'"),
        (95, [1], r"generation_config\.json: holds a JSON list"),
    ],
)
def test_illegal_stop_ids_are_named(tmp_path: Path, top: Any, generation: Any, where: str) -> None:
    with pytest.raises(CheckpointError, match=where):
        eos(tmp_path, generation, eos_token_id=top)


def test_a_container_keeps_the_stop_ids(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", TARGET, target_tensors(TARGET))
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [93, 95]}))
    Conversion(source, "f16").write(tmp_path / "target.hfq", lambda tensor: None)
    assert load_target(tmp_path / "target.hfq").config.eos_ids == (95, 93)
