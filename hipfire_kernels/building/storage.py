"""Where the library keeps files of its own, and how a file appears there whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from hipfire_kernels.errors import InputError

TEMPORARY = ".writing-"
"""Prefix of files that are being written. `ArtifactCache.verify` removes those whose writer was killed."""

PROBES = "probes"
"""Subfolder of what was found out about compilers."""

ZIG = "hipfire-zig"
"""Subfolder of the cache that the `ziglang` compiler keeps of itself."""

SCRATCH = "scratch"
"""Subfolder of the cache for what lives for a moment, where the temporary folder does not serve."""

_unfinished: set[Path] = set()


def cache_root() -> Path:
    """`HIPFIRE_CACHE_DIR`, else the user's cache folder. Nothing is created.

    Raises:
        InputError: the variable is unset and the user has no home folder.
    """
    named = os.environ.get("HIPFIRE_CACHE_DIR")
    if named:
        return Path(named).expanduser().absolute()
    import platformdirs

    path = platformdirs.user_cache_path("hipfire-kernels")
    if not path.is_absolute():
        raise InputError(f"no home folder is known (cache path {path}); set HIPFIRE_CACHE_DIR to a folder")
    return path


def evidence_root() -> Path:
    """Where the user's evidence lies: `HIPFIRE_EVIDENCE_DIR`, else in the user's config folder. Nothing is created.

    Raises:
        InputError: the variable is unset and the user has no home folder.
    """
    named = os.environ.get("HIPFIRE_EVIDENCE_DIR")
    if named:
        return Path(named).expanduser().absolute()
    import platformdirs

    path = platformdirs.user_config_path("hipfire-kernels") / "evidence"
    if not path.is_absolute():
        raise InputError(f"no home folder is known (config path {path}); set HIPFIRE_EVIDENCE_DIR to a folder")
    return path


def tuning_root() -> Path:
    """Where the user's tuning lies: beside the evidence. Nothing is created."""
    return evidence_root() / "tuning"


def make_private(path: Path, root: Path) -> None:
    """Create `root` and `path` below it, open to the user alone (0700). Folders that exist keep their mode.

    Raises:
        OSError: they cannot be created.
    """
    for folder in (root, path):
        os.makedirs(folder, mode=0o700, exist_ok=True)


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below a folder; 0 when there is none."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # removed since it was listed
            total += path.stat().st_size if path.is_file() else 0
    return total


def reserve(folder: Path, room: int) -> None:
    """See that so many bytes can be written into a folder, by the disk, by quotas and by limits.

    Raises:
        OSError: they cannot.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        try:
            os.posix_fallocate(file.fileno(), 0, room)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):  # a file system that cannot say
                raise


def publish(path: Path, data: bytes) -> None:
    """Write a file of the user's own (0600) so that a reader sees the old one, or the whole new one.

    Raises:
        OSError: nothing was changed.
    """
    with replacing(path, mode=0o600) as file:
        file.write(data)


@contextlib.contextmanager
def replacing(path: Path, *, mode: int = 0o666) -> Iterator[BinaryIO]:
    """A file to write that becomes `path` when the block ends, whole, also after a power cut; not if it raises.

    Args:
        mode: its permissions, less the umask.

    Raises:
        OSError: nothing was changed.
    """
    temporary = path.parent / f"{TEMPORARY}{secrets.token_hex(8)}"
    _unfinished.add(temporary)
    try:
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    finally:
        _unfinished.discard(temporary)


def remove_unfinished() -> None:
    """Remove the files that are being written, of a process that ends now."""
    for temporary in list(_unfinished):
        with contextlib.suppress(OSError):
            os.unlink(temporary)
