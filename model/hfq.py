"""The .hfq (also .mq4) container: one file with a header, JSON metadata, a table of tensors, and their data.

All numbers are little endian.

    header     "HFQM", u32 version = 1, u32 arch_id, u32 n_tensors, u64 metadata_offset = 32, u64 data_offset
    metadata   a JSON object; its closing brace is its end
    table      u32 n_tensors again; per tensor u16 name length, name, u8 quant_type, u8 n_dims, u32 dims[n_dims],
               u32 group_size, u64 data_size
    padding    zeros to data_offset: the reader takes fewer than 4096, the writer pads to a multiple of 4096
    data       the tensors in the order of the table, nothing between them and nothing behind the last

group_size is 0 for F16 and F32, 32 for Q8F16 and 256 for MQ4G256; groups lie along the last extent. Tensors have
their Hugging Face names. The metadata has

    config      the object of config.json
    dflash      of a draft (arch_id 20) alone: an object with its block_size, mask_token_id and target_layer_ids
    tokenizer   the text of tokenizer.json, or null
    generation_config   the object of generation_config.json, where there is one
    tokenizer_config    where there is a chat template: it and the special tokens, as tokenizer_config.json has them

and may have more, which is not read.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hipfire_kernels.building.storage import replacing
from hipfire_kernels.errors import CheckpointError, InputError
from hipfire_kernels.model.jsonfile import leading_object
from hipfire_kernels.model.layers import Array
from hipfire_kernels.model.mq4 import quantize_mq4g256
from hipfire_kernels.model.tensors import F16, F32, MQ4G256, Q8F16, Bytes, Format, TensorEntry
from hipfire_kernels.q8_0 import quantize_q8_0

TARGET, DRAFT = 5, 20
"""arch_id of the containers that are read and written."""

ARCHS = {TARGET: "dense Qwen3.5", 6: "Qwen3.5 MoE", 9: "DeepSeek4", 16: "Qwen4", DRAFT: "DFlash draft"}


def arch_name(arch_id: int) -> str:
    """A known arch_id, for messages."""
    return f"{arch_id} ({ARCHS[arch_id]})"


_MAGIC, _VERSION = b"HFQM", 1
_HEADER = struct.Struct("<4sIIIQQ")
_ALIGN = 4096
_HEAD_LIMIT = 100 << 20  # a header, metadata and table beyond this are a damaged data_offset


def _floats(dtype: str) -> Callable[[Array], Bytes]:
    def encode(values: Array) -> Bytes:
        with np.errstate(over="ignore"):
            stored = values.astype(dtype)
        if not np.isfinite(stored).all():
            raise InputError(f"a value is NaN, infinite or above {np.finfo(dtype).max:.0f}, the most {dtype[1:]} holds")
        return stored.view(np.uint8)

    return encode


@dataclass(frozen=True)
class Quant:
    """A quant_type that is read and written.

    Attributes:
        format: how its values are stored.
        group_size: what the table says of it.
        encode: float32 [groups, format.group] to uint8, in order.
    """

    format: Format
    group_size: int
    encode: Callable[[Array], Bytes]


QUANTS: dict[int, Quant] = {
    1: Quant(F16, 0, _floats("<f2")),
    2: Quant(F32, 0, _floats("<f4")),
    3: Quant(Q8F16, 32, quantize_q8_0),
    13: Quant(MQ4G256, 256, quantize_mq4g256),
}
_IDS = {quant.format.name: quant_type for quant_type, quant in QUANTS.items()}

_FOREIGN = {
    0: "Q4F16G64",
    4: "Q4K",
    5: "Q8HFQ",
    6: "HFQ4G256",
    7: "HFQ4G128",
    8: "HFQ6G256",
    9: "HFQ2G256",
    10: "HFQ2G128",
    11: "HFQ3G256",
    12: "HFQ3G128",
    14: "MQ8G256",
    19: "MQ2G256Lloyd",
}


@dataclass(frozen=True)
class Container:
    """What a container says of itself, after it was checked against the file."""

    arch_id: int
    metadata: dict[str, Any]
    tensors: dict[str, TensorEntry]


class _Cursor:
    """Reads the table front to back; what goes beyond its end is an error that names what was read."""

    def __init__(self, path: Path, data: bytes, at: int) -> None:
        self.path = path
        self.data = data
        self.at = at

    def raw(self, count: int, what: str) -> bytes:
        begin, self.at = self.at, self.at + count
        if self.at > len(self.data):
            raise CheckpointError(
                f"{self.path}: {what} needs the bytes {begin} to {self.at}, data_offset is {len(self.data)}; the table "
                "of tensors is damaged or data_offset is"
            )
        return self.data[begin : self.at]

    def take(self, layout: str, what: str) -> tuple[int, ...]:
        return struct.unpack(layout, self.raw(struct.calcsize(layout), what))


def read_container(path: Path) -> Container:
    """Header, metadata and table of a container; of the data only where each tensor lies.

    Raises:
        CheckpointError: the file is not a container, is truncated, contradicts itself, or holds a quant_type that
            is not read.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            arch_id, n_tensors, data_offset = _header(path, file.read(_HEADER.size), size)
            file.seek(0)
            head = file.read(data_offset)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    metadata, length = leading_object(head[_HEADER.size :], f"metadata of {path}")
    cursor = _Cursor(path, head, _HEADER.size + length)
    tensors = _table(cursor, n_tensors, data_offset, size)
    padding = head[cursor.at :]
    if len(padding) >= _ALIGN or padding.strip(b"\0"):
        raise CheckpointError(
            f"{path}: the table ends at byte {cursor.at} and data_offset is {data_offset}; between them must be fewer "
            f"than {_ALIGN} bytes, all zero"
        )
    return Container(arch_id, metadata, tensors)


def _header(path: Path, raw: bytes, size: int) -> tuple[int, int, int]:
    """arch_id, n_tensors and data_offset of a file of `size` bytes."""
    if raw[:4] != _MAGIC:
        raise CheckpointError(
            f"{path}: begins with {raw[:4]!r}, a .hfq container with {_MAGIC!r}; of other checkpoints pass the folder"
        )
    if len(raw) < _HEADER.size:
        raise CheckpointError(f"{path}: {size} bytes, the header alone has {_HEADER.size}; the file is truncated")
    _, version, arch_id, n_tensors, metadata_offset, data_offset = _HEADER.unpack(raw)
    if version != _VERSION:
        raise CheckpointError(f"{path}: version is {version}, required: {_VERSION}")
    if arch_id not in ARCHS:
        raise CheckpointError(f"{path}: arch_id is {arch_id}, known: {', '.join(map(arch_name, ARCHS))}")
    if metadata_offset != _HEADER.size:
        raise CheckpointError(f"{path}: metadata_offset is {metadata_offset}, required: {_HEADER.size}")
    if not _HEADER.size < data_offset <= min(size, _HEAD_LIMIT):
        raise CheckpointError(
            f"{path}: data_offset is {data_offset} in a file of {size} bytes, required: above {_HEADER.size} and at "
            f"most {min(size, _HEAD_LIMIT)}; it is damaged or the file is truncated"
        )
    return arch_id, n_tensors, data_offset


def _table(cursor: _Cursor, n_tensors: int, data_offset: int, size: int) -> dict[str, TensorEntry]:
    path = cursor.path
    (again,) = cursor.take("<I", "the count of tensors")
    if again != n_tensors:
        raise CheckpointError(f"{path}: the header counts {n_tensors} tensors, the table {again}; they must be equal")
    entries: dict[str, TensorEntry] = {}
    begin = data_offset
    for index in range(n_tensors):
        entry = _entry(cursor, index, begin)
        if entry.name in entries:
            raise CheckpointError(f"{path}: tensor {entry.name!r} stands in the table twice")
        if entry.end > size:
            raise CheckpointError(
                f"{path}: tensor {entry.name!r} ends at byte {entry.end}, the file has {size}; it is truncated or its "
                "table is damaged"
            )
        entries[entry.name], begin = entry, entry.end
    if begin != size:
        raise CheckpointError(f"{path}: {size - begin} bytes after the last tensor; the table does not fit the file")
    return entries


def _entry(cursor: _Cursor, index: int, begin: int) -> TensorEntry:
    what = f"tensor {index} of the table"
    (length,) = cursor.take("<H", what)
    raw = cursor.raw(length, what)
    try:
        name = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{cursor.path}: the name of {what} is {raw!r}, not UTF-8") from error
    what = f"tensor {name!r}"
    quant_type, n_dims = cursor.take("<BB", what)
    shape = cursor.take(f"<{n_dims}I", what)
    group_size, data_size = cursor.take("<IQ", what)
    where = f"{cursor.path}: {what}"
    quant = QUANTS.get(quant_type)
    if quant is None:
        legal = ", ".join(f"{number} ({q.format.name})" for number, q in QUANTS.items())
        named = f"{quant_type} ({_FOREIGN.get(quant_type, 'unknown')})"
        raise CheckpointError(f"{where}: quant_type {named} is not readable, required: one of {legal}")
    stored = quant.format
    if group_size != quant.group_size:
        raise CheckpointError(f"{where}: group_size is {group_size}, {stored.name} has {quant.group_size}")
    if not stored.fits(shape):
        raise CheckpointError(
            f"{where}: {stored.name} needs a last extent that is a multiple of {stored.group}: {shape}"
        )
    if data_size != stored.size(shape):
        raise CheckpointError(f"{where}: data_size is {data_size}, {stored.name} {shape} needs {stored.size(shape)}")
    return TensorEntry(name, cursor.path, stored, shape, begin, begin + data_size)


@dataclass(frozen=True)
class Planned:
    """A tensor to be written, in a format whose groups fit its shape."""

    name: str
    format: Format
    shape: tuple[int, ...]

    @property
    def quant_type(self) -> int:
        """Its number in the table."""
        return _IDS[self.format.name]

    def pack(self, values: Array) -> Bytes:
        """The bytes of its values.

        Raises:
            CheckpointError: the format has no code for one of them.
        """
        try:
            return QUANTS[self.quant_type].encode(values.reshape(-1, self.format.group))
        except InputError as error:
            raise CheckpointError(f"tensor {self.name!r} cannot be stored as {self.format.name}: {error}") from error


def write_container(
    path: Path, arch_id: int, metadata: Mapping[str, Any], tensors: Sequence[Planned], data: Iterable[Array]
) -> None:
    """Write a container, tensor by tensor. `path` appears when it is complete, or not at all.

    Args:
        data: float32 values of each of `tensors`, in their order; taken one by one.

    Raises:
        CheckpointError: a value cannot be stored.
        InputError: values have another shape than was planned.
        OSError: the file cannot be written.
    """
    text = json.dumps(metadata).encode("ascii")
    table = struct.pack("<I", len(tensors)) + b"".join(map(_row, tensors))
    end = _HEADER.size + len(text) + len(table)
    data_offset = end + -end % _ALIGN
    with replacing(path) as file:
        file.write(_HEADER.pack(_MAGIC, _VERSION, arch_id, len(tensors), _HEADER.size, data_offset))
        file.write(text + table + bytes(data_offset - end))
        for tensor, values in zip(tensors, data, strict=True):
            if values.shape != tensor.shape:
                raise InputError(f"tensor {tensor.name!r} was planned as {tensor.shape}, its values are {values.shape}")
            file.write(tensor.pack(values).data)


def _row(tensor: Planned) -> bytes:
    name, dims = tensor.name.encode("utf-8"), tensor.shape
    return (
        struct.pack("<H", len(name))
        + name
        + struct.pack(f"<BB{len(dims)}I", tensor.quant_type, len(dims), *dims)
        + struct.pack("<IQ", QUANTS[tensor.quant_type].group_size, tensor.format.size(dims))
    )
