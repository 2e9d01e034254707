"""Reading the JSON object of a config: every complaint names the file and the key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hipfire_kernels.errors import CheckpointError

_LARGEST_COUNT = 2**31 - 1
_SMALLEST, _LARGEST = 1e-30, 1e30  # beyond any setting, and inside what arithmetic on them can hold
_MOST_LAYERS = 4096


class Reader:
    """Required and optional keys of one JSON object; every complaint names the file and the key.

    Attributes:
        read: the keys that were asked for, by this reader and those it was `merged` into.
        assumed: "key value" of the defaults that were taken for missing keys.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where
        self.read: set[str] = set()
        self.assumed: list[str] = []

    def merged(self, over: Mapping[str, Any], where: str) -> Reader:
        """A reader of the same keys under those of `over`. What it reads and assumes counts for both."""
        both = Reader({**self.values, **over}, where)
        both.read, both.assumed = self.read, self.assumed
        return both

    def get(self, key: str) -> Any:
        """The value of a key, None where it is absent or null."""
        self.read.add(key)
        return self.values.get(key)

    def fail(self, key: str, need: str) -> CheckpointError:
        if key not in self.values:
            return CheckpointError(f"{self.where}: required key {key!r} is missing; it must be {need}")
        return CheckpointError(f"{self.where}: {key} is {self.values[key]!r}; it must be {need}")

    def count(self, key: str, least: int = 1, most: int = _LARGEST_COUNT, *, default: int | None = None) -> int:
        value = self._given(key, default)
        if type(value) is not int or not least <= value <= most:
            raise self.fail(key, f"a whole number from {least} to {most}")
        return value

    def layers(self) -> int:
        """num_hidden_layers: what is counted through, where other sizes are compared with a file."""
        return self.count("num_hidden_layers", most=_MOST_LAYERS)

    def number(self, key: str, *, default: float | None = None) -> float:
        value = self._given(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not _SMALLEST <= value <= _LARGEST:
            raise self.fail(key, f"a positive number, of {_SMALLEST} to {_LARGEST}")
        return float(value)

    def given(self, key: str) -> float | None:
        """As `number`, None where the key is absent or null."""
        return None if self.get(key) is None else self.number(key)

    def flag(self, key: str) -> bool | None:
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.fail(key, "true, false or absent")
        return value

    def only(self, key: str, legal: tuple[Any, ...]) -> None:
        """`key` may be absent, null or one of `legal`: anything else asks for arithmetic that is not here."""
        value = self.get(key)
        if value is not None and value not in legal:
            raise self.fail(key, " or ".join(["absent", *map(repr, legal)]) + " (nothing else is implemented)")

    def _given(self, key: str, default: Any) -> Any:
        """The value of a key, `default` where it is absent and there is one."""
        if default is None or key in self.values:
            return self.get(key)
        self.assumed.append(f"{key} {default}")
        return default


def layer_types(reader: Reader, layers: int, legal: tuple[str, ...]) -> tuple[str, ...] | None:
    """The kind of every layer as the config states it, one of `legal` each; None where it does not."""
    types = reader.get("layer_types")
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != layers or any(kind not in legal for kind in types):
        raise reader.fail("layer_types", f"a list of {layers} (num_hidden_layers) of {' or '.join(legal)}")
    return tuple(types)


def token_ids(value: Any) -> tuple[int, ...] | None:
    """A tuple of token or layer ids from a number or a list of numbers, None when it is neither."""
    items = value if isinstance(value, list) else [value]
    return tuple(items) if all(type(item) is int and item >= 0 for item in items) else None
