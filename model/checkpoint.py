"""Reading checkpoints: a folder of safetensors, one file or shards, or a .hfq container; memory-mapped, dequantised.

Everything is checked before anything is read. The safetensors format: a little-endian u64 header length, a JSON
header {name: {dtype, shape, data_offsets}}, the data. The same rules as the format's own reader: the tensors tile
the data section with no gap and no overlap.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hipfire_kernels.errors import CheckpointError
from hipfire_kernels.model.hfq import arch_name, read_container
from hipfire_kernels.model.jsonfile import json_object, listed, read_json
from hipfire_kernels.model.layers import Array
from hipfire_kernels.model.tensors import BF16, BOOL, F16, F32, I32, I64, TensorEntry

_HEADER_LIMIT = 100 << 20
_WHOLE = (I64, I32, BOOL)
_DTYPES = {dtype.name: dtype for dtype in (BF16, F16, F32, *_WHOLE)}
VOCABULARY_MAP = "d2t"
"""The one tensor that may be whole numbers: what a draft's own ids mean."""

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def read_config(path: Path, arch_id: int) -> tuple[dict[str, Any], str]:
    """What config.json says, from a folder or from a container of this arch_id, and where it stands, for messages.

    Raises:
        CheckpointError: it is absent or no JSON object, or the container is of another architecture.
    """
    if not path.is_file():
        return read_json(path / "config.json"), str(path / "config.json")
    container = read_container(path)
    if container.arch_id != arch_id:
        raise CheckpointError(f"{path}: arch_id is {arch_name(container.arch_id)}, required here: {arch_name(arch_id)}")
    config = container.metadata.get("config")
    if not isinstance(config, dict):
        raise CheckpointError(f"metadata of {path}: config is {config!r}; it must be the object of config.json")
    return config, f"config in {path}"


def read_generation_config(path: Path) -> tuple[dict[str, Any], str]:
    """As `read_config`, for generation_config.json: empty where there is none.

    Raises:
        CheckpointError: it is no JSON object.
    """
    file = path / "generation_config.json"
    if not path.is_file():
        return (read_json(file) if file.is_file() else {}), str(file)
    config = read_container(path).metadata.get("generation_config")
    if config is not None and not isinstance(config, dict):
        raise CheckpointError(f"metadata of {path}: generation_config is {config!r}; it must be an object or null")
    return config or {}, f"generation_config in {path}"


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
        header = json_object(raw.decode("utf-8"), f"header of {path}")
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
    if dtype not in _DTYPES:
        raise CheckpointError(f"{where}: dtype {dtype!r} is not readable, {', '.join(_DTYPES)} are")
    if any(type(number) is not int or number < 0 for number in numbers):
        raise CheckpointError(f"{where}: shape {shape!r} and offsets [{begin!r}, {end!r}] must be whole numbers")
    stored = _DTYPES[dtype]
    if end - begin != stored.size(tuple(shape)):
        raise CheckpointError(
            f"{where}: offsets [{begin}, {end}] span {end - begin} bytes, {dtype} {shape} "
            f"needs {stored.size(tuple(shape))}"
        )
    return TensorEntry(name, path, stored, tuple(shape), base + begin, base + end)


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
            raise CheckpointError(f"{folder / shard}: does not hold what {_INDEX} maps to it: {listed(odd)}")
        entries.update(found)
    return entries


@dataclass(frozen=True)
class LoadProgress:
    """How far the loading of a checkpoint is.

    Attributes:
        tensor: canonical name of the tensor that was read last.
        done: bytes in the file of what has been read.
        total: bytes in the file of all that will be.
        skipped: stored names of the tensors that are not read, by rule.
    """

    tensor: str
    done: int
    total: int
    skipped: tuple[str, ...]


class Checkpoint:
    """The tensors of one checkpoint, under canonical names.

    Args:
        path: the checkpoint folder, or the container.
        expected: canonical name -> shape of every tensor that the model has.
        optional: the same of tensors that it may have.
        rename: stored name -> canonical name, or None for a tensor that is skipped by rule.

    Attributes:
        entries: canonical name -> where the tensor lies.
        skipped: stored names of the tensors that are skipped by rule.
        progress: called after each tensor that is read; None for nobody.

    Raises:
        CheckpointError: unreadable files, or a set of tensors that is not exactly `expected`.
    """

    def __init__(
        self,
        path: Path,
        expected: Mapping[str, tuple[int, ...]],
        rename: Callable[[str], str | None],
        optional: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        self.entries: dict[str, TensorEntry] = {}
        self.skipped: list[str] = []
        self.progress: Callable[[LoadProgress], None] | None = None
        self._done = 0
        self._maps: dict[Path, mmap.mmap] = {}
        found = read_container(path).tensors if path.is_file() else _scan_folder(path)
        for stored, entry in found.items():
            name = rename(stored)
            if name is None:
                self.skipped.append(stored)
            elif name in self.entries:
                raise CheckpointError(f"{path}: more than one tensor stands for {name!r} (prefixes differ)")
            else:
                self.entries[name] = entry
        self._check(path, expected, optional or {})
        self._total = sum(entry.end - entry.begin for entry in self.entries.values())

    def _check(
        self, path: Path, required: Mapping[str, tuple[int, ...]], optional: Mapping[str, tuple[int, ...]]
    ) -> None:
        faults, expected = [], {**required, **optional}
        if missing := [name for name in required if name not in self.entries]:
            faults.append(f"missing {listed(missing)}")
        if extra := [name for name in self.entries if name not in expected]:
            faults.append(f"extra {listed(extra)}")
        wrong = [
            f"{name} {entry.shape} (config.json needs {expected[name]})"
            for name, entry in self.entries.items()
            if name in expected and entry.shape != expected[name]
        ]
        if wrong:
            faults.append(f"wrong shape: {listed(wrong)}")
        if whole := [name for name, e in self.entries.items() if e.format in _WHOLE and name != VOCABULARY_MAP]:
            faults.append(f"stored as whole numbers: {listed(whole)}")
        if faults:
            raise CheckpointError(f"{path}: the tensors are not those that config.json describes; " + "; ".join(faults))

    def read(self, name: str) -> Array:
        """One tensor as a new float32 array, C-contiguous.

        Raises:
            CheckpointError: a value of it is not finite.
        """
        entry = self.entries[name]
        if entry.file not in self._maps:
            with entry.file.open("rb") as file:
                self._maps[entry.file] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        values = entry.decode(memoryview(self._maps[entry.file])[entry.begin : entry.end])
        self._done += entry.end - entry.begin
        if self.progress is not None:
            self.progress(LoadProgress(name, self._done, self._total, tuple(self.skipped)))
        return values


_TEXT_PREFIX = re.compile(r"^model\.(language_model\.)?(?=embed_tokens\.|layers\.|norm\.)")
_SKIPPED = re.compile(r"^(mtp\.|model\.visual\.|visual\.)")


def draft_name(stored: str) -> str | None:
    """Canonical name of a draft tensor: its own. t2d, which only marks the target ids that d2t reaches, is skipped."""
    return None if stored == "t2d" else stored


def target_name(stored: str) -> str | None:
    """Canonical name of a target tensor: no prefix. Vision and multi-token-prediction tensors are skipped."""
    return None if _SKIPPED.match(stored) else _TEXT_PREFIX.sub("", stored)
