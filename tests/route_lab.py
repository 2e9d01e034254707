"""Routes that need evidence, opened on the host."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

from hipfire_kernels.dispatch import ROUTES, evidence
from hipfire_kernels.dispatch.record import Crossover, Shape


@contextmanager
def opened(head_dim: int, n_heads: int, n_kv_heads: int) -> Iterator[None]:
    """A block inside of which every route may run on the host, from one key on; none was timed."""
    record = evidence.find("gfx1100", "rows8", 256)
    assert record is not None
    common = {
        "arch": "host",
        "speed": (),
        "crossover": Crossover(1, None, None),
        "shape": Shape(head_dim, n_heads, n_kv_heads, ()),
    }
    needy = [route.name for route in ROUTES if route.needs_evidence]
    with evidence.using([dataclasses.replace(record, route=name, **common) for name in needy]):
        yield
