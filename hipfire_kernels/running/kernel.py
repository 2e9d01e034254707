"""A loaded kernel as a callable.

    kernel = hk.load(variant, "cuda:0")
    kernel(x=x, w=w, out=out, eps=1e-6, stream=s)      # checks, packs, launches

    bound = kernel.bind(x=x, w=w, out=out, eps=1e-6)   # checks and packs once
    bound(s)                                           # launches, again and again

What is bound holds its arrays, and reads and writes them as they are when it is launched.
"""

from __future__ import annotations

from typing import Any

from hipfire_kernels.authoring.args import Tensor
from hipfire_kernels.authoring.family import Variant
from hipfire_kernels.running import binding, devices
from hipfire_kernels.running.devices.protocol import Device, Launch


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
        binding.launch(self.variant, self.device, stream=stream, **values)

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
