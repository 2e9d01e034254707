"""Which parameters of a test are in the default run. The others are marked `long`: `pytest -m long` runs them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def some(values: Iterable[Any], count: int) -> list[Any]:
    """Parameters of which so many are in the default run, evenly spread, the first and the last among them."""
    every = list(values)
    chosen = {round(i * (len(every) - 1) / (count - 1)) for i in range(count)}
    return [value if i in chosen else _long(value) for i, value in enumerate(every)]


def _long(value: Any) -> Any:
    values = value if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=pytest.mark.long)
