"""Files that live for a moment: in the temporary folder, or, where that is full, cannot be written to or does not let
code be loaded, in another one."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from hipfire_kernels.building.storage import SCRATCH, cache_root, make_private, reserve
from hipfire_kernels.errors import HipfireError, InputError, ToolchainUnavailable

ROOM = 16 << 20
"""Bytes that a compiler has for its files. It takes a tenth of them."""

_log = logging.getLogger(__name__)
_taken: dict[str, Path] = {}
_T = TypeVar("_T")


def somewhere(
    what: str, attempt: Callable[[Path], _T], wanted: str, error: type[HipfireError] = ToolchainUnavailable
) -> _T:
    """What `attempt` makes of the first folder that it does not refuse with an OSError. The one that served the last
    time comes first; that it is not the temporary folder is said once.

    Args:
        what: what it is for, for messages.
        wanted: what a folder must be, for messages.
        error: raised where none serves.
    """
    refused: list[str] = []
    for place in dict.fromkeys([*filter(None, [_taken.get(what)]), *_places()]):
        try:
            if place.name == SCRATCH:
                make_private(place, place.parent)
            found = attempt(place)
        except OSError as why:
            refused.append(f"{place}: {_reason(why)}")
            continue
        if refused:
            _log.warning("%s: in %s, because of %s", what, place, "; ".join(refused))
            _taken[what] = place
        return found
    raise error(
        f"{what}: no folder serves ({'; '.join(refused) or 'there is none'}); set TMPDIR or HIPFIRE_CACHE_DIR to one "
        f"that {wanted}"
    )


@contextlib.contextmanager
def folder(room: int = ROOM, what: str = "a compiler's files") -> Iterator[Path]:
    """A new folder with so many bytes of room, removed when the block ends.

    Raises:
        ToolchainUnavailable: there is no place for one; the message names all that were tried, with the reason.
    """
    made = somewhere(what, functools.partial(_made, room), f"has {room >> 20} MB of room")
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def prefix(pid: int) -> str:
    """What the names of a process's files begin with."""
    return f"hipfire-{pid}-"


def discard(pids: Iterable[int]) -> None:
    """Remove what processes have left that could not do it themselves."""
    for place in _places():
        for pid in pids:
            for left in place.glob(f"{prefix(pid)}*"):
                if left.is_dir():
                    shutil.rmtree(left, ignore_errors=True)
                else:
                    with contextlib.suppress(OSError):
                        left.unlink()


def _made(room: int, place: Path) -> Path:
    made = Path(tempfile.mkdtemp(prefix=prefix(os.getpid()), dir=place))
    try:
        reserve(made, room)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    return made


def _places() -> Iterator[Path]:
    """Folders that may serve, the one that is meant for it first."""
    with contextlib.suppress(FileNotFoundError):
        yield Path(tempfile.gettempdir())
    with contextlib.suppress(InputError):
        yield cache_root() / SCRATCH
    yield from (Path("/tmp"), Path("/var/tmp"))


def _reason(error: OSError) -> str:
    """Why, in a few words: cffi tells a long story."""
    return error.strerror or str(error).partition(".  Additionally")[0]
