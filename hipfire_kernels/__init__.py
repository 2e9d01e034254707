"""Author, build, verify and run speculative-verify attention kernels for HIP.

    declare -> render -> compile -> load -> launch        (this package)
    request -> admit -> plan -> run                       (`hipfire_kernels.dispatch`)

Importing this package touches no GPU, no compiler and no file: what needs one is imported when it is first used.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

from . import reference
from .archs import ARCHS, Arch, arch
from .errors import (
    CheckpointError,
    CompileError,
    DeadlockError,
    DeviceError,
    HipfireError,
    InputError,
    NotAdmitted,
    RenderError,
    ToolchainError,
    ToolchainUnavailable,
    UndefinedBehaviour,
)
from .family import KernelFamily, Variant
from .kernels import families
from .q8_0 import dequantize_q8_0, quantize_q8_0

if TYPE_CHECKING:
    from .binding import launch
    from .builder import Artifact, build
    from .dispatch import attend, draft_attend, kv_write, plan
    from .runtime import Device, device, devices

__version__ = "0.1.0"

_LATE = {
    "Artifact": "builder",
    "build": "builder",
    "Device": "runtime",
    "device": "runtime",
    "devices": "runtime",
    "launch": "binding",
    "attend": "dispatch",
    "draft_attend": "dispatch",
    "kv_write": "dispatch",
    "plan": "dispatch",
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
    "NotAdmitted",
    "RenderError",
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
    "kv_write",
    "launch",
    "plan",
    "quantize_q8_0",
    "reference",
]

logging.getLogger(__name__).addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_LATE[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
