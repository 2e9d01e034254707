"""Keys of a config that ask for another forward pass, that are missing, that contradict, and that nobody knows."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_lab import DRAFT, TARGET, changed, draft_tensors, target_tensors, write_checkpoint
from parity_lab import FIXTURES

from hipfire_kernels import CheckpointError
from hipfire_kernels.cli import app
from hipfire_kernels.model import demo_pair_path, load_draft, load_target
from hipfire_kernels.model.config import TargetConfig, read_target_config
from hipfire_kernels.model.convert import Conversion
from hipfire_kernels.model.draft_config import DraftConfig, read_draft_config
from hipfire_kernels.model.yarn import Yarn

FULL = ["full_attention"] * 3
DERIVED = {"layer_types": None, "sliding_window": None, "use_sliding_window": None}


def target(folder: Path, config: Mapping[str, Any]) -> TargetConfig:
    (folder / "config.json").write_text(json.dumps(config))
    return read_target_config(folder)


def draft(folder: Path, config: Mapping[str, Any]) -> DraftConfig:
    (folder / "config.json").write_text(json.dumps(config))
    return read_draft_config(folder)


def wrapped(**changes: Any) -> dict[str, Any]:
    """A multimodal wrapper; the changes are its own."""
    return {"model_type": "qwen3_5", "text_config": TARGET, "vision_config": {"depth": 1}, **changes}


# ---- keys that ask for another forward pass ----------------------------------------------------------------

ASKING_BOTH: dict[str, Any] = {
    "attention_bias": True,
    "mlp_bias": True,
    "hidden_act": "gelu",
    "use_qk_norm": False,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "attention_logits_soft_cap": 30,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "mlp_multipliers": [0.5, 0.5],
    "logits_scaling": 8,
    "num_experts": 256,
    "num_local_experts": 8,
    "num_experts_per_tok": 8,
    "rope_interleave": True,
    "quantization_config": {"quant_method": "fp8"},
    "per_layer_config": {"0": {"head_dim": 64}},
    "attention_sink_bias": True,
    "num_kv_shared_layers": 2,
}
ASKING_TARGET: dict[str, Any] = {
    "use_sliding_window": True,
    "final_logit_softcapping": 30.0,
    "output_multiplier": 0.5,
    "linear_conv_bias": True,
    "attn_output_gate": False,
    "output_gate_type": "sigmoid",
    "is_causal": False,
}


@pytest.mark.parametrize("key", [*ASKING_BOTH, *ASKING_TARGET])
def test_a_target_that_asks_for_another_forward_pass_is_refused_by_name(tmp_path: Path, key: str) -> None:
    value = {**ASKING_BOTH, **ASKING_TARGET}[key]
    for config in (changed(TARGET, **{key: value}), wrapped(**{key: value})):
        with pytest.raises(CheckpointError, match=rf"config\.json: {key} is .* \(.*required: absent.*not implemented"):
            target(tmp_path, config)


@pytest.mark.parametrize("key", [*ASKING_BOTH, "attn_output_gate"])
def test_a_draft_that_asks_for_another_forward_pass_is_refused_by_name(tmp_path: Path, key: str) -> None:
    value = ASKING_BOTH.get(key, True)
    inner = changed(DRAFT["dflash_config"], **{key: value})
    for config in (changed(DRAFT, **{key: value}), changed(DRAFT, dflash_config=inner)):
        with pytest.raises(CheckpointError, match=rf"dflash_config\): {key} is .*required: absent"):
            draft(tmp_path, config)


def test_all_that_is_asked_for_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"num_experts is 64 \(a mixture of experts.*; mlp_bias is True \(biases"):
        target(tmp_path, changed(TARGET, num_experts=64, mlp_bias=True))


@pytest.mark.parametrize(
    "neutral",
    [
        {"attention_bias": False, "mlp_bias": False, "num_experts": 0, "rope_interleave": False},
        {"embedding_multiplier": 1.0, "logits_scaling": 1, "attn_logit_softcapping": 0.0},
        {"hidden_act": "swish", "quantization_config": {}, "per_layer_config": {}, "use_qk_norm": True},
    ],
)
def test_values_that_ask_for_nothing_are_taken(tmp_path: Path, neutral: dict[str, Any]) -> None:
    of_targets = {"use_sliding_window": False, "attn_output_gate": True, "output_gate_type": "swish", "is_causal": True}
    got = target(tmp_path, {**TARGET, **neutral, **of_targets})
    assert (got, got.notes.unread) == (target(tmp_path, TARGET), ())
    assert target(tmp_path, {**TARGET, **dict.fromkeys(ASKING_BOTH | ASKING_TARGET)}) == got
    of_drafts = draft(tmp_path, {**DRAFT, **neutral})
    assert (of_drafts, of_drafts.notes.unread) == (draft(tmp_path, DRAFT), ())


# ---- RoPE --------------------------------------------------------------------------------------------------

ROPE = TARGET["rope_parameters"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rope_scaling": {"factor": 4.0}},
            r"\(rope_scaling\): factor is 4.0 without a rope_type; required: rope_type",
        ),
        ({"rope_parameters": changed(ROPE, rope_type=None, beta_fast=32)}, "beta_fast is 32 without a rope_type"),
        ({"rope_parameters": changed(ROPE, rope_type=None, long_factor=[1.0])}, r"long_factor is \[1.0\] without"),
        (
            {"rope_parameters": {**ROPE, "rope_interleave": True}},
            r"\(rope_parameters\): rope_interleave is True \(RoPE",
        ),
        ({"rope_parameters": {"full_attention": ROPE}}, "full_attention is an object; one RoPE for all layers"),
        (
            {"rope_scaling": {"rope_theta": 5e5}},
            r"rope_theta is 500000.0 \(rope_scaling\) and 10000.0 \(rope_parameters\)",
        ),
        (
            {
                "original_max_position_embeddings": 64,
                "rope_parameters": {
                    **ROPE,
                    "rope_type": "yarn",
                    "factor": 2.0,
                    "original_max_position_embeddings": 32,
                },
            },
            r"original_max_position_embeddings is 64 \(top level\) and 32 \(rope_parameters\)",
        ),
    ],
)
def test_rope_that_would_not_be_honoured_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    for read, config in ((target, TARGET), (draft, {**DRAFT, "rope_parameters": ROPE})):
        with pytest.raises(CheckpointError, match=message):
            read(tmp_path, {**config, **changes})


def test_rope_that_asks_for_nothing_is_taken(tmp_path: Path) -> None:
    want = target(tmp_path, TARGET)
    for rope in (changed(ROPE, rope_type=None, factor=1.0), {**ROPE, "rope_interleave": False, "factor": None}):
        assert target(tmp_path, {**TARGET, "rope_parameters": rope}) == want
    stated = target(tmp_path, {**TARGET, "rope_parameters": {**ROPE, "factor": 4.0}})
    assert (stated, stated.notes.unread) == (want, ("rope_parameters.factor",))
    # rope_parameters goes before what stands at top level, as in transformers.
    assert target(tmp_path, {**TARGET, "rope_theta": 3.0, "partial_rotary_factor": 1.0}) == want


# ---- missing keys ------------------------------------------------------------------------------------------


def test_missing_keys_of_a_target_have_the_defaults_of_transformers(tmp_path: Path) -> None:
    bare = changed(TARGET, head_dim=None, rms_norm_eps=None, rope_parameters=None)
    got = target(tmp_path, bare)
    assert (got.attention.head_dim, got.rotary_dim, got.rope_theta, got.rms_norm_eps) == (256, 64, 1e4, 1e-6)
    assert got.notes.assumed == (
        "head_dim 256",
        "rope_theta 10000.0",
        "partial_rotary_factor 0.25",
        "rms_norm_eps 1e-06",
    )
    for rope in ({"rope_theta": 1e7}, {"rope_type": "default", "rope_theta": 1e7, "mrope_section": [2, 1, 1]}):
        found = target(tmp_path, changed(TARGET, rope_parameters=rope))
        assert (found.rotary_dim, found.rope_theta, found.notes.assumed) == (8, 1e7, ("partial_rotary_factor 0.25",))


def test_missing_keys_of_a_draft_have_the_defaults_of_transformers(tmp_path: Path) -> None:
    got = draft(tmp_path, changed(DRAFT, head_dim=None, rms_norm_eps=None, rope_parameters=None))
    assert (got.attention.head_dim, got.rope_theta, got.rms_norm_eps) == (128, 1e4, 1e-6)
    assert got.notes.assumed == ("rope_theta 10000.0", "head_dim 128", "rms_norm_eps 1e-06")
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert isinstance(draft(tmp_path, changed(DRAFT, rope_parameters=yarn)).yarn, Yarn)


def test_a_checkpoint_with_the_default_head_dim_loads_without_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = changed(TARGET, head_dim=256, num_attention_heads=2, num_key_value_heads=1)
    folder = write_checkpoint(tmp_path, changed(sizes, head_dim=None), target_tensors(sizes))
    loaded = load_target(folder)
    assert loaded.config == target(tmp_path, sizes)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == f"config of {folder}: missing keys, taken as transformers does: head_dim 256"


def test_tensors_that_do_not_fit_an_assumed_size_say_so(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, changed(TARGET, head_dim=None), target_tensors(TARGET))
    with pytest.raises(
        CheckpointError, match=r"wrong shape.*its config lacks keys, .*transformers takes: head_dim 256"
    ):
        load_target(folder)


# ---- which layers of a draft slide -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}, (0, 7, 7)),
        ({"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0}, (7, 7, 7)),
        ({"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 3}, (0, 0, 0)),
        ({"use_sliding_window": True, "sliding_window": 7}, (0, 0, 0)),  # max_window_layers is 28
        ({"use_sliding_window": True, "max_window_layers": 2}, (0, 0, 4096)),
        ({"use_sliding_window": False, "sliding_window": 7, "max_window_layers": 0}, (0, 0, 0)),
        ({"sliding_window": 7, "max_window_layers": 0}, (0, 0, 0)),
    ],
)
def test_layers_slide_as_transformers_derives_it(
    tmp_path: Path, changes: dict[str, Any], windows: tuple[int, ...]
) -> None:
    got = draft(tmp_path, changed(DRAFT, **{**DERIVED, **changes}))
    assert (got.windows, got.causal) == (windows, tuple(w > 0 for w in windows))
    assert got.notes.unread == ()


def test_a_window_of_null_slides_nowhere(tmp_path: Path) -> None:
    config = {**changed(DRAFT, layer_types=None), "use_sliding_window": True, "max_window_layers": 0}
    assert draft(tmp_path, {**config, "sliding_window": None}).windows == (0, 0, 0)
    with pytest.raises(CheckpointError, match="max_window_layers is -1"):
        draft(tmp_path, {**config, "max_window_layers": -1})


@pytest.mark.parametrize("key", ["layer_types", "derived"])
def test_a_derived_window_is_attended_like_a_stated_one(tmp_path: Path, key: str) -> None:
    """The same weights with layer_types and without: the same logits."""
    stated = changed(DRAFT, layer_types=["full_attention", "sliding_attention", "sliding_attention"])
    derived = changed(DRAFT, layer_types=None, max_window_layers=1)
    tensors, config = draft_tensors(DRAFT), stated if key == "layer_types" else derived
    got = load_draft(write_checkpoint(tmp_path, config, tensors))
    assert [(layer.window, layer.causal) for layer in got.layers] == [(0, False), (7, True), (7, True)]


@pytest.mark.parametrize(
    ("inner", "top", "windows", "unread"),
    [
        # use_swa is false where it is missing: it makes no layer slide, and says how far those slide that do.
        ({"swa_window_size": 5}, {"layer_types": FULL, "sliding_window": None}, (0, 0, 0), ("swa_window_size",)),
        ({"swa_window_size": 5}, {"sliding_window": None}, (5, 5, 0), ()),
        ({"swa_window_size": 7}, {}, (7, 7, 0), ()),
        ({"swa_window_size": 5, "use_swa": False}, {}, (7, 7, 0), ()),
    ],
)
def test_swa_window_size_without_use_swa(
    tmp_path: Path, inner: dict[str, Any], top: dict[str, Any], windows: tuple[int, ...], unread: tuple[str, ...]
) -> None:
    got = draft(tmp_path, changed(DRAFT, **top, dflash_config={**DRAFT["dflash_config"], **inner}))
    assert (got.windows, got.notes.unread) == (windows, unread)


# ---- contradictions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "top", "inner"),
    [
        ("block_size", 8, 16),
        ("mask_token_id", 94, 93),
        ("target_layer_ids", [0, 2, 3], [0, 2, 4]),
        ("final_logit_softcapping", 30.0, 15.0),
        ("draft_vocab_size", 96, 40),
        ("use_swa", True, False),
    ],
)
def test_a_draft_that_says_two_things_is_refused(tmp_path: Path, key: str, top: Any, inner: Any) -> None:
    config = changed(DRAFT, **{key: top}, dflash_config={**DRAFT["dflash_config"], key: inner})
    with pytest.raises(
        CheckpointError, match=rf"{key} is .* at top level and .* in dflash_config; required: one value"
    ):
        draft(tmp_path, config)


def test_saying_it_twice_and_saying_nothing_are_no_contradiction(tmp_path: Path) -> None:
    want = draft(tmp_path, DRAFT)
    for value in (8, None):
        assert draft(tmp_path, {**DRAFT, "dflash_config": {**DRAFT["dflash_config"], "block_size": value}}) == want


# ---- keys that nobody knows --------------------------------------------------------------------------------


def test_unknown_keys_are_listed_in_one_log_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    odd = {"zeta": 1, "alpha_beta": {"x": 2}, "nothing": None, "_name_or_path": "x", "mtp_num_hidden_layers": 1}
    one = write_checkpoint(tmp_path / "target", {**TARGET, **odd}, target_tensors(TARGET))
    two = write_checkpoint(tmp_path / "draft", {**DRAFT, **odd}, draft_tensors(DRAFT))
    for load, folder in ((load_target, one), (load_draft, two)):
        caplog.clear()
        load(folder)  # type: ignore[operator]
        (record,) = caplog.records
        assert record.getMessage() == f"config of {folder}: keys that are not known here and not read: alpha_beta, zeta"
    # The wrapper's own keys count, and those inside rope_parameters.
    rope = {**ROPE, "new": 3}
    found = target(tmp_path, wrapped(outer=1, text_config={**TARGET, "inner": 1, "rope_parameters": rope}))
    assert found.notes.unread == ("inner", "outer", "rope_parameters.new")


def test_unknown_keys_change_nothing(tmp_path: Path) -> None:
    assert target(tmp_path, {**TARGET, "zeta": 1}) == target(tmp_path, TARGET)
    assert draft(tmp_path, {**DRAFT, "zeta": 1}) == draft(tmp_path, DRAFT)


# What published configs have, by the reference's table of keys.
PUBLISHED_TARGET = {
    "attn_output_gate": True,
    "output_gate_type": "swish",
    "full_attention_interval": 4,
    "mamba_ssm_dtype": "float32",
    "mlp_only_layers": [],
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "partial_rotary_factor": 0.25,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "use_cache": True,
    "bos_token_id": None,
    "pad_token_id": 0,
    "torch_dtype": "bfloat16",
    "transformers_version": "5.0.0",
}
PUBLISHED_DRAFT = {
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "attention_dropout": 0.0,
    "max_position_embeddings": 262144,
    "max_window_layers": 5,
    "rope_scaling": None,
    "dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def test_known_files_leave_nothing_unread(tmp_path: Path) -> None:
    for folder in (
        *(FIXTURES / name for name in ("plain", "tied", "sharded", "bf16", "wrapped")),
        demo_pair_path() / "target",
    ):
        assert str(read_target_config(folder).notes) == ""
    for folder in (FIXTURES / "draft", demo_pair_path() / "draft"):
        assert str(read_draft_config(folder).notes) == ""
    assert str(target(tmp_path, {**TARGET, **PUBLISHED_TARGET}).notes) == ""
    assert str(draft(tmp_path, {**DRAFT, **PUBLISHED_DRAFT}).notes) == ""


# ---- the command line --------------------------------------------------------------------------------------


def hfk(capsys: pytest.CaptureFixture[str], *line: str) -> tuple[int, str, str]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        app(list(line), prog_name="hfk")
    seen = capsys.readouterr()
    return int(ended.value.code or 0), seen.out, seen.err


@pytest.mark.parametrize("container", [False, True])
@pytest.mark.parametrize("kind", ["Qwen3.5 target", "DFlash draft"])
def test_doctor_looks_at_a_checkpoint(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, kind: str, container: bool
) -> None:
    config = changed(TARGET if kind == "Qwen3.5 target" else DRAFT, zeta=1, rms_norm_eps=None)
    tensors = target_tensors(TARGET) if kind == "Qwen3.5 target" else draft_tensors(DRAFT)
    path = write_checkpoint(tmp_path / "it", config, {**tensors, "mtp.x": np.zeros(2)} if kind[0] == "Q" else tensors)
    if container:
        Conversion(path, "f32").write(tmp_path / "it.hfq", lambda tensor: None)
        path = tmp_path / "it.hfq"
    code, out, _ = hfk(capsys, "doctor", "--checkpoint", str(path), "--json")
    found = json.loads(out)["checkpoint"]
    assert code == 0
    assert found == {
        "path": str(path),
        "kind": kind,
        "tensors": len(tensors),
        "bytes": sum(x.nbytes for x in tensors.values()),
        "left_out": ["mtp.x"] if kind[0] == "Q" and not container else [],
        "unread_keys": ["zeta"],
        "assumed_keys": ["rms_norm_eps 1e-06"],
    }
    code, out, _ = hfk(capsys, "doctor", "--checkpoint", str(path))
    assert f"checkpoint {path}: a {kind} that can be loaded" in out
    assert "not known here and not read: zeta\n" in out
    assert "missing keys, taken as transformers does: rms_norm_eps 1e-06\n" in out


def test_doctor_refuses_what_could_not_be_loaded(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, changed(TARGET, num_experts=4), target_tensors(TARGET))
    code, _, err = hfk(capsys, "doctor", "--checkpoint", str(path))
    assert (code, "num_experts is 4 (a mixture of experts" in err) == (2, True)
    code, _, err = hfk(capsys, "doctor", "--checkpoint", str(tmp_path / "nowhere"))
    assert (code, "nowhere/config.json: cannot be read" in err) == (2, True)


def test_generate_says_what_it_did_not_read(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    demo = demo_pair_path() / "target"
    for file in demo.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((demo / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "zeta": 1}))
    line = ("generate", "--target", str(tmp_path), "--prompt", "x", "--kv-format", "f32", "--max-new-tokens", "2")
    code, _, err = hfk(capsys, *line, "--no-draft")
    assert (code, f"config of {tmp_path}: keys that are not known here and not read: zeta" in err) == (0, True)
