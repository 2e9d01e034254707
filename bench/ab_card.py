"""The A/B runs that the project shows of a card."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hipfire_kernels.bench import ab
from hipfire_kernels.bench.ab import Experiment, OnStep
from hipfire_kernels.bench.ab_arms import GenerateArms, KernelArms, request
from hipfire_kernels.bench.kernels import Shape
from hipfire_kernels.dispatch import evidence
from hipfire_kernels.dispatch.policy import MIN_CTX_DEFAULT
from hipfire_kernels.dispatch.routes import routes_of
from hipfire_kernels.errors import HipfireError
from hipfire_kernels.running.devices import device as open_device

PARTS = ("kernel", "generate", "graph")
"""Of `on_card`; each may be run on its own."""


def on_card(device: str, parts: Sequence[str] = PARTS, repeats: int = 4, step: OnStep = print) -> list[dict[str, Any]]:
    """The runs that the project shows of a card, a document each; one that cannot be made says why under `refused`.

    "kernel": rows8 against tile_batched, verify_mma against rows8, at 32,768 keys, 16 rows, head_dim 256. "generate":
    the same routes end to end with the demo pair, behind a prompt longer than both crossovers. "graph": the verify
    graph on and off, on the demo's first prompt.

    Args:
        device: a GPU.
        parts: of `PARTS`.
        repeats: of the declared order.
        step: called with a text for each run.
    """
    found: list[dict[str, Any]] = []
    for name, experiment in _card_runs(device, parts):
        try:
            found.append(ab.run(experiment(), repeats))
        except HipfireError as error:
            found.append({"kind": "ab", "schema": ab.SCHEMA, "variable": name, "refused": str(error)})
        step(f"{ab.describe(found[-1])}\n")
    return found


def _card_runs(device: str, parts: Sequence[str]) -> Iterator[tuple[str, Callable[[], Experiment]]]:
    known = {row.name for row in routes_of("verify")}
    routes = [pair for pair in (("tile_batched", "rows8"), ("rows8", "verify_mma")) if known.issuperset(pair)]
    if "kernel" in parts:
        for off, on in routes:
            shape = Shape(32768, 16, 256)
            yield f"kernel={off},{on}", functools.partial(KernelArms, off, on, shape, device, rounds=20)
    if "generate" in parts:
        for off, on in routes:
            tokens = _behind_crossovers(device, (off, on))
            # Blocks of fixed size: a draft that is seldom right would have them shorter than rows8 takes.
            asked = request(tokens=tokens, max_new_tokens=32, HIPFIRE_DFLASH_ADAPTIVE_B="0")
            yield f"route={off},{on}", functools.partial(GenerateArms, "route", off, on, asked, device)
    if "graph" in parts:
        switch = "HIPFIRE_VERIFY_GRAPH"
        yield f"{switch}=0,1", functools.partial(GenerateArms, switch, "0", "1", request(), device)


def _behind_crossovers(device: str, routes: Sequence[str]) -> int:
    """Tokens of a prompt behind which the demo pair's target may take any of the routes."""
    arch = open_device(device).arch.name
    records = [evidence.find(arch, route, head_dim=256, group=4) for route in routes]
    return 256 + max([MIN_CTX_DEFAULT, *(r.crossover.ctx for r in records if r and r.crossover)])
