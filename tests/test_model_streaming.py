"""Text that arrives bit by bit: no character is split, nothing whole is held back, nothing is lost."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_lab import TARGET, changed, target_tensors, write_checkpoint

from hipfire_kernels import CheckpointError
from hipfire_kernels.model import Tokenizer, demo_pair_path, load_target

DEMO = Tokenizer(demo_pair_path() / "target")


def byte_fallback(folder: Path) -> Tokenizer:
    """A tokenizer of 256 ids, one a byte, whose decoder turns each byte of an unfinished character into U+FFFD."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    model = {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": True}
    decoder = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model, "decoder": decoder}))
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_fallback(tmp_path_factory.mktemp("bytes"))


def byte_names() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary: its own, or one from 256 on."""
    names, extra = [], 256
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174:
            names.append(chr(byte))
        else:
            names.append(chr(extra))
            extra += 1
    return names


def segmented(data: bytes, rng: random.Random) -> list[int]:
    """Ids of the demo's vocabulary that spell `data`, cut anywhere that its entries allow."""
    vocab = json.loads((demo_pair_path() / "target" / "tokenizer.json").read_text())["model"]["vocab"]
    names, ids, at = byte_names(), [], 0
    while at < len(data):
        found = [n for n in range(1, 7) if "".join(names[b] for b in data[at : at + n]) in vocab]
        size = min(rng.choice(found), len(data) - at)
        ids.append(vocab["".join(names[b] for b in data[at : at + size])])
        at += size
    return ids


def streamed(tokenizer: Tokenizer, ids: list[int], rng: random.Random) -> tuple[list[str], str]:
    """The pieces of a stream whose pushes have random sizes, and what it holds at the end."""
    decoder, pieces, at = tokenizer.stream(), [], 0
    while at < len(ids):
        size = rng.choice((1, 1, 1, 2, 3, 5))
        pieces.append(decoder.push(ids[at : at + size]))
        at += size
    return pieces, decoder.finish()


@settings(max_examples=150, deadline=None, derandomize=True)
@given(text=st.text(max_size=40), seed=st.integers(0, 2**32))
def test_any_text_over_random_byte_splits(text: str, seed: int) -> None:
    rng = random.Random(seed)
    pieces, rest = streamed(DEMO, segmented(text.encode(), rng), rng)
    assert "".join(pieces) + rest == text
    if "\ufffd" not in text:
        assert not rest
        assert "\ufffd" not in "".join(pieces)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.binary(max_size=60), seed=st.integers(0, 2**32))
def test_any_bytes_over_random_splits(data: bytes, seed: int) -> None:
    """Bytes that are no UTF-8 come out as the decoder of the whole has them."""
    rng = random.Random(seed)
    ids = segmented(data, rng)
    pieces, rest = streamed(DEMO, ids, rng)
    assert "".join(pieces) + rest == DEMO.decode(ids) == data.decode("utf-8", "replace")


@settings(max_examples=100, deadline=None, derandomize=True)
@given(text=st.text(max_size=30), seed=st.integers(0, 2**32))
def test_a_decoder_with_a_replacement_per_byte(fallback: Tokenizer, text: str, seed: int) -> None:
    pieces, rest = streamed(fallback, list(text.encode()), random.Random(seed))
    assert "".join(pieces) + rest == text


def test_nothing_whole_is_held_back() -> None:
    rng = random.Random(4)
    text = "aß漢🎉" * 3
    ids = segmented(text.encode(), rng)
    decoder, so_far = DEMO.stream(), ""
    for count, token in enumerate(ids, 1):
        so_far += decoder.push([token])
        assert so_far == DEMO.decode(ids[:count]).rstrip("\ufffd")


@pytest.mark.parametrize("data", [b"\x80", b"\xff", b"\xe2", b"\xf0\x9f", b"\xe2\x82A", b"\xc3\xa9\x80"])
def test_a_long_run_of_no_characters_comes_out(data: bytes) -> None:
    ids = segmented(data * 400, random.Random(5))
    decoder, out = DEMO.stream(), ""
    for count, token in enumerate(ids, 1):
        out += decoder.push([token])
        assert len(DEMO.decode(ids[:count])) - len(out) <= 40
    assert out + decoder.finish() == DEMO.decode(ids)


def test_no_character_is_cut_when_much_is_pending(tmp_path: Path) -> None:
    mixed = 256  # an id of a whole character and the first byte of another
    names = byte_names()
    vocab = {name: byte for byte, name in enumerate(names)} | {"a" + names[0xE6]: mixed}
    model = {"type": "BPE", "vocab": vocab, "merges": []}
    decoder = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model, "decoder": decoder}))
    tokenizer = Tokenizer(tmp_path)
    for count in range(28, 40):
        for filler, shown in ((0x80, "\ufffd"), (0x61, "a")):
            stream, (last, *_) = tokenizer.stream(), "漢".encode()[2:]
            text = stream.push([filler] * count + [mixed, 0xBC])
            assert text + stream.push([last]) == shown * count + "a漢"
            assert stream.finish() == ""


def test_a_tokenizer_with_more_ids_than_the_target(tmp_path: Path) -> None:
    """Fewer are usual: embeddings are padded."""
    config = changed(TARGET, vocab_size=4096)
    DEMO.check_pairing(load_target(write_checkpoint(tmp_path / "same", config, target_tensors(config))).config)
    small = load_target(write_checkpoint(tmp_path / "small", TARGET, target_tensors(TARGET))).config
    with pytest.raises(CheckpointError, match=r"target has ids up to 4095, target .*small from 0 to 95; pair it"):
        DEMO.check_pairing(small)
