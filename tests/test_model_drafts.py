"""Drafts that bring more than the plain form: YaRN, a head, an embedding or a vocabulary of their own, scales and caps.

The forward pass is held against a float64 form written here from the formulas alone.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from model_lab import DRAFT, PROMPT, TARGET, changed, draft_tensors, target_tensors, write_checkpoint, write_file

from hipfire_kernels import CheckpointError
from hipfire_kernels.model import Engine, load_draft, load_target
from hipfire_kernels.model.attention import Float32Attention
from hipfire_kernels.model.convert import Conversion
from hipfire_kernels.model.draft_config import DraftConfig, read_draft_config
from hipfire_kernels.model.yarn import Yarn

VOCAB, HIDDEN, REDUCED, FULL = 96, 48, 40, ["full_attention"] * 3
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
DTYPES = {"<f4": "F32", "<f2": "F16", "<i8": "I64", "<i4": "I32", "|b1": "BOOL"}
RNG = np.random.default_rng(3)
EMBEDDING, HEAD, OWN_EMBEDDING, OWN_HEAD = (
    RNG.standard_normal((VOCAB, HIDDEN)).astype(np.float32) * s for s in (1, 1, 1, 1)
)
TARGET_IDS = np.sort(RNG.permutation(VOCAB)[:REDUCED])
D2T = TARGET_IDS - np.arange(REDUCED)


def save(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> Path:
    """A checkpoint folder in which every tensor keeps its own dtype."""
    header: dict[str, Any] = {}
    data = b""
    for name, x in tensors.items():
        span = [len(data), len(data) + x.nbytes]
        header[name] = {"dtype": DTYPES[x.dtype.str], "shape": list(x.shape), "data_offsets": span}
        data += x.tobytes()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_file(folder / "model.safetensors", header, data)
    return folder


def drafted(dflash: Mapping[str, Any] | None = None, **top: Any) -> dict[str, Any]:
    return changed(DRAFT, **top, dflash_config={**DRAFT["dflash_config"], **(dflash or {})})


def read(folder: Path, config: Mapping[str, Any]) -> DraftConfig:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return read_draft_config(folder)


# The naive form.


def yarn_angles(rope: Mapping[str, Any], dim: int) -> tuple[list[float], float]:
    """Radians per position of each pair, and the attention factor. The ramp's ends are found by bisection of the turns
    a pair makes within the original context, not by the closed form."""
    theta, factor, length = rope["rope_theta"], rope["factor"], rope["original_max_position_embeddings"]

    def end(wanted: float) -> float:
        low, high = -4.0 * dim, 4.0 * dim
        for _ in range(200):
            middle = (low + high) / 2
            turns = length * theta ** (-2 * middle / dim) / (2 * math.pi)
            low, high = (middle, high) if turns > wanted else (low, middle)
        return low

    first, last = end(rope.get("beta_fast", 32)), end(rope.get("beta_slow", 1))
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    angles = []
    for j in range(dim // 2):
        share = 0.0 if j <= first else 1.0 if j >= last else (j - first) / (last - first)
        plain = 1 / theta ** (2 * j / dim)
        angles.append((1 - share) * plain + share * plain / factor)
    return angles, rope.get("attention_factor", 1 + math.log(factor) / 10)


def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return weight * x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)


def turned(x: np.ndarray, positions: np.ndarray, rope: tuple[list[float], float]) -> np.ndarray:
    """x [rows, heads, dim] as complex numbers, multiplied by factor * exp(i angle)."""
    half = x.shape[-1] // 2
    spun = (x[..., :half] + 1j * x[..., half:]) * rope[1] * np.exp(1j * np.multiply.outer(positions, rope[0]))[:, None]
    return np.concatenate([spun.real, spun.imag], axis=-1)


def naive_logits(
    t: Mapping[str, np.ndarray],
    taps: np.ndarray,
    block: np.ndarray,
    rope: tuple[list[float], float],
    windows: list[int],
    causal: list[bool],
    head: np.ndarray,
) -> np.ndarray:
    """Logits of rows 1.. of a block after the context `taps`, before any scale: no cache, all of it at once."""
    t = {name: x.astype(np.float64) for name, x in t.items()}
    context = norm(taps.astype(np.float64) @ t["fc.weight"].T, t["hidden_norm.weight"])
    x, n = block.astype(np.float64), len(taps)
    positions = np.arange(n + len(x))
    for i, (window, forward) in enumerate(zip(windows, causal, strict=True)):
        w = {name.removeprefix(f"layers.{i}."): v for name, v in t.items() if name.startswith(f"layers.{i}.")}
        a = {name[10:16]: v for name, v in w.items() if name.startswith("self_attn")}
        hidden = norm(x, w["input_layernorm.weight"])
        source = np.concatenate([context, hidden])
        q = (hidden @ a["q_proj"].T).reshape(len(x), 4, 32)
        k, v = ((source @ a[name].T).reshape(-1, 2, 32).repeat(2, axis=1) for name in ("k_proj", "v_proj"))
        q = turned(norm(q, a["q_norm"]), positions[n:], rope)
        k = turned(norm(k, a["k_norm"]), positions, rope)
        away = positions[n:, None] - positions
        hide = (forward & (away < 0)) | ((window > 0) & (abs(away) >= window))
        scores = np.where(hide[None], -np.inf, np.einsum("qhd,khd->hqk", q, k) / math.sqrt(32))
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v).reshape(len(x), -1)
        x = x + out @ a["o_proj"].T
        hidden = norm(x, w["post_attention_layernorm.weight"])
        gate, up = hidden @ w["mlp.gate_proj.weight"].T, hidden @ w["mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w["mlp.down_proj.weight"].T
    return norm(x[1:], t["norm.weight"]) @ head.astype(np.float64).T


PLAIN_ANGLES = ([1e4 ** (-j / 16) for j in range(16)], 1.0)
SSF, SSF_CAUSAL = [7, 7, 0], [True, True, False]
OWN = {"embed_tokens.weight": OWN_EMBEDDING, "lm_head.weight": OWN_HEAD}
SMALL = {"lm_head.weight": OWN_HEAD[:REDUCED], "d2t": D2T, "t2d": np.isin(np.arange(VOCAB), TARGET_IDS)}

# Per variant: dflash_config, top level, tensors beside the usual, and what differs in the naive form.
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, np.ndarray], dict[str, Any]]] = {
    "yarn": ({}, {"rope_parameters": YARN}, {}, {"rope": yarn_angles(YARN, 32)}),
    "yarn with an attention factor": (
        {},
        {"rope_parameters": {**YARN, "attention_factor": 0.8}},
        {},
        {"rope": yarn_angles({**YARN, "attention_factor": 0.8}, 32)},
    ),
    "a partial factor taken from the target": (
        {},
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}},
        {},
        {},
    ),
    "own head": ({}, {}, {"lm_head.weight": OWN_HEAD}, {"head": OWN_HEAD}),
    "own embedding": ({}, {}, {"embed_tokens.weight": OWN_EMBEDDING}, {"embedding": OWN_EMBEDDING}),
    "own both": ({}, {}, OWN, {"embedding": OWN_EMBEDDING, "head": OWN_HEAD}),
    "own both, tie_word_embeddings": (
        {},
        {"tie_word_embeddings": True},
        OWN,
        {"embedding": OWN_EMBEDDING, "head": OWN_HEAD},
    ),
    "tied": (
        {},
        {"tie_word_embeddings": True},
        {"embed_tokens.weight": OWN_EMBEDDING},
        {"embedding": OWN_EMBEDDING, "head": OWN_EMBEDDING},
    ),
    "tied to nothing": ({}, {"tie_word_embeddings": True}, {}, {}),
    "reduced": ({}, {"draft_vocab_size": REDUCED}, SMALL, {"head": OWN_HEAD[:REDUCED], "ids": TARGET_IDS}),
    "input scale": ({"input_embedding_scale": 3.5}, {}, {}, {"input": 3.5}),
    "output scale and cap": (
        {"output_multiplier": 2.5, "final_logit_softcapping": 25.0},
        {},
        {},
        {"output": 2.5, "cap": 25.0},
    ),
    "a cap at top level": ({}, {"final_logit_softcapping": 3.0}, {}, {"cap": 3.0}),
    "use_swa": (
        {"use_swa": True, "swa_window_size": 5},
        {"layer_types": FULL, "sliding_window": None},
        {},
        {"windows": [5, 5, 5], "causal": [False] * 3},
    ),
    "use_swa of sliding layers": (
        {"use_swa": True, "swa_window_size": 5},
        {"sliding_window": None},
        {},
        {"windows": [5, 5, 0]},
    ),
    "is_causal": ({}, {"is_causal": True}, {}, {"causal": [True] * 3}),
    "not causal": ({"causal": False}, {}, {}, {"causal": [False] * 3}),
    "all of it": (
        {"input_embedding_scale": 0.5, "output_multiplier": 3.0, "final_logit_softcapping": 9.0, "causal": True},
        {"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": YARN, "draft_vocab_size": REDUCED},
        {**SMALL, "embed_tokens.weight": OWN_EMBEDDING},
        {
            **{"rope": yarn_angles(YARN, 32), "embedding": OWN_EMBEDDING, "head": OWN_HEAD[:REDUCED], "cap": 9.0},
            **{"ids": TARGET_IDS, "input": 0.5, "output": 3.0, "causal": [True] * 3},
        },
    ),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_proposals_equal_the_naive_form(tmp_path: Path, variant: str, dtype: Any) -> None:
    dflash, top, extra, naive = VARIANTS[variant]
    config = drafted(dflash, **top)
    tensors = {
        name: x.astype(dtype) if x.dtype == np.float32 else x for name, x in (draft_tensors(config) | extra).items()
    }
    draft = load_draft(save(tmp_path, config, tensors))
    target: Any = SimpleNamespace(embedding=EMBEDDING, head=lambda hidden: hidden @ HEAD.T)
    sessions = [draft.session(target, Float32Attention(Counter())) for _ in range(2)]
    as_stored = {name: naive[name].astype(dtype) for name in ("embedding", "head") if name in naive}
    taps = np.random.default_rng(2).standard_normal((23, 3 * HIDDEN)).astype(np.float32)
    for begin, end, rows, anchor in ((0, 14, 8, 10), (14, 15, 5, 11), (15, 23, 8, 12)):
        block = as_stored.get("embedding", EMBEDDING)[[anchor] + [94] * (rows - 1)].astype(np.float64)
        want = naive.get("output", 1.0) * naive_logits(
            tensors,
            taps[:end],
            block * naive.get("input", 1.0),
            naive.get("rope", PLAIN_ANGLES),
            naive.get("windows", SSF),
            naive.get("causal", SSF_CAUSAL),
            as_stored.get("head", HEAD),
        )
        if "cap" in naive:
            want = naive["cap"] * np.tanh(want / naive["cap"])
        for session in sessions:
            session.extend(range(begin, end), taps[begin:end])
        logits = sessions[0].logits(anchor, rows)
        assert logits.dtype == np.float32
        np.testing.assert_allclose(logits, want, atol=5e-5)
        best = want.argmax(axis=1)
        ids = naive.get("ids", np.arange(VOCAB))
        assert sessions[1].propose(anchor, rows) == ids[best].tolist()


def test_the_variants_tell_themselves_apart_from_the_plain_form() -> None:
    """The naive form itself reacts to everything the table varies, so that agreeing with it means something."""
    tensors = draft_tensors(DRAFT)
    taps = np.random.default_rng(2).standard_normal((9, 3 * HIDDEN))
    plain = naive_logits(tensors, taps, EMBEDDING[:8], PLAIN_ANGLES, SSF, SSF_CAUSAL, HEAD)
    scaled = yarn_angles(YARN, 32)
    for rope in (scaled, (scaled[0], 1.0), (PLAIN_ANGLES[0], scaled[1])):
        assert abs(naive_logits(tensors, taps, EMBEDDING[:8], rope, SSF, SSF_CAUSAL, HEAD) - plain).max() > 1e-2


# YaRN.


@pytest.mark.parametrize(
    ("dim", "theta", "length", "changes"),
    [
        (128, 1e6, 32768, {}),
        (128, 1e7, 32768, {"factor": 2.5}),
        (64, 150000.0, 4096, {"factor": 32.0, "truncate": False}),
        (128, 1e6, 8192, {"beta_fast": 16.0, "beta_slow": 2.0}),
        (32, 1e4, 64, {}),
        (32, 1e4, 6, {}),
        (16, 100.0, 1 << 20, {}),
    ],
)
def test_yarn_frequencies(dim: int, theta: float, length: int, changes: dict[str, Any]) -> None:
    rope = {**YARN, "rope_theta": theta, "original_max_position_embeddings": length, **changes}
    want, _ = yarn_angles(rope, dim)
    settings = {name: rope[name] for name in ("beta_fast", "beta_slow", "truncate") if name in rope}
    got = Yarn(rope["factor"], length, 1.0, **settings).frequencies(dim, theta)
    np.testing.assert_allclose(got, want, rtol=1e-12)


def test_yarn_frequencies_of_the_usual_setting() -> None:
    """Worked by hand for theta 1e6, 32768 positions, dim 128: 32 turns at index 23.6, one at 39.7, so a ramp 23..40."""
    got = Yarn(4.0, 32768, 1.0).frequencies(128, 1e6)
    plain = 10.0 ** (-6 * np.arange(64) / 64)
    np.testing.assert_allclose(got[:24], plain[:24], rtol=1e-12)
    np.testing.assert_allclose(got[40:], plain[40:] / 4, rtol=1e-12)
    np.testing.assert_allclose(got[31] / plain[31], 1 - 0.75 * 8 / 17, rtol=1e-12)


def test_both_spellings_of_yarn_mean_the_same(tmp_path: Path) -> None:
    new = read(tmp_path, drafted(rope_parameters=YARN))
    assert new.yarn == Yarn(4.0, 64, pytest.approx(1.1386294361119891), 32.0, 1.0, True)
    inner = changed(YARN, rope_theta=None, rope_type=None, type="yarn")
    old = drafted(rope_parameters=None, rope_theta=1e4, rope_scaling=inner)
    assert read(tmp_path, old) == new
    inner = {**inner, "rope_type": "yarn", "attention_factor": None, "beta_fast": None}
    assert read(tmp_path, drafted(rope_parameters=None, rope_theta=1e4, rope_scaling=inner)) == new


@pytest.mark.parametrize(
    ("changes", "positions", "want"),
    [
        ({"factor": 1.0}, None, (1.0, 64, 1.0)),
        ({"attention_factor": 0.5}, None, (4.0, 64, 0.5)),
        ({"mscale": 2.0}, None, (4.0, 64, 1.1386294361119891)),
        ({"mscale": 2.0, "mscale_all_dim": 1.0}, None, (4.0, 64, 1.2772588722239781 / 1.1386294361119891)),
        ({"factor": None}, 512, (8.0, 64, 1.2079441541679836)),
        ({"factor": 2.0}, 512, (2.0, 64, 1.0693147180559945)),
        ({"original_max_position_embeddings": None}, 512, (4.0, 512, 1.1386294361119891)),
    ],
)
def test_what_yarn_takes_from_where(
    tmp_path: Path, changes: dict[str, Any], positions: int | None, want: tuple[float, int, float]
) -> None:
    config = drafted(rope_parameters={**YARN, **changes}, max_position_embeddings=positions)
    yarn = read(tmp_path, config).yarn
    assert yarn is not None
    assert (yarn.factor, yarn.original_positions, yarn.attention_factor) == pytest.approx(want)


# Refusals.

TWICE = {"rope_scaling": {"rope_type": "yarn"}}
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"conv_kernel_size": 2}, {}, r"conv_kernel_size is 2 \(taps of the convolutions of DFlash 2"),
    ({"conv_group_size": 16}, {}, r"conv_group_size is 16 \(channels per group of the convolutions of DFlash 2"),
    ({"selector_rank": 256}, {}, r"selector_rank is 256 \(rank of the candidate selector of DFlash 2"),
    ({"selector_top_k": 16}, {}, r"selector_top_k is 16 \(candidates of the candidate selector of DFlash 2"),
    ({}, {"selector_top_k": 16}, "selector_top_k is 16"),
    ({"sample_from_anchor": True}, {}, r"sample_from_anchor is True \(a proposal from the anchor's own row"),
    ({"attention_sink_bias": True}, {}, r"attention_sink_bias is True \(a learned sink"),
    ({"whatever": 1}, {}, "whatever is set"),
    ({"input_embedding_scale": 0}, {}, "input_embedding_scale is 0; it must be a positive number"),
    ({"output_multiplier": -1.0}, {}, "output_multiplier is -1.0; it must be a positive number"),
    ({"final_logit_softcapping": -1}, {}, "final_logit_softcapping is -1; it must be a positive number"),
    ({"final_logit_softcapping": "30"}, {}, "final_logit_softcapping is '30'"),
    ({"causal": 1}, {}, "causal is 1; it must be true, false or absent"),
    ({}, {"is_causal": "yes"}, "is_causal is 'yes'"),
    ({"causal": True}, {"is_causal": False}, r"causal is True; it must be what is_causal is \(False\)"),
    ({"use_swa": "on"}, {}, "use_swa is 'on'"),
    ({"use_swa": True}, {}, "required key 'swa_window_size' is missing"),
    ({"use_swa": True, "swa_window_size": 0}, {}, "swa_window_size is 0"),
    ({"use_swa": True, "swa_window_size": 5}, {}, r"swa_window_size is 5; it must be equal to sliding_window \(7\)"),
    ({}, {"draft_vocab_size": 97}, r"draft_vocab_size is 97; it must be at most vocab_size \(96\)"),
    ({"draft_vocab_size": 0}, {}, "draft_vocab_size is 0"),
    ({}, TWICE, "rope_type is default and yarn; it must be one of them"),
    ({}, {"rope_parameters": {**YARN, "rope_type": "longrope"}}, "rope_type is 'longrope'"),
    ({}, {"rope_parameters": {**YARN, "factor": 0.5}}, "factor is 0.5; it must be a number of at least 1"),
    (
        {},
        {"rope_parameters": {**YARN, "beta_slow": 40}},
        "'beta_fast' is missing; it must be a number above",
    ),
    ({}, {"rope_parameters": {**YARN, "rope_theta": 1.0}}, "rope_theta is 1.0; it must be a number above 1"),
    ({}, {"rope_parameters": {**YARN, "attention_factor": -1}}, "attention_factor is -1"),
    ({}, {"rope_parameters": {**YARN, "truncate": "no"}}, "truncate is 'no'"),
    ({}, {"rope_parameters": {**YARN, "attn_factor": 2}}, r"\(rope_parameters\): attn_factor is set; YaRN with it"),
    ({}, {"rope_parameters": changed(YARN, factor=None)}, "required key 'max_position_embeddings' is missing"),
    (
        {},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}, "max_position_embeddings": 64},
        "required key 'factor' is missing",
    ),
]


@pytest.mark.parametrize(("dflash", "top", "message"), REFUSED)
def test_refused_setting_is_named(tmp_path: Path, dflash: dict[str, Any], top: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, drafted(dflash, **top))


def test_settings_that_ask_for_nothing_are_taken(tmp_path: Path) -> None:
    plain = {"conv_kernel_size": 0, "selector_rank": None, "sample_from_anchor": False}
    for cap in (None, 0, 0.0):
        config = drafted({**plain, "final_logit_softcapping": cap, "swa_window_size": 5, "use_swa": False})
        assert read(tmp_path, config) == read(tmp_path, drafted())


# The vocabulary map.


def reduced(folder: Path, **tensors: Any) -> Path:
    config = drafted(draft_vocab_size=REDUCED)
    merged = draft_tensors(config) | SMALL | tensors
    return save(folder, config, {name: x for name, x in merged.items() if x is not None})


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.float32])
def test_the_map_holds_offsets_in_whatever_numbers(tmp_path: Path, dtype: Any) -> None:
    ids = load_draft(reduced(tmp_path, d2t=D2T.astype(dtype))).target_ids
    assert ids is not None
    assert ids.dtype == np.int64
    np.testing.assert_array_equal(ids, TARGET_IDS)


def moved(at: int, target_id: int) -> np.ndarray:
    offsets = D2T.copy()
    offsets[at] = target_id - at
    return offsets


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"d2t": moved(5, 96)}, r"d2t\[5\] is 91, which makes draft id 5 the target id 96; required: .* from 0 to 95"),
        ({"d2t": moved(5, -1)}, r"d2t\[5\] is -6, which makes draft id 5 the target id -1"),
        ({"d2t": moved(5, 1 << 40)}, r"d2t\[5\] is 1\.09951e\+12"),
        ({"d2t": np.full(REDUCED, 1e30, np.float32)}, r"d2t\[0\] is 1e\+30"),
        ({"d2t": (D2T + 0.5).astype(np.float32)}, r"d2t\[0\] is .*\.5"),
        ({"d2t": moved(5, int(TARGET_IDS[6]))}, "two draft ids to one target id"),
        ({"d2t": TARGET_IDS}, r"d2t\[\d+\] is \d+, which makes"),
        ({"d2t": None}, "missing 'd2t'; a vocabulary of the draft's own"),
        ({"lm_head.weight": None}, r"missing 'lm_head\.weight'; a vocabulary"),
        ({"lm_head.weight": OWN_HEAD}, r"lm_head\.weight \(96, 48\) \(config\.json needs \(40, 48\)\)"),
        ({"d2t": D2T[:-1]}, r"d2t \(39,\) \(config\.json needs \(40,\)\)"),
        ({"embed_tokens.weight": OWN_EMBEDDING[:REDUCED]}, r"embed_tokens\.weight \(40, 48\)"),
        ({"norm.weight": np.ones(HIDDEN, np.int64)}, r"stored as whole numbers: 'norm\.weight'"),
        ({"layers.0.attention_conv.base_kernel": np.ones((2, 2, 48), np.float32)}, "extra 'layers.0.attention_conv"),
    ],
)
def test_map_and_head_that_do_not_fit_are_refused(tmp_path: Path, tensors: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_draft(reduced(tmp_path, **tensors))


def test_a_map_without_a_head_is_refused(tmp_path: Path) -> None:
    tensors = draft_tensors(DRAFT) | {"d2t": np.zeros(VOCAB, np.int64)}
    with pytest.raises(CheckpointError, match=r"missing 'lm_head\.weight'"):
        load_draft(save(tmp_path, DRAFT, tensors))


@pytest.mark.parametrize("kind", ["f32", "mq4"])
def test_a_container_keeps_map_head_and_embedding(tmp_path: Path, kind: str) -> None:
    source = reduced(tmp_path / "source", **{"embed_tokens.weight": OWN_EMBEDDING})
    conversion = Conversion(source, kind)
    conversion.write(tmp_path / "draft.hfq", lambda tensor: None)
    assert conversion.skipped == ["t2d"]
    draft, again = load_draft(source), load_draft(tmp_path / "draft.hfq")
    np.testing.assert_array_equal(again.target_ids, TARGET_IDS)
    for one, two in ((draft.lm_head, again.lm_head), (draft.embedding, again.embedding)):
        assert one is not None
        np.testing.assert_allclose(two, one, atol=0 if kind == "f32" else 0.02)


def test_a_reduced_draft_speculates_for_a_real_target(tmp_path: Path) -> None:
    target = load_target(write_checkpoint(tmp_path / "target", TARGET, target_tensors(TARGET)))
    engine = Engine(target, load_draft(reduced(tmp_path / "draft")), kv_format="f32")
    alone = Engine(target, kv_format="f32")
    assert engine.generate(PROMPT, 24, stop=()).tokens == alone.generate(PROMPT, 24, stop=()).tokens
