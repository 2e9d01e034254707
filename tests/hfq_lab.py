"""The .hfq container once more, from its description alone: a plain writer with every field open, and a plain reader.

Shares no code with the package, so that what its reader and its writer both get wrong shows here.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

GROUP_SIZE = {1: 0, 2: 0, 3: 32, 13: 256}


@dataclass(frozen=True)
class Row:
    """A row of the table and the data that belongs to it; None: the count that is right."""

    name: bytes
    quant_type: int
    dims: tuple[int, ...]
    data: bytes
    group_size: int | None = None
    data_size: int | None = None
    name_length: int | None = None
    n_dims: int | None = None

    def pack(self) -> bytes:
        """The row as it stands in the table."""
        length = len(self.name) if self.name_length is None else self.name_length
        n_dims = len(self.dims) if self.n_dims is None else self.n_dims
        group = GROUP_SIZE.get(self.quant_type, 256) if self.group_size is None else self.group_size
        size = len(self.data) if self.data_size is None else self.data_size
        dims = b"".join(struct.pack("<I", d) for d in self.dims)
        head = struct.pack("<H", length) + self.name + struct.pack("<BB", self.quant_type, n_dims)
        return head + dims + struct.pack("<I", group) + struct.pack("<Q", size)


def build(
    rows: Sequence[Row],
    metadata: bytes = b'{"config": {}}',
    *,
    header: Mapping[str, Any] | None = None,
    count: int | None = None,
    padding: bytes | None = None,
    trailing: bytes = b"",
) -> bytes:
    """A container of these rows; `header` replaces fields of it by name."""
    table = struct.pack("<I", len(rows) if count is None else count) + b"".join(row.pack() for row in rows)
    end = 32 + len(metadata) + len(table)
    pad = bytes(-end % 4096) if padding is None else padding
    fields = {
        "magic": b"HFQM",
        "version": 1,
        "arch_id": 5,
        "n_tensors": len(rows),
        "metadata_offset": 32,
        "data_offset": end + len(pad),
        **(header or {}),
    }
    data = b"".join(row.data for row in rows)
    return struct.pack("<4sIIIQQ", *fields.values()) + metadata + table + pad + data + trailing


def parse(data: bytes) -> tuple[dict[str, int], dict[str, Any], dict[str, Row]]:
    """Header, metadata and rows with their data. Checks nothing."""
    names = ("version", "arch_id", "n_tensors", "metadata_offset", "data_offset")
    header = dict(zip(names, struct.unpack("<IIIQQ", data[4:32]), strict=True))
    at = _json_end(data, 32)
    metadata = json.loads(data[32:at])
    (count,) = struct.unpack("<I", data[at : at + 4])
    at += 4
    rows: dict[str, Row] = {}
    place = header["data_offset"]
    for _ in range(count):
        (length,) = struct.unpack("<H", data[at : at + 2])
        name = data[at + 2 : at + 2 + length]
        at += 2 + length
        quant_type, n_dims = data[at], data[at + 1]
        dims = struct.unpack(f"<{n_dims}I", data[at + 2 : at + 2 + 4 * n_dims])
        at += 2 + 4 * n_dims
        group, size = struct.unpack("<IQ", data[at : at + 12])
        at += 12
        rows[name.decode()] = Row(name, quant_type, dims, data[place : place + size], group, size)
        place += size
    return header, metadata, rows


def _json_end(data: bytes, at: int) -> int:
    depth, quoted, escaped = 0, False, False
    while True:
        c = data[at : at + 1]
        at += 1
        if quoted:
            quoted = escaped or c != b'"'
            escaped = not escaped and c == b"\\"
        elif c == b'"':
            quoted = True
        else:
            depth += (c == b"{") - (c == b"}")
            if depth == 0:
                return at


def signs(state: int) -> np.ndarray:
    """float64 [256] of 1 and -1."""
    out = []
    for _ in range(256):
        state = (state * 1103515245 + 12345) & 0x7FFFFFFF
        out.append(+1 if state & (1 << 16) else -1)
    return np.array(out, np.float64)


def rotation() -> np.ndarray:
    """float64 [256, 256]: the rotation of MQ4G256 as a matrix R, y = R w. Entry (i, j) of H is (-1)^popcount(i & j)."""
    h = np.array([[(-1.0) ** bin(i & j).count("1") for j in range(256)] for i in range(256)])
    return signs(1042)[:, None] * h * signs(42)[None, :] / 16


def mq4_scales(row: Row) -> np.ndarray:
    """float64 [groups]."""
    return np.frombuffer(row.data, "<f4").reshape(-1, 34)[:, 0].astype(np.float64)


def values(row: Row) -> np.ndarray:
    """The tensor, float64."""
    if row.quant_type in (1, 2):
        return np.frombuffer(row.data, "<f2" if row.quant_type == 1 else "<f4").astype(np.float64).reshape(row.dims)
    size = {3: 34, 13: 136}[row.quant_type]
    groups = np.frombuffer(row.data, np.uint8).reshape(-1, size)
    if row.quant_type == 3:
        scales = groups[:, :2].copy().view("<f2").astype(np.float64)
        return (scales * groups[:, 2:].copy().view(np.int8)).reshape(row.dims)
    header = groups[:, :8].copy().view("<f4").astype(np.float64)
    codes = np.empty((len(groups), 256))
    for i in range(256):
        byte = groups[:, 8 + i // 2]
        codes[:, i] = byte // 16 if i % 2 else byte % 16
    rotated = header[:, :1] * codes + header[:, 1:]
    return (rotated @ rotation()).reshape(row.dims)  # R is orthonormal: its inverse is its transpose
