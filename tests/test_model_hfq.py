"""The .hfq container: what is written is what a second reader finds, and every damaged file is refused by name."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import hfq_lab as lab
import numpy as np
import pytest
from hfq_lab import Row, build
from model_lab import BLOCKS, DRAFT, TARGET, changed, draft_tensors, target_tensors, write_checkpoint

from hipfire_kernels import CheckpointError, InputError
from hipfire_kernels.cli import app
from hipfire_kernels.model import Engine, Tokenizer, demo_pair_path, demo_prompts, load_draft, load_target
from hipfire_kernels.model import mq4 as mq4_module
from hipfire_kernels.model.checkpoint import Checkpoint
from hipfire_kernels.model.convert import FORMATS, Conversion, choose
from hipfire_kernels.model.hfq import QUANTS, Planned, read_container, write_container
from hipfire_kernels.model.loading import open_draft, open_target
from hipfire_kernels.model.mq4 import dequantize_mq4g256, quantize_mq4g256, rotate, unrotate
from hipfire_kernels.model.tensors import F32

DEMO = {"target": demo_pair_path() / "target", "draft": demo_pair_path() / "draft"}
OPEN: dict[str, Callable[[Path], Any]] = {"target": open_target, "draft": open_draft}
F16_MAX, NEW = 65504, 32


def convert(source: Path, out: Path, wanted: str) -> Path:
    Conversion(source, wanted).write(out, lambda tensor: None)
    return out


@pytest.fixture(scope="module")
def containers(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """The demo pair in every format."""
    folder = tmp_path_factory.mktemp("hfq")
    return {(r, f): convert(DEMO[r], folder / f"{r}-{f}.hfq", f) for r in DEMO for f in FORMATS}


# ---- MQ4G256 -----------------------------------------------------------------------------------------------


def test_signs_are_those_of_the_generator() -> None:
    for seed, ours in ((42, mq4_module._FIRST), (1042, mq4_module._SECOND)):
        np.testing.assert_array_equal(ours[:, 0], lab.signs(seed))
    assert "".join("+" if s > 0 else "-" for s in lab.signs(42)[:16]) == "++++-++-++----+-"


def test_transform_is_the_hadamard_matrix_between_the_signs() -> None:
    matrix = lab.rotation()
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(256), atol=1e-15)
    w = np.random.default_rng(0).standard_normal((9, 256)).astype(np.float32)
    np.testing.assert_allclose(rotate(w), w @ matrix.T, atol=2e-6)
    np.testing.assert_allclose(unrotate(w), w @ matrix, atol=2e-6)
    np.testing.assert_allclose(unrotate(rotate(w)), w, atol=2e-6)


def test_a_block_made_by_hand() -> None:
    codes = [i % 16 for i in range(256)]
    packed = bytes(codes[i] | codes[i + 1] << 4 for i in range(0, 256, 2))
    block = np.frombuffer(np.array([0.25, -1.5], "<f4").tobytes() + packed, np.uint8)
    want = (0.25 * np.array(codes) - 1.5) @ lab.rotation()
    np.testing.assert_allclose(dequantize_mq4g256(block[None]), want, atol=1e-6)


def weights(kind: str) -> np.ndarray:
    rng = np.random.default_rng(1)
    shape = (5, 3, 512)
    return {
        "normal": rng.standard_normal(shape),
        "heavy tails": rng.standard_t(2, shape),
        "zeros": np.zeros(shape),
        "one outlier": np.where(np.arange(512) == 7, 1e6, rng.standard_normal(shape)),
        "least": rng.choice([0, 1e-45, 1e-40], shape),
        "large": rng.uniform(-1e36, 1e36, shape),
        "many groups": rng.standard_normal((1100, 2, 256)),
    }[kind].astype(np.float32)


@pytest.mark.parametrize("kind", ["normal", "heavy tails", "zeros", "one outlier", "least", "large", "many groups"])
def test_error_of_a_group_is_at_most_eight_scales(kind: str) -> None:
    w = weights(kind)
    with np.errstate(divide="raise", invalid="raise"):
        blocks = quantize_mq4g256(w)
    assert blocks.shape == (*w.shape[:-1], w.shape[-1] // 256, 136)
    back = dequantize_mq4g256(blocks)
    assert back.shape == w.shape
    error = (back.astype(np.float64) - w).reshape(-1, 256)
    scales = np.ascontiguousarray(blocks[..., :4]).view("<f4").reshape(-1).astype(np.float64)
    rounding = 1e-5 * np.abs(w).max()  # of float32, through two transforms
    assert (np.linalg.norm(error, axis=1) <= 8 * scales + rounding).all()
    if kind in ("normal", "many groups"):
        assert 0.09 < np.sqrt(np.mean(error**2)) < 0.12
    if kind in ("zeros", "normal"):
        np.testing.assert_array_equal(quantize_mq4g256(w.astype(np.float64)), blocks)


def test_a_step_that_float32_rounds_down_stays_in_four_bits() -> None:
    """One weight of 176 least units: 22 units between -11 and 11 make a step of 22/15, which is stored as 1."""
    w = np.where(np.arange(256) == 9, 176 * 2.0**-149, 0).astype(np.float32)
    codes = quantize_mq4g256(w)[0, 8:]
    assert set(codes % 16) | set(codes // 16) == {0, 15}


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.zeros(256, np.int32), "dtype int32"),
        (np.zeros((2, 255), np.float32), r"shape \(2, 255\); required: a last extent that is a multiple of 256"),
        (np.float32(1), r"shape \(\)"),
        (np.full(256, np.nan, np.float32), "NaN, infinity"),
        (np.full(256, np.inf, np.float32), "NaN, infinity"),
        (np.full(256, 3e38, np.float32), "overflows float32"),
    ],
)
def test_what_has_no_code_is_refused(x: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        quantize_mq4g256(x)


@pytest.mark.parametrize("x", [np.zeros((1, 135), np.uint8), np.zeros(136, np.uint8), np.zeros((1, 136), np.int8)])
def test_blocks_of_another_form_are_refused(x: Any) -> None:
    with pytest.raises(InputError, match=r"required: uint8 \[\.\.\., n // 256, 136\]"):
        dequantize_mq4g256(x)


# ---- the demo pair in every format -------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", FORMATS)
@pytest.mark.parametrize("role", DEMO)
def test_a_second_reader_finds_what_was_written(
    containers: dict[tuple[str, str], Path], role: str, wanted: str
) -> None:
    path = containers[role, wanted]
    _, original = OPEN[role](DEMO[role])
    _, ours = OPEN[role](path)
    header, metadata, rows = lab.parse(path.read_bytes())
    assert header["version"] == 1
    assert header["arch_id"] == {"target": 5, "draft": 20}[role]
    assert header["data_offset"] % 4096 == 0
    assert header["data_offset"] + sum(len(row.data) for row in rows.values()) == path.stat().st_size
    assert metadata["config"] == json.loads((DEMO[role] / "config.json").read_text())
    assert rows.keys() == {entry.name for entry in original.entries.values()}
    for name, entry in list(original.entries.items())[:: 1 if role == "draft" else 5]:
        row, got, want = rows[entry.name], ours.read(name), original.read(name)
        assert row.group_size == lab.GROUP_SIZE[row.quant_type]
        assert row.dims == want.shape == got.shape
        reading = lab.values(row)
        if row.quant_type == 13:
            np.testing.assert_allclose(got, reading, atol=1e-6 * np.abs(reading).max())
            length = np.linalg.norm((reading - want).reshape(-1, 256), axis=1)
            assert (length <= 8 * lab.mq4_scales(row) * (1 + 1e-5)).all()
            assert np.linalg.norm(reading - want) < 0.12 * np.linalg.norm(want)
        else:
            np.testing.assert_array_equal(got, reading.astype(np.float32))
            limit = {1: 2.0**-11, 2: 0, 3: 2.0**-7}[row.quant_type]
            np.testing.assert_allclose(got, want, rtol=0, atol=limit * np.abs(want).max())


def generated(target: Path, draft: Path, index: int) -> tuple[list[int], float, list[int]]:
    """Tokens and tau with speculation, and the tokens without."""
    engine = Engine(load_target(target), load_draft(draft), kv_format="f32")
    prompt = Tokenizer(target).encode(demo_prompts()[index])
    result = engine.generate(prompt, NEW, **BLOCKS)
    return result.tokens, result.tau, engine.generate(prompt, NEW, block_size=1).tokens


def test_models_run_from_containers(containers: dict[tuple[str, str], Path]) -> None:
    folders = generated(DEMO["target"], DEMO["draft"], 0)
    runs = {f: generated(containers["target", f], containers["draft", f], 0) for f in FORMATS}
    assert runs["f32"] == folders
    for tokens, _, plain in runs.values():
        assert tokens == plain
    for wanted, least in (("f16", NEW), ("q8", NEW // 2), ("mq4", 3)):
        agreed = int(np.argmin(np.equal(runs[wanted][0], folders[0]))) or NEW * (runs[wanted][0] == folders[0])
        assert agreed >= least, wanted
        assert runs[wanted][1] > 0.5 * folders[1], wanted


def test_weights_of_the_f32_container_are_equal_bit_for_bit(containers: dict[tuple[str, str], Path]) -> None:
    for role in DEMO:
        _, original = OPEN[role](DEMO[role])
        _, ours = OPEN[role](containers[role, "f32"])
        assert original.entries.keys() == ours.entries.keys()
        for name in original.entries:
            np.testing.assert_array_equal(ours.read(name).view(np.uint32), original.read(name).view(np.uint32))


def test_tokenizer_comes_from_the_metadata(containers: dict[tuple[str, str], Path]) -> None:
    text = "def naïve(): return '🎉'"
    assert Tokenizer(containers["target", "q8"]).encode(text) == Tokenizer(DEMO["target"]).encode(text)
    with pytest.raises(CheckpointError, match=r"holds no tokenizer\.json"):
        Tokenizer(containers["draft", "q8"])


# ---- which format a tensor gets ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape", "mq4", "q8", "f16"),
    [
        ("layers.0.mlp.up_proj.weight", (3, 512), "MQ4G256", "Q8F16", "F16"),
        ("layers.0.mlp.up_proj.weight", (256, 96), "Q8F16", "Q8F16", "F16"),
        ("layers.0.mlp.up_proj.weight", (256, 48), "F32", "F32", "F16"),
        ("fc.weight", (256, 768), "MQ4G256", "Q8F16", "F16"),
        ("embed_tokens.weight", (4096, 256), "Q8F16", "Q8F16", "F16"),
        ("lm_head.weight", (4096, 256), "Q8F16", "Q8F16", "F16"),
        ("embed_tokens.weight", (4096, 48), "F32", "F32", "F16"),
        ("norm.weight", (256,), "F32", "F32", "F32"),
        ("layers.0.linear_attn.conv1d.weight", (768, 1, 256), "F32", "F32", "F32"),
        ("layers.0.linear_attn.A_log", (256,), "F32", "F32", "F32"),
    ],
)
def test_format_of_a_tensor(name: str, shape: tuple[int, ...], mq4: str, q8: str, f16: str) -> None:
    assert [choose(name, shape, wanted).name for wanted in ("mq4", "q8", "f16", "f32")] == [mq4, q8, f16, "F32"]


def test_names_are_kept_and_foreign_parts_left_out(tmp_path: Path) -> None:
    foreign = {"model.visual.x": np.zeros(2), "mtp.fc.weight": np.zeros((2, 2))}
    stored = {"lm_head.weight" if n == "lm_head.weight" else f"model.{n}": x for n, x in target_tensors(TARGET).items()}
    source = write_checkpoint(tmp_path / "source", TARGET, stored)
    rich = write_checkpoint(tmp_path / "rich", TARGET, {**stored, **foreign}, shards=2)
    conversion = Conversion(rich, "q8")
    assert sorted(conversion.skipped) == sorted(foreign)
    conversion.write(tmp_path / "rich.hfq", lambda tensor: None)
    _, _, rows = lab.parse((tmp_path / "rich.hfq").read_bytes())
    assert rows.keys() == stored.keys()
    got, want = load_target(convert(source, tmp_path / "f32.hfq", "f32")), load_target(source)
    np.testing.assert_array_equal(got.lm_head, want.lm_head)


# ---- damaged files -----------------------------------------------------------------------------------------

RNG = np.random.default_rng(3)
ROWS = [
    Row(b"a", 2, (2, 3), RNG.standard_normal(6).astype("<f4").tobytes()),
    Row("b.\N{LATIN SMALL LETTER E WITH ACUTE}".encode(), 1, (4,), RNG.standard_normal(4).astype("<f2").tobytes()),
    Row(b"c", 3, (2, 32), np.array([0.5], "<f2").tobytes() + bytes(range(32)) + b"\0\x3c" + bytes(range(200, 232))),
    Row(b"d", 13, (1, 256), np.array([0.5, -2], "<f4").tobytes() + bytes(range(128))),
]
METADATA = json.dumps({"config": {"braces": '}{"\\'}, "more": [{}, {"é": 1}]}, ensure_ascii=False).encode()
GOOD = build(ROWS, METADATA)
EXPECTED = {row.name.decode(): row.dims for row in ROWS}


def opened(path: Path, data: bytes) -> Checkpoint:
    path.write_bytes(data)
    return Checkpoint(path, EXPECTED, lambda name: name)


def test_a_sound_file_of_every_format(tmp_path: Path) -> None:
    for data in (GOOD, build(ROWS, METADATA, padding=b""), build(ROWS, METADATA, padding=bytes(4095))):
        checkpoint = opened(tmp_path / "x.hfq", data)
        assert read_container(tmp_path / "x.hfq").metadata == json.loads(METADATA)
        for row in ROWS:
            np.testing.assert_allclose(checkpoint.read(row.name.decode()), lab.values(row), atol=1e-5)
    assert lab.parse(GOOD)[1] == json.loads(METADATA)


def test_the_writer_makes_the_same_bytes(tmp_path: Path) -> None:
    """The plain writer and the package's, from the same values."""
    opened(tmp_path / "x.hfq", GOOD)
    tensors = [r for r in ROWS if r.quant_type != 3]  # not every Q8 block is one that the quantiser makes
    planned = [Planned(r.name.decode(), QUANTS[r.quant_type].format, r.dims) for r in tensors]
    data = [lab.values(r).astype(np.float32) for r in tensors]
    tensors[-1] = replace(tensors[-1], data=quantize_mq4g256(data[-1]).tobytes())
    write_container(tmp_path / "y.hfq", 20, {"config": {"é": '}"'}}, planned, data)
    metadata = json.dumps({"config": {"é": '}"'}}).encode()
    assert (tmp_path / "y.hfq").read_bytes() == build(tensors, metadata, header={"arch_id": 20})


def head(**fields: Any) -> bytes:
    return build(ROWS, METADATA, header=fields)


def row(index: int, **fields: Any) -> bytes:
    rows = list(ROWS)
    rows[index] = replace(rows[index], **fields)
    return build(rows, METADATA)


def tail(cut: int) -> bytes:
    return GOOD[: len(GOOD) - cut]


OFFSET = lab.parse(GOOD)[0]["data_offset"]
FOREIGN = {
    0: "Q4F16G64", 4: "Q4K", 5: "Q8HFQ", 6: "HFQ4G256", 7: "HFQ4G128", 8: "HFQ6G256", 9: "HFQ2G256", 10: "HFQ2G128",
    11: "HFQ3G256", 12: "HFQ3G128", 14: "MQ8G256", 19: "MQ2G256Lloyd", 15: "unknown", 255: "unknown",
}  # fmt: skip
DAMAGE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", r"begins with b'', a \.hfq container with b'HFQM'"),
    "another format": (b"GGUF" + GOOD[4:], "begins with b'GGUF'"),
    "half a header": (GOOD[:20], "20 bytes, the header alone has 32"),
    "version 0": (head(version=0), "version is 0, required: 1"),
    "version 2": (head(version=2), "version is 2, required: 1"),
    "arch_id": (head(arch_id=7), r"arch_id is 7, known: 5 \(dense Qwen3\.5\)"),
    "fewer tensors in the header": (head(n_tensors=3), "the header counts 3 tensors, the table 4"),
    "more tensors in the header": (head(n_tensors=5), "the header counts 5 tensors, the table 4"),
    "fewer tensors in the table": (build(ROWS, METADATA, count=3), "the header counts 4 tensors, the table 3"),
    "more in both": (build(ROWS, METADATA, count=5, header={"n_tensors": 5}, padding=b""), r"tensor 4 .* data_offset"),
    "fewer in both": (build(ROWS, METADATA, count=3, header={"n_tensors": 3}), "136 bytes after the last tensor"),
    "a billion in both": (
        build(ROWS, METADATA, count=10**9, header={"n_tensors": 10**9}, padding=b""),
        r"tensor 4 of the table needs the bytes \d+ to \d+, data_offset is \d+",
    ),
    "metadata_offset": (head(metadata_offset=33), "metadata_offset is 33, required: 32"),
    "data_offset 0": (head(data_offset=0), "data_offset is 0 in a file of"),
    "data_offset in the header": (head(data_offset=32), "required: above 32"),
    "data_offset in the metadata": (head(data_offset=40), "metadata of .* not valid JSON"),
    "data_offset in the table": (head(data_offset=32 + len(METADATA) + 30), r"needs the bytes \d+ to \d+"),
    "data_offset one less": (head(data_offset=OFFSET - 1), "1 bytes after the last tensor"),
    "data_offset one more": (head(data_offset=OFFSET + 1), r"'d' ends at byte \d+, the file has \d+"),
    "data_offset at the end": (head(data_offset=len(GOOD)), r"'a' ends at byte \d+, the file has \d+"),
    "data_offset beyond the file": (head(data_offset=len(GOOD) + 1), "truncated"),
    "data_offset huge": (head(data_offset=2**63), "truncated"),
    "padding of a page": (build(ROWS, METADATA, padding=bytes(4096)), "fewer than 4096 bytes, all zero"),
    "padding not zero": (build(ROWS, METADATA, padding=b"\0\1"), "all zero"),
    "bytes after the end": (build(ROWS, METADATA, trailing=b"x"), "1 bytes after the last tensor"),
    "no metadata": (build(ROWS, b""), "metadata of .* not valid JSON"),
    "metadata never ends": (build(ROWS, METADATA[:-1]), "metadata of .* not valid JSON"),
    "string never ends": (build(ROWS, b'{"config": "'), "metadata of .* not valid JSON"),
    "metadata is a list": (build(ROWS, b"[]"), "a JSON list, an object is required"),
    "a key twice": (build(ROWS, b'{"a": 1, "a": 2}'), "'a' listed twice"),
    "metadata not UTF-8": (build(ROWS, b'{"a": "\xff"}'), "metadata of .* not UTF-8"),
    "metadata too deep": (build(ROWS, b'{"a":' * 100_000), "not valid JSON"),
    "name length 0": (row(0, name_length=0), "quant_type 97"),
    "name one shorter": (row(1, name_length=3), "not UTF-8"),
    "name one longer": (row(0, name_length=2), r"quant_type 2|'a\\x02'"),
    "name longest": (row(3, name_length=65535), r"tensor 3 .* needs the bytes"),
    "name not UTF-8": (row(1, name=b"b\xff"), r"the name of tensor 1 of the table is b'b\\xff', not UTF-8"),
    "name twice": (row(2, name=b"a"), "'a' stands in the table twice"),
    "another name": (row(2, name=b"e"), "missing 'c'; extra 'e'"),
    "too many dims": (
        build([*ROWS[:3], replace(ROWS[3], n_dims=255)], METADATA, padding=b""),
        r"tensor 'd' needs the bytes",
    ),
    "a dim more": (row(0, n_dims=3), "'a': group_size is 24, F32 has 0"),
    "a dim less": (row(0, n_dims=1), "'a': group_size is 3, F32 has 0"),
    "no dims": (row(0, n_dims=0), "'a': group_size is 2, F32 has 0"),
    "dim too large": (row(0, dims=(2, 4)), r"data_size is 24, F32 \(2, 4\) needs 32"),
    "dim zero": (row(0, dims=(2, 0)), r"data_size is 24, F32 \(2, 0\) needs 0"),
    "dims that overflow": (row(0, dims=(2**31, 2**31, 6)), "data_size is 24"),
    "dims swapped": (row(0, dims=(3, 2)), r"wrong shape: .*a \(3, 2\) \(config\.json needs \(2, 3\)\)"),
    "Q8 rows of no whole groups": (row(2, dims=(4, 16)), r"'c': Q8F16 needs a last extent .* multiple of 32"),
    "MQ4 rows of no whole groups": (row(3, dims=(2, 128)), r"'d': MQ4G256 needs a last extent .* multiple of 256"),
    "a scalar of groups": (row(3, dims=()), "'d': MQ4G256 needs a last extent"),
    "group_size of F32": (row(0, group_size=1), "'a': group_size is 1, F32 has 0"),
    "group_size of Q8": (row(2, group_size=0), "'c': group_size is 0, Q8F16 has 32"),
    "group_size of MQ4": (row(3, group_size=128), "'d': group_size is 128, MQ4G256 has 256"),
    "data_size one less": (row(0, data_size=23), r"'a': data_size is 23, F32 \(2, 3\) needs 24"),
    "data_size one more": (row(3, data_size=137), r"'d': data_size is 137, MQ4G256 \(1, 256\) needs 136"),
    "data_size huge": (row(3, data_size=2**64 - 1), "'d': data_size is 18446744073709551615"),
    "another quant_type of that size": (row(0, quant_type=1, dims=(4, 3)), r"wrong shape: .*a \(4, 3\)"),
    "data cut by one": (tail(1), r"'d' ends at byte \d+, the file has \d+; it is truncated"),
    "data cut by a tensor": (tail(136), "'d' ends at byte"),
    "all data cut": (GOOD[:OFFSET], "'a' ends at byte"),
    **{
        f"quant_type {number}": (row(3, quant_type=number), rf"'d': quant_type {number} \({name}\) is not readable")
        for number, name in FOREIGN.items()
    },
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    data, message = DAMAGE[kind]
    with pytest.raises(CheckpointError, match=message) as caught:
        opened(tmp_path / "x.hfq", data)
    assert "x.hfq" in str(caught.value)


def test_every_shorter_file_is_refused(tmp_path: Path) -> None:
    data = build(ROWS, METADATA, padding=bytes(40))
    opened(tmp_path / "x.hfq", data)
    for length in range(len(data)):
        with pytest.raises(CheckpointError, match=r"x\.hfq"):
            opened(tmp_path / "x.hfq", data[:length])


def test_no_byte_of_header_or_table_is_read_over(tmp_path: Path) -> None:
    data = build(ROWS, METADATA, padding=b"")
    path = tmp_path / "x.hfq"
    opened(path, data)
    table = range(32 + len(METADATA), lab.parse(data)[0]["data_offset"])
    for at in [*range(32), *table]:
        for flip in (0x01, 0x10, 0xFF):
            flipped = bytearray(data)
            flipped[at] ^= flip
            with pytest.raises(CheckpointError):
                opened(path, bytes(flipped))


def patched(index: int, at: int, raw: bytes) -> bytes:
    data = bytearray(ROWS[index].data)
    data[at : at + len(raw)] = raw
    return row(index, data=bytes(data))


@pytest.mark.parametrize(
    ("index", "at", "value", "dtype"),
    [
        (0, 8, np.nan, "<f4"),
        (1, 2, np.inf, "<f2"),
        (2, 34, np.nan, "<f2"),
        (2, 34, np.inf, "<f2"),
        (3, 0, np.nan, "<f4"),
        (3, 0, -np.inf, "<f4"),
        (3, 0, 3e38, "<f4"),
        (3, 4, np.nan, "<f4"),
    ],
)
def test_values_and_scales_must_be_finite(tmp_path: Path, index: int, at: int, value: float, dtype: str) -> None:
    checkpoint = opened(tmp_path / "x.hfq", patched(index, at, np.array(value, dtype).tobytes()))
    for i, damaged in enumerate(ROWS):
        if i == index:
            with pytest.raises(CheckpointError, match=rf"x\.hfq: tensor '{damaged.name.decode()}' \(.* finite"):
                checkpoint.read(damaged.name.decode())
        else:
            checkpoint.read(damaged.name.decode())


# ---- metadata ----------------------------------------------------------------------------------------------


def small(folder: Path, role: str) -> tuple[dict[str, int], dict[str, Any], list[Row], Path]:
    """A small model's container, taken apart."""
    config, tensors = (TARGET, target_tensors(TARGET)) if role == "target" else (DRAFT, draft_tensors(DRAFT))
    path = convert(write_checkpoint(folder / role, config, tensors), folder / f"{role}.hfq", "q8")
    header, metadata, rows = lab.parse(path.read_bytes())
    return {"arch_id": header["arch_id"]}, metadata, list(rows.values()), path


METADATA_DAMAGE: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("target", {"config": None}, {}, "config is None; it must be the object of config.json"),
    ("target", {"config": []}, {}, r"config is \[\]"),
    (
        "target",
        {"config": changed(TARGET, hidden_size=None)},
        {},
        r"config in .*\.hfq: required key 'hidden_size' is missing",
    ),
    ("target", {"config": changed(TARGET, vocab_size=97)}, {}, r"wrong shape: .*embed_tokens.weight \(96, 48\)"),
    ("target", {"generation_config": [1]}, {}, r"generation_config is \[1\]; it must be an object or null"),
    ("target", {}, {"arch_id": 6}, r"arch_id is 6 \(Qwen3\.5 MoE\), required here: 5 \(dense Qwen3\.5\)"),
    ("target", {}, {"arch_id": 20}, r"arch_id is 20 \(DFlash draft\), required here: 5"),
    ("draft", {}, {"arch_id": 5}, r"arch_id is 5 \(dense Qwen3\.5\), required here: 20 \(DFlash draft\)"),
    ("draft", {"dflash": None}, {}, "dflash is None; a draft must have the object"),
    ("draft", {"dflash": {}}, {}, "dflash has block_size None, config has 8; they must be equal"),
    (
        "draft",
        {"dflash": {"block_size": 8, "mask_token_id": 94, "target_layer_ids": [0, 2, 4]}},
        {},
        r"dflash has target_layer_ids \[0, 2, 4\], config has \[0, 2, 3\]",
    ),
]


@pytest.mark.parametrize(("role", "metadata", "header", "message"), METADATA_DAMAGE)
def test_metadata_must_fit(
    tmp_path: Path, role: str, metadata: dict[str, Any], header: dict[str, Any], message: str
) -> None:
    load = {"target": load_target, "draft": load_draft}[role]
    sound_header, sound, rows, path = small(tmp_path, role)
    load(path)
    path.write_bytes(build(rows, json.dumps({**sound, **metadata}).encode(), header={**sound_header, **header}))
    with pytest.raises(CheckpointError, match=message):
        load(path)


def test_tokenizer_in_the_metadata_must_be_text(tmp_path: Path) -> None:
    header, metadata, rows, path = small(tmp_path, "target")
    for value, message in (({}, "must be the text"), ("{}", "not a tokenizer"), (None, "holds no tokenizer")):
        path.write_bytes(build(rows, json.dumps({**metadata, "tokenizer": value}).encode(), header=header))
        with pytest.raises(CheckpointError, match=message):
            Tokenizer(path)


# ---- writing and the command -------------------------------------------------------------------------------


def hfk(capsys: pytest.CaptureFixture[str], *args: Any) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        app([str(a) for a in args], prog_name="hfk")
    seen = capsys.readouterr()
    return int(ended.value.code or 0), seen.out, seen.err


def test_convert_says_what_it_chose(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = hfk(capsys, "convert", DEMO["draft"], tmp_path / "a.mq4", "--json")
    assert code == 0
    document = json.loads(out)
    _, _, rows = lab.parse((tmp_path / "a.mq4").read_bytes())
    names = {2: "F32", 3: "Q8F16", 13: "MQ4G256"}
    assert {t["name"]: t["format"] for t in document["tensors"]} == {n: names[r.quant_type] for n, r in rows.items()}
    assert [t["bytes"] for t in document["tensors"]] == [r.data_size for r in rows.values()]
    assert document["bytes"] == (tmp_path / "a.mq4").stat().st_size
    assert (document["arch_id"], document["skipped"]) == (20, [])
    assert document["source_bytes"] == sum(t["source_bytes"] for t in document["tensors"])
    assert len(err.splitlines()) == len(rows)
    assert err.splitlines()[0].startswith("convert 1/25 ")
    code, out, _ = hfk(capsys, "convert", DEMO["draft"], tmp_path / "b.hfq", "--format", "q8")
    assert code == 0
    assert [line.split() for line in out.splitlines()[1:3]] == [
        ["Q8F16", "15", "3.54", "1.88"],
        ["F32", "10", "0.00", "0.01"],
    ]
    assert out.splitlines()[-1].endswith(f"b.hfq: {(tmp_path / 'b.hfq').stat().st_size / 1e6:.2f} MB, 53% of 3.54 MB")
    assert load_draft(tmp_path / "b.hfq").config.block_size == 16


def test_generate_takes_containers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], containers: dict[tuple[str, str], Path]
) -> None:
    pair = ["--target", containers["target", "mq4"], "--draft", containers["draft", "mq4"]]
    code, out, _ = hfk(
        capsys, "generate", *pair, "--prompt", "def f(", "--kv-format", "f32", "--max-new-tokens", "4", "--json"
    )
    assert code == 0
    assert len(json.loads(out)["tokens"]) == 4


USAGE: list[tuple[tuple[str, ...], str, str]] = [
    (("target", "x.hfq", "--format", "q4"), "InputError", "format is 'q4'; did you mean mq4? legal: mq4, q8, f16, f32"),
    (("target/config.json", "x.hfq"), "InputError", "is not a folder; required: the folder of a checkpoint"),
    (("nowhere", "x.hfq"), "InputError", "is not a folder"),
    (("empty", "x.hfq"), "CheckpointError", "config.json: cannot be read"),
    (("llama", "x.hfq"), "CheckpointError", "model_type is 'llama'"),
    (("target", "there.hfq"), "InputError", "there.hfq exists; remove it"),
    (("target", "empty"), "InputError", "empty is a folder; required: a file to write"),
    (("target", "nowhere/x.hfq"), "InputError", "x.hfq cannot be written: the folder"),
    (
        ("huge", "x.hfq", "--format", "f16"),
        "CheckpointError",
        "cannot be stored as F16: a value is NaN, infinite or above",
    ),
    (("nan", "x.hfq", "--format", "f32"), "CheckpointError", "tensor 'norm.weight' (F32) holds nan at index 5"),
]


@pytest.mark.parametrize(("args", "kind", "message"), USAGE)
def test_bad_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], args: tuple[str, ...], kind: str, message: str
) -> None:
    tensors = target_tensors(TARGET)
    write_checkpoint(tmp_path / "target", TARGET, tensors)
    write_checkpoint(tmp_path / "llama", changed(TARGET, model_type="llama"), tensors)
    large, nan = tensors["lm_head.weight"].copy(), tensors["norm.weight"].copy()
    large[3, 3], nan[5] = 2 * F16_MAX, np.nan
    write_checkpoint(tmp_path / "huge", TARGET, {**tensors, "lm_head.weight": large})
    write_checkpoint(tmp_path / "nan", TARGET, {**tensors, "norm.weight": nan})
    (tmp_path / "empty").mkdir()
    (tmp_path / "there.hfq").write_text("kept")
    before = sorted(tmp_path.iterdir())
    code, out, err = hfk(capsys, "convert", tmp_path / args[0], tmp_path / args[1], *args[2:], "--json")
    assert code == 2
    assert message in err
    document = json.loads(out)["error"]
    assert document["kind"] == kind
    assert message in document["message"]
    # Nothing appeared, also no unfinished file, and what was there is as it was.
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "there.hfq").read_text() == "kept"


def test_the_file_is_as_open_as_the_user_has_it(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        path = convert(DEMO["draft"], tmp_path / "x.hfq", "q8")
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_planned_shapes_hold(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"'a' was planned as \(2, 2\), its values are \(4,\)"):
        write_container(tmp_path / "x.hfq", 5, {}, [Planned("a", F32, (2, 2))], [np.zeros(4, np.float32)])
    assert list(tmp_path.iterdir()) == []
