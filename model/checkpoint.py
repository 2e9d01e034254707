"""Reading safetensors checkpoints: memory-mapped, one file or shards, all checked before anything is read.

The format: a little-endian u64 header length, a JSON header {name: {dtype, shape, data_offsets}}, the data.
The same rules as the format's own reader: the tensors tile the data section with no gap and no overlap.
"""

from __future__ import annotations

import json
import math
import mmap
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CheckpointError
from .layers import Array

_HEADER_LIMIT = 100 << 20
_ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4}
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies: its file, the byte range inside that file, and how to read it."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        CheckpointError: the file is absent, is not JSON, or holds no object.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); a checkpoint folder must hold it") from error
    return _json_object(text, str(path))


def _json_object(text: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text, object_pairs_hook=lambda pairs: _unique(pairs, where))
    except ValueError as error:
        raise CheckpointError(f"{where}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: holds a JSON {type(value).__name__}, an object is required")
    return value


def _unique(pairs: list[tuple[str, Any]], where: str) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise CheckpointError(f"{where}: {_listed(twice)} listed twice")
    return result


def _listed(names: list[str], limit: int = 8) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(repr(name) for name in names[:limit]) + more


def _scan_file(path: Path) -> dict[str, TensorEntry]:
    """Every tensor of one safetensors file, after checking the header against the file."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            head = file.read(8)
            length = int.from_bytes(head, "little")
            if len(head) < 8 or length > min(size - 8, _HEADER_LIMIT):
                raise CheckpointError(
                    f"{path}: {size} bytes cannot hold the header it announces ({length} bytes, at most "
                    f"{_HEADER_LIMIT}); the file is truncated or not safetensors"
                )
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    try:
        header = _json_object(raw.decode("utf-8"), f"header of {path}")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"header of {path}: not UTF-8 ({error})") from error
    header.pop("__metadata__", None)
    entries = {name: _entry(path, name, value, 8 + length) for name, value in header.items()}
    _check_tiling(path, entries, 8 + length, size)
    return entries


def _entry(path: Path, name: str, value: Any, base: int) -> TensorEntry:
    where = f"{path}: tensor {name!r}"
    try:
        dtype, shape, (begin, end) = value["dtype"], value["shape"], value["data_offsets"]
        numbers = [*shape, begin, end]
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(f"{where}: header entry {value!r} needs dtype, shape and data_offsets") from error
    if dtype not in _ITEM_BYTES:
        raise CheckpointError(f"{where}: dtype {dtype!r} is not readable, {', '.join(_ITEM_BYTES)} are")
    if any(type(number) is not int or number < 0 for number in numbers):
        raise CheckpointError(f"{where}: shape {shape!r} and offsets [{begin!r}, {end!r}] must be whole numbers")
    if end - begin != math.prod(shape) * _ITEM_BYTES[dtype]:
        raise CheckpointError(
            f"{where}: offsets [{begin}, {end}] span {end - begin} bytes, {dtype} {shape} "
            f"needs {math.prod(shape) * _ITEM_BYTES[dtype]}"
        )
    return TensorEntry(path, dtype, tuple(shape), base + begin, base + end)


def _check_tiling(path: Path, entries: Mapping[str, TensorEntry], base: int, size: int) -> None:
    """The tensors must cover the data section exactly: a gap or an overlap means a damaged header."""
    cursor = base
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.end > size:
            raise CheckpointError(
                f"{path}: tensor {name!r} ends at byte {entry.end}, the file has {size}; it is truncated "
                "or its offsets are out of range"
            )
        if entry.begin != cursor:
            fault = "overlaps the tensor before it" if entry.begin < cursor else "leaves a gap before it"
            raise CheckpointError(f"{path}: tensor {name!r} {fault} (starts at {entry.begin}, expected {cursor})")
        cursor = entry.end
    if cursor != size:
        raise CheckpointError(f"{path}: {size - cursor} bytes after the last tensor; the header does not fit the file")


def _scan_folder(folder: Path) -> dict[str, TensorEntry]:
    if (folder / _SINGLE).is_file():
        return _scan_file(folder / _SINGLE)
    if not (folder / _INDEX).is_file():
        raise CheckpointError(f"{folder}: holds neither {_SINGLE} nor {_INDEX}")
    weight_map = read_json(folder / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{folder / _INDEX}: needs a weight_map of tensor names to file names")
    entries: dict[str, TensorEntry] = {}
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard or not (folder / shard).is_file():
            raise CheckpointError(f"{folder / _INDEX}: names shard {shard!r}, which is not a file in {folder}")
        found = _scan_file(folder / shard)
        mapped = {name for name, file in weight_map.items() if file == shard}
        if found.keys() != mapped:
            odd = sorted(found.keys() ^ mapped)
            raise CheckpointError(f"{folder / shard}: does not hold what {_INDEX} maps to it: {_listed(odd)}")
        entries.update(found)
    return entries


class Checkpoint:
    """The tensors of one checkpoint folder, under canonical names.

    Args:
        folder: the checkpoint folder.
        expected: canonical name -> shape of every tensor that the model has.
        rename: stored name -> canonical name, or None for a tensor that is skipped by rule.

    Raises:
        CheckpointError: unreadable files, or a set of tensors that is not exactly `expected`.
    """

    def __init__(
        self, folder: Path, expected: Mapping[str, tuple[int, ...]], rename: Callable[[str], str | None]
    ) -> None:
        self._entries: dict[str, TensorEntry] = {}
        self._maps: dict[Path, mmap.mmap] = {}
        for stored, entry in _scan_folder(folder).items():
            name = rename(stored)
            if name in self._entries:
                raise CheckpointError(f"{folder}: more than one tensor stands for {name!r} (prefixes differ)")
            if name is not None:
                self._entries[name] = entry
        self._check(folder, expected)

    def _check(self, folder: Path, expected: Mapping[str, tuple[int, ...]]) -> None:
        faults = []
        if missing := [name for name in expected if name not in self._entries]:
            faults.append(f"missing {_listed(missing)}")
        if extra := [name for name in self._entries if name not in expected]:
            faults.append(f"extra {_listed(extra)}")
        wrong = [
            f"{name} {entry.shape} (config.json needs {expected[name]})"
            for name, entry in self._entries.items()
            if name in expected and entry.shape != expected[name]
        ]
        if wrong:
            faults.append(f"wrong shape: {_listed(wrong)}")
        if faults:
            raise CheckpointError(
                f"{folder}: the tensors are not those that config.json describes; " + "; ".join(faults)
            )

    def read(self, name: str) -> Array:
        """One tensor as a new float32 array, C-contiguous."""
        entry = self._entries[name]
        if entry.file not in self._maps:
            with entry.file.open("rb") as file:
                self._maps[entry.file] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        raw = memoryview(self._maps[entry.file])[entry.begin : entry.end]
        if entry.dtype == "BF16":
            # bfloat16 is the upper half of a float32.
            values = (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            values = np.frombuffer(raw, "<f2" if entry.dtype == "F16" else "<f4").astype(np.float32)
        return values.reshape(entry.shape)


_TEXT_PREFIX = re.compile(r"^model\.(language_model\.)?(?=embed_tokens\.|layers\.|norm\.)")
_SKIPPED = re.compile(r"^(mtp\.|model\.visual\.|visual\.)")


def target_name(stored: str) -> str | None:
    """Canonical name of a target tensor: no prefix. Vision and multi-token-prediction tensors are skipped."""
    return None if _SKIPPED.match(stored) else _TEXT_PREFIX.sub("", stored)
