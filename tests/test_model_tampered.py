"""Files changed at random: each loads as what it now says, or is refused by name. Nothing else may come out of it."""

from __future__ import annotations

import copy
import json
import math
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from model_lab import DRAFT, TARGET, target_tensors, write_checkpoint
from parity_lab import FIXTURES

from hipfire_kernels import CheckpointError
from hipfire_kernels.model import ChatTemplate, Tokenizer, demo_pair_path, load_draft, load_target
from hipfire_kernels.model.config import read_target_config
from hipfire_kernels.model.draft_config import read_draft_config

VALUES: list[Any] = [
    *(None, True, 0, -1, 3, 2**63, 10**400, 0.5, 1e-300, 1e308, math.inf, math.nan),
    *("", "\ud800", [], [0], ["x", {}], {}, {"rope_type": "yarn"}),
]

MORE_TARGET = {
    "full_attention_interval": 4,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "hidden_act": "silu",
    "attn_output_gate": True,
    "text_config": None,
    "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
}
MORE_DRAFT = {
    "is_causal": False,
    "tie_word_embeddings": False,
    "max_position_embeddings": 256,
    "draft_vocab_size": 96,
    "rope_scaling": {"rope_type": "default"},
    "dflash_config": {
        **DRAFT["dflash_config"],
        **{"causal": False, "use_swa": True, "swa_window_size": 7, "block_size": 8, "input_embedding_scale": 1.0},
        **{"output_multiplier": 1.0, "final_logit_softcapping": 30.0, "conv_kernel_size": 0, "selector_rank": 0},
    },
}
YARN = {
    **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64},
    **{"attention_factor": 1.1, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1},
    **{"truncate": True, "partial_rotary_factor": 0.25, "type": "yarn"},
}
CONFIGS: dict[str, tuple[dict[str, Any], Callable[[Path], Any]]] = {
    "target": ({**TARGET, **{k: v for k, v in MORE_TARGET.items() if v is not None}}, read_target_config),
    "target with yarn": ({**TARGET, "rope_parameters": YARN}, read_target_config),
    "wrapped": (
        {"model_type": "qwen3_5", "text_config": TARGET, "vision_config": {}, "tie_word_embeddings": False},
        read_target_config,
    ),
    "draft": ({**DRAFT, **MORE_DRAFT}, read_draft_config),
    "draft with yarn": ({**DRAFT, "max_position_embeddings": 256, "rope_parameters": YARN}, read_draft_config),
}


def places(config: Any) -> Iterator[tuple[Any, ...]]:
    """The path of every value in a JSON object, of objects and lists too."""
    for key, value in config.items() if isinstance(config, dict) else enumerate(config):
        yield (key,)
        if isinstance(value, (dict, list)):
            yield from ((key, *rest) for rest in places(value))


def put(config: dict[str, Any], place: tuple[Any, ...], value: Any) -> dict[str, Any]:
    result = copy.deepcopy(config)
    inner: Any = result
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return result


@pytest.mark.parametrize("name", CONFIGS)
def test_any_value_of_any_config_key_is_read_or_refused(tmp_path: Path, name: str) -> None:
    config, read = CONFIGS[name]
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    read(tmp_path)
    for place in places(config):
        for value in VALUES:
            file.write_text(json.dumps(put(config, place, value)))
            message = try_to_load(lambda: read(tmp_path))
            assert not message or str(file) in message, (place, value)


def try_to_load(load: Callable[[], Any]) -> str:
    """The message of the refusal, empty when there is none."""
    try:
        load()
    except CheckpointError as error:
        return str(error)
    return ""


def damaged(data: bytes, rng: random.Random, within: int) -> bytes:
    """`data` after one accident in its first `within` bytes: a byte, a bit, a cut, a copy, or a hole."""
    at = rng.randrange(within)
    kind = rng.randrange(5)
    if kind == 0:
        return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
    if kind == 1:
        return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
    if kind == 2:
        return data[:at]
    length = rng.randrange(1, 40)
    return data[:at] + data[at : at + length] * (2 if kind == 3 else 0) + data[at + length :]


@pytest.mark.parametrize(
    ("source", "file"),
    [
        ("plain", "model.safetensors"),
        ("bf16", "model.safetensors"),
        ("sharded", "model.safetensors.index.json"),
        ("sharded", "model-00003-of-00005.safetensors"),
        ("plain", "config.json"),
        ("plain", "generation_config.json"),
        ("draft", "model.safetensors"),
        ("draft", "config.json"),
    ],
)
def test_accidents_to_a_file(tmp_path: Path, source: str, file: str) -> None:
    shutil.copytree(FIXTURES / source, tmp_path / "it")
    rng, path = random.Random(f"{source} {file}"), tmp_path / "it" / file
    data, load = path.read_bytes(), load_draft if source == "draft" else load_target
    header = 8 + int.from_bytes(data[:8], "little") if file.endswith(".safetensors") else len(data)
    refused = 0
    for _ in range(60):
        path.write_bytes(damaged(data, rng, header))
        refused += bool(try_to_load(lambda: load(tmp_path / "it")))
    assert refused > 10


@pytest.mark.parametrize("left", [0, 1, 7, 8, 9, 500, 20_000, -1000, -4, -1])
@pytest.mark.parametrize("source", ["plain", "bf16", "draft"])
def test_a_file_that_ends_early_is_refused(tmp_path: Path, source: str, left: int) -> None:
    shutil.copytree(FIXTURES / source, tmp_path / "it")
    path = tmp_path / "it" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:left])
    load = load_draft if source == "draft" else load_target
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load(tmp_path / "it")


def test_accidents_to_tokenizer_and_template(tmp_path: Path) -> None:
    shutil.copy(demo_pair_path() / "target" / "tokenizer.json", tmp_path)
    config = {"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}", "eos_token": {"content": "x"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    rng = random.Random(7)
    for file, load, within, count in (
        ("tokenizer.json", Tokenizer, 1500, 15),
        ("tokenizer_config.json", ChatTemplate, None, 200),
    ):
        data = (tmp_path / file).read_bytes()
        messages = []
        for _ in range(count):
            (tmp_path / file).write_bytes(damaged(data, rng, within or len(data)))
            messages.append(try_to_load(lambda load=load: load(tmp_path)))
        (tmp_path / file).write_bytes(data)
        assert sum(map(bool, messages)) > count // 8


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"])
def test_a_folder_where_a_file_should_be(tmp_path: Path, name: str) -> None:
    target = write_checkpoint(tmp_path, TARGET, target_tensors(TARGET))
    (target / name).unlink(missing_ok=True)
    (target / name).mkdir()
    load = {"tokenizer.json": Tokenizer, "tokenizer_config.json": ChatTemplate}.get(name, load_target)
    assert str(target) in try_to_load(lambda: load(target))
