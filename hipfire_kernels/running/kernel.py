"""A loaded kernel as a callable.

    kernel = hk.load(variant, "cuda:0")
    kernel(x=x, w=w, out=out, eps=1e-6, stream=s)      # checks, packs, launches

    bound = kernel.bind(x=x, w=w, out=out, eps=1e-6)   # checks and packs once
    bound(s)                                           # launches, again and again

What is bound holds its arrays, and reads and writes them as they are when it is launched.

A call of shapes and numbers that this thread has called it with before has only its addresses checked and swapped.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

from hipfire_kernels.authoring.args import Tensor
from hipfire_kernels.authoring.family import Variant
from hipfire_kernels.running import binding, devices
from hipfire_kernels.running.devices.protocol import Device, Launch, View

_KEPT = 16
"""Calls of different shapes or numbers that a thread keeps of a kernel."""


class _Call(NamedTuple):
    """What is kept of a call: where its addresses go, and what is launched, nothing where the grid has no block."""

    arrays: binding.SharedArrays
    launches: tuple[Launch, ...]


class BoundKernel:
    """A kernel with its arguments; made by `LoadedKernel.bind`.

    Attributes:
        launch: what is launched.
    """

    def __init__(self, device: Device, launch: Launch, held: tuple[Any, ...]) -> None:
        self.launch = launch
        self._device, self._launches, self._held = device, (launch,), held
        self._empty = 0 in launch.grid

    def __call__(self, stream: Any = None) -> None:
        """Launch it. A grid with no block launches nothing.

        Raises:
            DeviceError: the launch failed.
        """
        if not self._empty:
            self._device.launch(self._launches, stream)


class LoadedKernel:
    """A variant on a device, built and loaded; made by `load`.

    Attributes:
        variant: what it is.
        device: where it runs.
    """

    def __init__(self, variant: Variant, device: Device) -> None:
        self.variant, self.device = variant, device
        self._arrays = tuple(arg.name for arg in variant.args if isinstance(arg, Tensor))
        self._numbers = (*(a.name for a in variant.args if not isinstance(a, Tensor)), *variant.family.extents)
        self._own = threading.local()  # a call writes its addresses into what is kept
        binding.kernel(variant, device)

    def __repr__(self) -> str:
        return f"<LoadedKernel {self.variant.name} on {self.device.name}>"

    def __call__(self, *, stream: Any = None, **values: Any) -> None:
        """Check the arguments and launch.

        Args:
            stream: of the device; its default one when None.
            values: an array of the device for each declared tensor, a number for each scalar and extent that no shape
                gives.

        Raises:
            InputError: see `hipfire_kernels.launch`.
            DeviceError: the launch failed.
        """
        device, known = self.device, self._known(values)
        if known is None:
            binding.launch(self.variant, device, stream=stream, **values)
            return
        key, views = known
        call = self._calls.get(key) or self._keep(key, views, values)
        call.arrays.point(views)
        if call.launches:
            device.launch(call.launches, stream)

    def _known(self, values: Mapping[str, Any]) -> tuple[Any, dict[str, View]] | None:
        """What a call is known by, and its arrays; None where something is missing, or a number is no plain one."""
        try:
            views = {name: self.device.view(name, values[name]) for name in self._arrays}
            # By type as well: True is no 1 here.
            numbers = tuple([(type(x), x) for x in map(values.get, self._numbers)])
            key = (len(values), numbers, *[(view.shape, view.dtype) for view in views.values()])
            hash(key)
        except (KeyError, TypeError):
            return None
        return key, views

    @property
    def _calls(self) -> dict[Any, _Call]:
        """Of this thread."""
        kept: dict[Any, _Call] = self._own.__dict__.setdefault("calls", {})
        return kept

    def _keep(self, key: Any, views: dict[str, View], values: Mapping[str, Any]) -> _Call:
        """Check all of a call, and keep what its like will need. Raises what `binding.launch` does."""
        bound = binding.bound(self.variant, self.device, values)
        prepared = binding.prepare(bound, self.device)
        call = _Call(binding.SharedArrays((bound,), views), () if 0 in prepared.grid else (prepared,))
        calls = self._calls
        if len(calls) == _KEPT:
            del calls[next(iter(calls))]
        calls[key] = call
        return call

    def bind(self, **values: Any) -> BoundKernel:
        """Check and pack the arguments once, for repeated launches. The arrays are kept alive.

        Raises:
            InputError: see `hipfire_kernels.launch`.
        """
        bound = binding.bound(self.variant, self.device, values)
        held = tuple(values[arg.name] for arg in self.variant.args if isinstance(arg, Tensor))
        return BoundKernel(self.device, binding.prepare(bound, self.device), held)


def load(variant: Variant, device: Device | str = "host") -> LoadedKernel:
    """Build a variant (or take it from the cache or a bundle) and load it.

    Args:
        device: from `hipfire_kernels.device`, or its name.

    Raises:
        InputError: there is no device of that name.
        ToolchainError: the variant cannot be built for the device's arch.
        DeviceError: it cannot be loaded.
    """
    return LoadedKernel(variant, devices.resolve(device))
