"""Author, build, verify and run speculative-verify attention kernels for HIP.

    declare -> render -> compile -> load -> launch        (this package)
    request -> admit -> plan -> run                       (`hipfire_kernels.dispatch`)

Importing this package touches no GPU, no compiler and no file: what needs one is imported when it is first used.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

from hipfire_kernels.archs import ARCHS, Arch, arch
from hipfire_kernels.authoring.args import Lds, Scalar, Tensor
from hipfire_kernels.authoring.family import KernelFamily, Tolerance, Variant
from hipfire_kernels.authoring.registry import register
from hipfire_kernels.bf16 import from_bf16, to_bf16
from hipfire_kernels.checking import reference
from hipfire_kernels.errors import (
    CheckpointError,
    CompileError,
    DeadlockError,
    DeviceError,
    HipfireError,
    InputError,
    MemoryFault,
    NotAdmitted,
    NumericsError,
    ParityError,
    RenderError,
    ToolchainError,
    ToolchainUnavailable,
    UndefinedBehaviour,
)
from hipfire_kernels.kernels import families
from hipfire_kernels.q8_0 import dequantize_q8_0, quantize_q8_0

if TYPE_CHECKING:
    from hipfire_kernels.building.builder import Artifact, build
    from hipfire_kernels.building.bundle import use_bundle
    from hipfire_kernels.checking.oracle import parity
    from hipfire_kernels.dispatch import attend, draft_attend, kv_write, plan
    from hipfire_kernels.running.binding import launch
    from hipfire_kernels.running.devices import device, devices
    from hipfire_kernels.running.devices.protocol import Device
    from hipfire_kernels.running.kernel import load

__version__ = "0.1.0"

_LATE = {
    "Artifact": "building.builder",
    "build": "building.builder",
    "Device": "running.devices.protocol",
    "device": "running.devices",
    "devices": "running.devices",
    "launch": "running.binding",
    "attend": "dispatch",
    "draft_attend": "dispatch",
    "kv_write": "dispatch",
    "plan": "dispatch",
    "load": "running.kernel",
    "use_bundle": "building.bundle",
    "parity": "checking.oracle",
}
"""Public names that are imported at first use, and the module each lives in."""

__all__ = [
    "ARCHS",
    "Arch",
    "Artifact",
    "CheckpointError",
    "CompileError",
    "DeadlockError",
    "Device",
    "DeviceError",
    "HipfireError",
    "InputError",
    "KernelFamily",
    "Lds",
    "MemoryFault",
    "NotAdmitted",
    "NumericsError",
    "ParityError",
    "RenderError",
    "Scalar",
    "Tensor",
    "Tolerance",
    "ToolchainError",
    "ToolchainUnavailable",
    "UndefinedBehaviour",
    "Variant",
    "arch",
    "attend",
    "build",
    "dequantize_q8_0",
    "device",
    "devices",
    "draft_attend",
    "families",
    "from_bf16",
    "kv_write",
    "launch",
    "load",
    "parity",
    "plan",
    "quantize_q8_0",
    "reference",
    "register",
    "to_bf16",
    "use_bundle",
]

logging.getLogger(__name__).addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_LATE[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
