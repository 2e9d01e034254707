"""The exception tree. Every message says what was observed, what is required, and what to do."""

from __future__ import annotations

from typing import Any


class HipfireError(Exception):
    """Base of everything this library raises on purpose."""


class InputError(HipfireError, ValueError):
    """An argument is not legal: wrong dtype, rank, shape, stride, device or value. Raised before any launch."""


class RenderError(HipfireError):
    """A template cannot be rendered for this arch: an undefined name, or LDS or workgroup over the limit."""


class ToolchainError(HipfireError):
    """A compiler could not do its work."""


class ToolchainUnavailable(ToolchainError):
    """No usable compiler for the arch. The message lists every candidate with the reason it was passed over."""


class CompileError(ToolchainError):
    """The compiler refused the source.

    Attributes:
        log: the compiler's own text.
        source: the source that was refused.
    """

    def __init__(self, message: str, *, log: str = "", source: str = "") -> None:
        super().__init__(message)
        self.log = log
        self.source = source


class DeviceError(HipfireError):
    """A device is absent, or refused an allocation, a copy or a launch."""


class DeadlockError(DeviceError):
    """Threads of one block wait at different barriers, or lanes of one wave in different wave operations."""


class UndefinedBehaviour(DeviceError):
    """A sanitizer found a kernel doing what the language gives no meaning to."""


class NumericsError(HipfireError):
    """Numbers that must be finite are not: logits that a token is chosen from, keys and values that are kept."""


class ParityError(HipfireError):
    """A kernel is not what its oracle says.

    Attributes:
        finding: the case, its error and limit, and what else is wrong.
    """

    def __init__(self, message: str, finding: Any = None) -> None:
        super().__init__(message)
        self.finding = finding


class MemoryFault(DeviceError):
    """A kernel under the memory check touches what it must not, or divides by zero.

    Attributes:
        array: the array or LDS array that is missed; empty where it is none, or not known.
        index: of the element that is accessed instead.
        writes: whether it is written.
        thread: of the block.
        place: the line, with its text; empty where it is not known.
    """

    def __init__(
        self, message: str, *, array: str = "", index: int = 0, writes: bool = False, thread: int = 0, place: str = ""
    ) -> None:
        super().__init__(message)
        self.array, self.index, self.writes, self.thread, self.place = array, index, writes, thread, place


class NotAdmitted(HipfireError):
    """No route may run the request, or the route asked for by name is not admitted.

    Attributes:
        decision: the full `dispatch.Decision`, with every check that was evaluated.
    """

    def __init__(self, message: str, decision: Any = None) -> None:
        super().__init__(message)
        self.decision = decision


class CheckpointError(HipfireError):
    """A checkpoint is incomplete, inconsistent, or not the model that the caller paired it with."""
