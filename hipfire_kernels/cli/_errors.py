"""From an exception to what the caller of `hfk` sees: a message on stderr and an exit code, no traceback."""

from __future__ import annotations

import typer

from hipfire_kernels.authoring.places import NOWHERE, Places
from hipfire_kernels.building.toolchains import diagnostics
from hipfire_kernels.cli import _out
from hipfire_kernels.errors import (
    CheckpointError,
    CompileError,
    DeadlockError,
    DeviceError,
    HipfireError,
    InputError,
    MemoryFault,
    NotAdmitted,
    ToolchainUnavailable,
    UndefinedBehaviour,
)

FAILED, USAGE, REFUSED = 1, 2, 3
"""Exit codes: the check failed; wrong usage or input; refused, for it is not admitted or not available."""

_CODES: tuple[tuple[type[Exception], int], ...] = (
    (InputError, USAGE),
    (CheckpointError, USAGE),
    (NotAdmitted, REFUSED),
    (ToolchainUnavailable, REFUSED),
    (DeadlockError, FAILED),
    (UndefinedBehaviour, FAILED),
    (MemoryFault, FAILED),
    (DeviceError, REFUSED),
    (HipfireError, FAILED),
    (OSError, FAILED),
)
"""The first class that an error is of decides."""

_AROUND = 3


def exit_code(error: HipfireError | OSError) -> int:
    """The exit code an error stands for."""
    return next(code for kind, code in _CODES if isinstance(error, kind))


def report(error: HipfireError | OSError, *, as_json: bool) -> None:
    """Say what went wrong: on stderr, and with `--json` as the document too."""
    _out.note(f"error: {describe(error)}")
    if as_json:
        _out.document({"error": {"kind": type(error).__name__, "message": describe(error)}})


def describe(error: HipfireError | OSError) -> str:
    """The message of an error; for a refused source also the lines around the first error, and the compiler's log."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if not isinstance(error, CompileError):
        return str(error)
    places, found = Places.of(error.source), diagnostics.read(error.log, error.source)
    parts = [str(error)]
    first = next((one.place for one in found if one.kind == "error" and one.place.file), NOWHERE)
    around = places.around(first, _AROUND)
    if around:
        parts.append(f"{first.file}\n{around}")
    if error.log and error.log.strip() not in parts[0]:
        parts.append(error.log.strip())
    return "\n".join(parts)


def refuse(message: str) -> typer.Exit:
    """An exit with code 3 after a message."""
    _out.note(message)
    return typer.Exit(REFUSED)
