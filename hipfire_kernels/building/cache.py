"""Artifact cache: compiled kernels on disk, shared by all processes of a user.

Invariant: `get` returns an entry only if every byte of it is what some `put` wrote for exactly this key and
arch. It rests on two things: an entry appears by rename, and the digest in its first line covers all that
follows. It does not rest on the lock, which only saves work: without it several processes compile the same
artifact and publish equal entries. Whatever else is found at an entry's path is a miss, and the next `put`
heals it.

Remaining risk: a digest is no signature. Who can write to the folder can plant code that runs as its user;
folders are made 0700 and one that others may write to is named in a warning. A process forked while its
parent holds a lock holds it too, until it ends.

An entry is two lines of text, then the code object or shared object as the compiler gave it:

    hipfire-artifact <schema> <sha256 of the rest>
    {"key": ..., "arch": ..., "entry": ..., "toolchain": ..., "resources": {...}, ...}
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import stat
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hipfire_kernels.building.processes import state_and_parent
from hipfire_kernels.building.storage import PROBES, SCRATCH, TEMPORARY, ZIG, cache_root, make_private, publish

SCHEMA = 2
"""Version of the entry format and of what a key is made from. Raise it when either changes."""

_MAGIC = "hipfire-artifact"
_SUFFIX = ".hfk"
_NAME = "?" * 64  # files here are named by a SHA-256; `clear` touches no others
_IN_MEMORY = 256
_POLL_S = 0.02
_WAIT_NOTICE_S = 10.0
_WAIT_LIMIT_S = 120.0  # the longest honest compile, the first by a wheel's compiler, takes seconds
_WAIT_UNSEEN_S = 5.0
_STALE_S = 3600.0
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Entry:
    """One cached artifact.

    Attributes:
        key: from `artifact_key`.
        arch: exact arch name.
        entry: the kernel's symbol.
        toolchain: the toolchain's name.
        compiler: the toolchain's identity.
        resources: the resource report, as plain JSON values.
        log: the compiler's warnings.
        created: when it was compiled, ISO 8601 in UTC.
        code: code object or shared object.
        listing: the assembly text that assembles to a code object, packed by `pack_text`; empty where there is none.
    """

    key: str
    arch: str
    entry: str
    toolchain: str
    compiler: str
    resources: dict[str, Any]
    log: str
    created: str
    code: bytes
    listing: str = ""


@dataclass
class Counters:
    """What a cache object was asked in this process. `hits + compiled` is the number of answered builds."""

    hits: int = 0
    misses: int = 0
    corrupt: int = 0
    compiled: int = 0


@dataclass(frozen=True)
class Finding:
    """A file of the cache that is not a sound entry, and why."""

    path: Path
    reason: str


def pack_text(text: str) -> str:
    """A long text as a short one: an assembly is a tenth."""
    return base64.b85encode(zlib.compress(text.encode(), 6)).decode() if text else ""


def unpack_text(packed: str) -> str:
    """The reverse of `pack_text`."""
    return zlib.decompress(base64.b85decode(packed)).decode() if packed else ""


class BadEntry(Exception):
    """What stands at an entry's path is not that entry."""


def artifact_key(*parts: object) -> str:
    """SHA-256 over the schema version and `parts` (JSON values), in hex."""
    return hashlib.sha256(json.dumps([SCHEMA, *parts]).encode()).hexdigest()


class ArtifactCache:
    """The cache in one folder, with the entries this process has used kept in memory.

    Safe to share between threads. A folder that cannot be written to, or a full disk, costs one warning and
    the speed-up for later processes, nothing else.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        """Use the folder `path`, by default `storage.cache_root()`. Reading creates nothing."""
        self.path = Path(path).absolute() if path is not None else cache_root()
        self.counters = Counters()
        self._memory: OrderedDict[str, Entry] = OrderedDict()
        self._mutex = threading.Lock()
        self._warned: set[str] = set()

    def get(self, key: str, arch: str) -> Entry | None:
        """The entry, or None when it is absent or is not sound."""
        try:
            found = self._look(key, arch)
        except BadEntry as bad:
            self._count("corrupt")
            _log.info("cache entry %s %s; it is compiled anew", self.entry_path(key), bad)
            found = None
        self._count("misses" if found is None else "hits")
        return found

    def put(self, entry: Entry) -> None:
        """Keep an entry in memory and publish it on disk. A disk that refuses is reported, not raised."""
        self._keep(entry)
        path = self.entry_path(entry.key)
        try:
            self._make_folder(path.parent)
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            publish(path, _pack(entry))
        except OSError as error:
            self._degrade(error)

    def get_or_build(self, key: str, arch: str, make: Callable[[], Entry]) -> tuple[Entry, bool]:
        """The entry, and whether it was found rather than made. Of many that ask at once, one makes it.

        Raises:
            Exception: whatever `make` raises; nothing is stored then.
        """
        found = self.get(key, arch)
        if found is not None:
            return found, True
        with self._builder_lock(key):
            with contextlib.suppress(BadEntry):
                found = self._look(key, arch)
            if found is not None:
                self._count("hits")
                return found, True
            made = make()
            self._count("compiled")
            self.put(made)
        return made, False

    def entries(self, symbol: str = "", arch: str = "") -> Iterator[Entry]:
        """Every sound entry on disk, in the order of their keys; or those of one kernel for one arch."""
        for path in self._entry_files():
            with contextlib.suppress(BadEntry, FileNotFoundError):
                if not symbol or _told(path) == (symbol, arch):
                    yield _read(path)

    def verify(self) -> list[Finding]:
        """Read every entry in full and name those that are not sound. Each heals when it is next asked for.

        Temporary files older than an hour, left by writers that were killed, are removed on the way.
        """
        findings = []
        for path in self._entry_files():
            try:
                _read(path)
            except FileNotFoundError:
                continue  # cleared by another process since it was listed
            except BadEntry as bad:
                findings.append(Finding(path, str(bad)))
        for path in self._files("artifacts", TEMPORARY + "*"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _STALE_S:
                    path.unlink()
        return findings

    def clear(self) -> int:
        """Remove all that the library wrote here. Returns the number of entries removed.

        Other processes may go on using the folder: what they publish later simply appears.
        """
        with self._mutex:
            self._memory.clear()
        entries = self._entry_files()
        probes = self._files(PROBES, _NAME + ".json")
        locks = self._files("locks", _NAME + ".lock")
        temporaries = self._files("*", TEMPORARY + "*")
        for path in [*entries, *probes, *locks, *temporaries]:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        for folder in (ZIG, SCRATCH):
            shutil.rmtree(self.path / folder, ignore_errors=True)
        return len(entries)

    def entry_path(self, key: str) -> Path:
        """Where the entry is, or would be."""
        return self.path / "artifacts" / (key + _SUFFIX)

    def _entry_files(self) -> list[Path]:
        return self._files("artifacts", _NAME + _SUFFIX)

    def _files(self, folder: str, pattern: str) -> list[Path]:
        return sorted(self.path.glob(f"{folder}/{pattern}"))

    def _count(self, name: str) -> None:
        with self._mutex:
            setattr(self.counters, name, getattr(self.counters, name) + 1)

    def _keep(self, entry: Entry) -> None:
        with self._mutex:
            self._memory[entry.key] = entry
            while len(self._memory) > _IN_MEMORY:
                self._memory.popitem(last=False)

    def _look(self, key: str, arch: str) -> Entry | None:
        """The entry from memory or disk; None when there is none.

        Raises:
            BadEntry: something else is in its place.
        """
        with self._mutex:
            entry = self._memory.get(key)
        if entry is not None and entry.arch == arch:
            return entry
        try:
            entry = _read(self.entry_path(key))
        except (FileNotFoundError, NotADirectoryError):
            return None
        if entry.arch != arch:
            raise BadEntry(f"is for {entry.arch}, not for {arch}")
        self._keep(entry)
        return entry

    def _make_folder(self, folder: Path) -> None:
        make_private(folder, self.path)
        if self.path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            self._warn(
                "mode",
                f"the cache folder {self.path} can be written by others, who could run code as you; "
                "chmod go-w it, or set HIPFIRE_CACHE_DIR to a private folder",
            )

    def _degrade(self, error: Exception) -> None:
        self._warn(
            "disk",
            f"the artifact cache in {self.path} cannot be written ({error}); kernels compile anew in every "
            "process. Make room or set HIPFIRE_CACHE_DIR to a folder that can be written",
        )

    def _warn(self, kind: str, message: str) -> None:
        with self._mutex:
            first = kind not in self._warned
            self._warned.add(kind)
        if first:
            _log.warning("%s", message)

    @contextlib.contextmanager
    def _builder_lock(self, key: str) -> Iterator[None]:
        """Hold the key's lock, or none at all where locks do not work: see the module's invariant."""
        try:
            folder = self.path / "locks"
            self._make_folder(folder)
            lock = _acquire(folder / (key + ".lock"))
        except OSError as error:
            lock = None
            if error.errno in _NO_LOCKS:
                self._warn(
                    "locks",
                    f"the file system of {self.path} has no locks ({error.strerror}); processes that start together "
                    "may each compile the same kernel",
                )
            else:
                self._degrade(error)
        try:
            yield
        finally:
            if lock is not None:
                os.close(lock)


_caches: dict[Path, ArtifactCache] = {}


def default_cache() -> ArtifactCache:
    """This process's cache object for the folder that `storage.cache_root()` names now."""
    root = cache_root()
    return _caches.setdefault(root, ArtifactCache(root))


def _pack(entry: Entry) -> bytes:
    header = {name: value for name, value in dataclasses.asdict(entry).items() if name != "code"}
    rest = json.dumps(header).encode() + b"\n" + entry.code
    return f"{_MAGIC} {SCHEMA} {hashlib.sha256(rest).hexdigest()}\n".encode() + rest


def _unpack(data: bytes, key: str) -> Entry:
    first, _, rest = data.partition(b"\n")
    if first != f"{_MAGIC} {SCHEMA} {hashlib.sha256(rest).hexdigest()}".encode():
        raise BadEntry(f"is truncated or altered, or not of schema {SCHEMA}")
    header, _, code = rest.partition(b"\n")
    try:
        entry = Entry(**json.loads(header), code=code)
    except (ValueError, TypeError) as error:
        raise BadEntry(f"has a header that cannot be read: {error}") from error
    if entry.key != key:
        raise BadEntry(f"holds the entry of another key, {entry.key}")
    return entry


def _told(path: Path) -> tuple[str, str]:
    """Kernel and arch as an entry tells them, unchecked, without the code behind."""
    try:
        with path.open("rb") as file:
            file.readline(128)
            told = json.loads(file.readline(1 << 20))
        return told["entry"], told["arch"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise BadEntry(f"cannot be read: {error}") from error


def _read(path: Path) -> Entry:
    """Read and check one entry.

    Raises:
        FileNotFoundError, NotADirectoryError: there is nothing.
        BadEntry: there is something, but not a sound entry.
    """
    try:
        # A FIFO in an entry's place would block a plain open for ever.
        if not stat.S_ISREG(path.stat().st_mode):
            raise BadEntry("is not a regular file")
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise BadEntry(f"cannot be read: {error}") from error
    return _unpack(data, path.name.removesuffix(_SUFFIX))


def _acquire(path: Path) -> int | None:
    """Take the lock of a key: a file with a flock, which dies with its holder, however that one ends.

    Returns None where to compile twice beats to wait on: after `_WAIT_LIMIT_S`, for the holder is stuck, and after
    `_WAIT_UNSEEN_S` where no running process of this machine holds it. Another machine that shares the folder may, or
    one that is gone: a file server forgets a lock long after its holder.

    Raises:
        OSError: the folder cannot be written to, or the file system has no locks.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        began = time.monotonic()
        noted = unseen = began
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return file
            time.sleep(_POLL_S)
            now = time.monotonic()
            holders = _holders(path)
            if holders:
                unseen = now
            if now - began > _WAIT_LIMIT_S or now - unseen > _WAIT_UNSEEN_S:
                break
            if now - noted > _WAIT_NOTICE_S:
                noted = now
                _log.info("waiting since %.0f s for process %s, which compiles; lock %s", now - began, holders, path)
        _log.warning(
            "%s has held %s for %.0f s; compiling without the lock%s",
            f"process {holders}" if holders else "no process that runs here", path, now - began,
            ". End that process if it is stuck" if holders else "",
        )  # fmt: skip
    except BaseException:
        os.close(file)
        raise
    os.close(file)
    return None


def _holders(path: Path) -> str:
    """Ids of the processes of this machine that hold a flock on the file and are not stopped."""
    try:
        inode = str(path.stat().st_ino)
        rows: Sequence[list[str]] = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    except OSError:
        return ""
    pids = [row[4] for row in rows if row[1] == "FLOCK" and row[5].rpartition(":")[2] == inode]
    return ", ".join(pid for pid in pids if (state_and_parent(int(pid)) or "X")[0] not in "TtZX")
