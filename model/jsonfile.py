"""JSON objects as checkpoints hold them, read strictly: no key twice, no other value than an object at the top."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hipfire_kernels.errors import CheckpointError


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        CheckpointError: the file is absent, is not JSON, or holds no object.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); a checkpoint folder must hold it") from error
    return json_object(text, str(path))


def json_object(text: str, where: str) -> dict[str, Any]:
    """The JSON object that `text` is. `where` stands in messages.

    Raises:
        CheckpointError: it is not JSON, holds no object, or an object in it has a key twice.
    """
    value, end = _parsed(text, where)
    if rest := text[end:].strip():
        raise CheckpointError(f"{where}: not valid JSON ({rest[:20]!r} follows the object)")
    return value


def leading_object(data: bytes, where: str) -> tuple[dict[str, Any], int]:
    """The JSON object at the start of `data`, and its length in bytes. Anything may follow it.

    Raises:
        CheckpointError: no JSON object of UTF-8 text begins there and ends inside `data`.
    """
    # What follows is not text. The escapes keep its bytes apart from characters, and the count of bytes exact.
    text = data.decode("utf-8", "surrogateescape")
    value, end = _parsed(text, where)
    raw = text[:end].encode("utf-8", "surrogateescape")
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where}: not UTF-8 ({error})") from error
    return value, len(raw)


def _parsed(text: str, where: str) -> tuple[dict[str, Any], int]:
    decoder = json.JSONDecoder(object_pairs_hook=lambda pairs: _unique(pairs, where))
    try:
        value, end = decoder.raw_decode(text, len(text) - len(text.lstrip(" \t\r\n")))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: holds a JSON {type(value).__name__}, an object is required")
    return value, end


def _unique(pairs: list[tuple[str, Any]], where: str) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise CheckpointError(f"{where}: {listed(twice)} listed twice")
    return result


def listed(names: list[str], limit: int = 8) -> str:
    """Names for a message; of many, the first few."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(repr(name) for name in names[:limit]) + more
