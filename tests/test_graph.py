"""The verify graph's state machine on a device that only notes what is asked of it; on a stand-in, see standins/."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from hipfire_kernels.dispatch import VerifyGraph, counters, graph, policy
from hipfire_kernels.errors import DeviceError, InputError, NotAdmitted
from hipfire_kernels.running.devices.protocol import Device


class Card:
    """A device with graphs. `log` is what it was asked to do; `fault` fails a capture: inside, at its end, or later."""

    default_stream = 0

    def __init__(self, arch: str = "gfx1100") -> None:
        self.name, self.arch = "hip:0", SimpleNamespace(name=arch)
        self.log: list[str] = []
        self.fault = ""

    def stream(self) -> Any:
        return SimpleNamespace(handle=7)

    def order_after(self, earlier: int, later: int) -> None:
        self.log.append(f"{later} after {earlier}")

    @contextlib.contextmanager
    def capture(self, stream: Any) -> Iterator[Any]:
        self.log.append("begin")
        try:
            yield SimpleNamespace(launch=self._launch)
        finally:
            self.log.append("end")
        if self.fault == "end":
            raise DeviceError("hipStreamEndCapture failed")

    def _launch(self, stream: Any) -> None:
        if self.fault == "launch":
            raise DeviceError("hipGraphLaunch failed")
        self.log.append(f"graph on {stream.handle}")

    def step(self, stream: Any) -> str:
        if self.fault == "inside" and self.log[-1] == "begin":
            raise DeviceError("a copy cannot be part of the graph")
        self.log.append("direct" if stream is None else f"safe on {stream.handle}")
        return "rows8" if stream is None else "tile_batched"


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Card]:
    monkeypatch.setattr(graph, "_logged", set())
    counters.reset()
    with policy.override(verify_graph=True):
        yield Card()
    counters.reset()


def made(card: Any, weights: str = "f32") -> VerifyGraph:
    return VerifyGraph(card, weights)


def modes(machine: VerifyGraph, card: Card, count: int, key: Any = "arrays", name: Any = "layer 0") -> list[str]:
    seen = []
    for _ in range(count):
        machine.run(name, key, card.step)
        seen.append(machine.mode)
    return seen


def test_warmup_capture_replay(card: Card) -> None:
    machine = made(card)
    assert modes(machine, card, 4) == ["warmup", "capture", "replay", "replay"]
    ordered = [entry for entry in card.log if "after" not in entry]
    assert ordered == ["safe on 7", "begin", "safe on 7", "end", "graph on 7", "graph on 7", "graph on 7"]
    assert [entry for entry in card.log if "after" in entry] == ["7 after 0", "0 after 7"] * 4
    assert machine.counts == {"warmup": 1, "capture": 1, "replay": 2}
    assert machine.reason is None
    assert counters.snapshot()["routes"] == {"tile_batched": 2}  # the replays; a step counts what it launches


def test_other_arrays_start_over_and_other_calls_do_not(card: Card) -> None:
    machine = made(card)
    assert modes(machine, card, 3) == ["warmup", "capture", "replay"]
    assert modes(machine, card, 2, name="layer 1") == ["warmup", "capture"]
    assert modes(machine, card, 1) == ["replay"]
    assert modes(machine, card, 3, key="longer arrays") == ["warmup", "capture", "replay"]
    assert modes(machine, card, 1) == ["warmup"]


@pytest.mark.parametrize("fault", ["inside", "end", "launch"])
def test_a_capture_that_fails_leaves_the_calls_direct_and_says_so(
    fault: str, card: Card, caplog: pytest.LogCaptureFixture
) -> None:
    machine = made(card)
    card.fault = fault
    assert modes(machine, card, 3) == ["warmup", "direct", "direct"]
    assert machine.reason is not None
    assert machine.reason.startswith("the capture failed: ")
    assert card.log.count("direct") == 2
    assert card.log.count("begin") == 1
    assert modes(machine, card, 2, name="layer 1") == ["warmup", "direct"]
    assert machine.counts == {"warmup": 2, "direct": 3, "failed": 2}
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert "hip:0 runs directly, the capture failed" in caplog.text
    card.fault = ""
    assert modes(machine, card, 3, key="longer arrays") == ["warmup", "capture", "replay"]
    assert machine.reason is None


def test_no_graph_safe_route_runs_directly(card: Card) -> None:
    def step(stream: Any) -> str:
        if stream is not None:
            raise NotAdmitted("tile_batched: closed")
        return "rows8"

    machine = made(card)
    assert [machine.run("layer 0", "arrays", step) for _ in range(2)] == ["rows8", "rows8"]
    assert machine.counts == {"direct": 2, "failed": 1}
    assert machine.reason == "no graph-safe route is admitted: tile_batched: closed"


def test_a_call_that_is_wrong_is_an_error_and_not_counted(card: Card) -> None:
    def step(stream: Any) -> str:
        raise InputError("q has dtype f64")

    machine = made(card)
    with pytest.raises(InputError, match="q has dtype f64"):
        machine.run("layer 0", "arrays", step)
    assert not machine.counts
    assert modes(machine, card, 2) == ["warmup", "capture"]


def test_a_replay_that_fails_is_an_error(card: Card) -> None:
    machine = made(card)
    modes(machine, card, 3)
    card.fault = "launch"
    with pytest.raises(DeviceError, match="hipGraphLaunch"):
        machine.run("layer 0", "arrays", card.step)


@pytest.mark.parametrize(
    ("asked", "arch", "weights", "active"),
    [
        (None, "gfx1100", "mq4", False),
        (None, "gfx1201", "mq4", False),
        (None, "gfx1100", "f32", True),
        (None, "gfx1151", "mq4", True),
        (None, "sm_90", "f32", True),
        (True, "gfx1100", "mq4", True),
        (False, "sm_90", "f32", False),
    ],
)
def test_the_policy_decides(asked: bool | None, arch: str, weights: str, active: bool) -> None:
    card = Card(arch)
    with policy.override(verify_graph=asked):
        machine = made(card, weights)
    assert machine.active is active
    assert modes(machine, card, 2) == (["warmup", "capture"] if active else ["direct", "direct"])
    assert (machine.reason is None) is active
    if not active:
        assert "HIPFIRE_VERIFY_GRAPH" in str(machine.reason)
        assert card.log == ["direct", "direct"]


def test_a_device_without_graphs_runs_directly(host: Device) -> None:
    with policy.override(verify_graph=True):
        machine = VerifyGraph(host, "f32")
    assert not machine.active
    assert machine.run("layer 0", None, lambda stream: "tile_batched" if stream is None else "?") == "tile_batched"
    assert (machine.mode, machine.reason) == ("direct", "host has no graphs")
