"""The verify graph in the speculative loop: beside direct calls, beside a faster route, and when a capture fails."""

from __future__ import annotations

import dataclasses
from typing import Any

from on_graph import generated, graphs_on, pair
from standin_lab import CAPTURE_INVALIDATED, StandIn

from hipfire_kernels.dispatch import evidence
from hipfire_kernels.dispatch.record import Crossover
from hipfire_kernels.running.devices.gpu import GpuDevice

__all__ = ["graphs_on", "pair"]  # fixtures


def test_the_loop_gives_the_same_tokens_with_and_without_a_graph(pair: tuple[Any, Any], gpu0: GpuDevice) -> None:
    """The context passes 256, where the caches grow and every graph starts over."""
    host, off, on, unset = (
        generated(pair, device, asked)
        for device, asked in (("host", True), (gpu0.name, False), (gpu0.name, True), (gpu0.name, None))
    )
    assert host.tokens == off.tokens == on.tokens == unset.tokens
    assert host.accepted == off.accepted == on.accepted
    layers = 2
    assert host.attention.graph == off.attention.graph == {"direct": layers * host.cycles}
    counts = on.attention.graph
    assert counts == unset.attention.graph
    assert sum(counts.values()) == layers * on.cycles
    assert counts["capture"] >= 2 * layers  # before and after the caches grew
    assert counts["replay"] > counts["warmup"]
    assert counts["direct"] == counts["failed"] == 0
    assert on.routes == off.routes
    assert on.attention.refused["rows8: capturing"] > 0
    assert off.attention.refused["rows8: capturing"] == 0


def test_a_faster_route_that_no_graph_holds_is_not_given_up_for_one(pair: tuple[Any, Any], gpu0: GpuDevice) -> None:
    """Evidence opens rows8 above 260 keys, in the middle of the generation."""
    shipped = evidence.find(gpu0.arch.name, "rows8", 128)
    assert shipped is not None
    opened = dataclasses.replace(shipped, kind="measured", digests={}, crossover=Crossover(260, None, None))
    with evidence.using([opened]):
        unset, on = (generated(pair, gpu0.name, asked) for asked in (None, True))
    assert unset.tokens == on.tokens == generated(pair, "host", False).tokens
    assert unset.routes["rows8"] > 0
    assert unset.attention.graph["direct"] == unset.routes["rows8"]
    assert unset.attention.graph["replay"] > 0
    assert on.routes["rows8"] == 0
    assert on.attention.graph["direct"] == 0


def test_the_loop_goes_on_when_a_capture_fails(pair: tuple[Any, Any], gpu0: GpuDevice, stub: StandIn) -> None:
    stub.fail("capture_end", CAPTURE_INVALIDATED)
    got = generated(pair, gpu0.name, True)
    stub.complaints()
    assert got.tokens == generated(pair, "host", False).tokens
    assert got.attention.graph["failed"] == 1
    assert got.attention.graph["direct"] > 0
    assert got.attention.graph["replay"] > 0  # of the other layer
