"""Capture and replay of a verify attention: direct, warmup, capture, replay.

The first call with given arrays runs directly, and builds and allocates what it needs (warmup). The second is recorded
and the graph launched once (capture). From then on the graph is replayed. It holds graph-safe routes, whose grids cover
the capacity, so it stays right for every live context; its inputs are overwritten in place before each call. A capture
that fails leaves the calls direct, and says so.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, cast

from hipfire_kernels.dispatch import counters, policy
from hipfire_kernels.errors import HipfireError, NotAdmitted
from hipfire_kernels.running.devices.protocol import Device

_log = logging.getLogger(__name__)
_logged: set[str] = set()

DIRECT, WARMUP, CAPTURE, REPLAY, FAILED = "direct", "warmup", "capture", "replay", "failed"

Step = Callable[[Any], str]
"""Launches and returns the route that ran. Given a stream, it launches there, and by a graph-safe route; given None, by
any route on the device's default stream."""


def graph_key(device: Device, **arrays: Any) -> Hashable:
    """What a captured launch depends on: address, shape and dtype of each array."""
    views = ((name, device.view(name, array)) for name, array in arrays.items())
    return tuple((name, view.pointer, view.shape, view.dtype) for name, view in views)


@dataclass
class _Call:
    """One call and how far it has come."""

    key: Hashable
    warm: bool = False
    graph: Any = None
    route: str = ""
    reason: str | None = None


class VerifyGraph:
    """Attention calls that are made over and over by one thread, a layer's each, and the graph of each.

    Args:
        device: where it runs. One without graphs runs directly.
        weights: format of the target's weights, which the default of `HIPFIRE_VERIFY_GRAPH` depends on.

    Captures and replays use one stream of their own, ordered with the device's default stream on both ends.

    Attributes:
        counts: calls by mode, and captures that failed under "failed".
        mode: of the last call: "direct", "warmup", "capture" or "replay"; "" before the first.
        reason: why the last call ran directly, None if it did not.
    """

    def __init__(self, device: Device, weights: str) -> None:
        self.counts: Counter[str] = Counter()
        self.mode = ""
        self._device = cast(Any, device)  # graphs and streams are a GPU's; the protocol of all devices has none
        self._never = _why_never(device, weights)
        self._stream: Any = None if self._never else self._device.stream()
        self.reason = self._never
        self._calls: dict[Hashable, _Call] = {}

    @property
    def active(self) -> bool:
        """Whether captures are tried at all: the policy wants them and the device has graphs."""
        return self._never is None

    def run(self, name: Hashable, key: Hashable, step: Step) -> str:
        """Make a call in the mode that its turn demands.

        Args:
            name: of the call: the layer, say.
            key: of the arrays that `step` uses, from `graph_key`. Another one starts over with a warmup.
            step: see `Step`.

        Returns:
            The route that ran.
        """
        call = self._calls.get(name)
        if call is None or call.key != key:
            call = self._calls[name] = _Call(key, reason=self._never)
        if call.reason is None:
            mode, route = self._ordered(call, step)
        else:
            mode, route = DIRECT, step(None)
        self.mode, self.reason = mode, call.reason
        self.counts[mode] += 1
        return route

    def _ordered(self, call: _Call, step: Step) -> tuple[str, str]:
        """The mode and the route of a call that may be captured."""
        default, own = self._device.default_stream, self._stream.handle
        self._device.order_after(default, own)
        if call.graph is not None:
            call.graph.launch(self._stream)
            counters.count_route(call.route)
            done = REPLAY, call.route
        else:
            done = self._capture(call, step) if call.warm else self._warm_up(call, step)
        self._device.order_after(own, default)
        return done

    def _warm_up(self, call: _Call, step: Step) -> tuple[str, str]:
        try:
            route = step(self._stream)
        except NotAdmitted as error:
            return self._give_up(call, step, f"no graph-safe route is admitted: {error}")
        call.warm = True
        return WARMUP, route

    def _capture(self, call: _Call, step: Step) -> tuple[str, str]:
        try:
            with self._device.capture(self._stream) as graph:
                route = step(self._stream)
            graph.launch(self._stream)
        except HipfireError as error:
            return self._give_up(call, step, f"the capture failed: {error}")
        call.graph, call.route = graph, route
        return CAPTURE, route

    def _give_up(self, call: _Call, step: Step, reason: str) -> tuple[str, str]:
        """No graph for these arrays: say so, and make the call directly."""
        call.reason = reason
        self.counts[FAILED] += 1
        if reason not in _logged:
            _logged.add(reason)
            _log.warning("verify attention on %s runs directly, %s. Counted, logged once", self._device.name, reason)
        return DIRECT, step(None)


def _why_never(device: Device, weights: str) -> str | None:
    if not hasattr(device, "capture"):
        return f"{device.name} has no graphs"
    if not policy.current().use_verify_graph(device.arch.name, weights):
        return f"the policy is off for {device.arch.name} with {weights} weights (HIPFIRE_VERIFY_GRAPH)"
    return None
