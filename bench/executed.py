"""What every route executes, counted on the interpreter of AMD machine code: the table of docs/performance.md.

`python -m hipfire_kernels.bench.executed` prints it. A figure is what one more key costs a row and a query head, from
two contexts; what a call costs whatever its context is left out. Nothing here is a time.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from hipfire_kernels.authoring.family import Variant
from hipfire_kernels.checking.oracle import check
from hipfire_kernels.checking.parity import Case, run_attend
from hipfire_kernels.dispatch.request import AttendRequest
from hipfire_kernels.dispatch.routes import ROUTES, Route
from hipfire_kernels.errors import HipfireError
from hipfire_kernels.inspecting.executed import Work, count
from hipfire_kernels.running.devices.isa import IsaDevice

ARCHS = ("gfx1100", "gfx1201")
VERIFY_HEADS, DRAFT_HEADS = (24, 4), (32, 8)
CONTEXTS = (1024, 2048)
"""Whole rounds of the splits, so that the difference is one of keys alone."""

COLUMNS = ("all", "vector", "scalar", "matrix", "trans", "lane", "lds", "load", "wait")


def work(route: Route, arch: str, head_dim: int, rows: int, contexts: tuple[int, int] = CONTEXTS) -> Work:
    """What a key adds for each row and query head.

    Raises:
        InputError: the route does not take the shape.
    """
    device, verify = IsaDevice(arch), route.workload == "verify"
    heads, kv_heads = VERIFY_HEADS if verify else DRAFT_HEADS
    request = AttendRequest(
        arch=arch,
        workload=route.workload,
        kv_format="q8_0" if verify else "f32",
        head_dim=head_dim,
        n_heads=heads,
        n_kv_heads=kv_heads,
        rows=rows,
        window=1 << 20 if route.name == "dflash_sliding" else 0,
    )
    variant = route.variant(request)
    less, more = (_counted(variant, device, Case(rows, ctx, heads, kv_heads, head_dim)) for ctx in contexts)
    return more.less(less).scaled(1 / ((contexts[1] - contexts[0]) * rows * heads))


def _counted(variant: Variant, device: IsaDevice, case: Case) -> Work:
    def run() -> Any:
        return run_attend(variant, case, device) if "positions" in _names(variant) else check(variant, case, device)

    every = list(count(device, run).values())
    total = every[0]
    for one in every[1:]:
        total = total.with_all(one)
    return total


def _names(variant: Variant) -> set[str]:
    return {arg.name for arg in variant.args}


def table(head_dims: tuple[int, ...], rows: int) -> Iterator[str]:
    """The rows of the table, in Markdown."""
    yield f"| route | head_dim | arch | {' | '.join(COLUMNS)} | global B | LDS B |"
    yield "|" + "---|" * (len(COLUMNS) + 5)
    for route in ROUTES:
        for head_dim in head_dims:
            for arch in ARCHS:
                try:
                    found = work(route, arch, head_dim, rows)
                except (HipfireError, KeyError):
                    continue  # a route that has no kernel for the shape
                counts = [found.total if c == "all" else found.instructions[c] for c in COLUMNS]
                traffic = found.traffic
                global_bytes = traffic["global read"] + traffic["global written"]
                figures = [*counts, global_bytes, traffic["LDS read"] + traffic["LDS written"]]
                yield f"| {route.name} | {head_dim} | {arch} | {' | '.join(f'{x:.3g}' for x in figures)} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--head-dim", type=int, nargs="+", default=[128, 256])
    parser.add_argument("--rows", type=int, default=16)
    given = parser.parse_args()
    for line in table(tuple(given.head_dim), given.rows):
        print(line, flush=True)


if __name__ == "__main__":
    main()
