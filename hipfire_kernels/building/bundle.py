"""Bundles: kernels built ahead, in a folder that serves them where there is no compiler and nothing can be written.

Invariant: a bundle serves an artifact only for exactly the source it was compiled from, to the byte, as the templates
here render it, and only if its file is what the manifest says. What is in a bundle but was built from another source
is not served; a file that is damaged is an error, not a reason to compile.

Remaining risk: a digest is no signature. Who can write the folder can plant code.

    manifest.json         {"schema": 1, "created": ..., "kernels": [{"entry", "arch", "source", "file", "sha256", ...}]}
    <sha256>.code         the code object or shared object
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from hipfire_kernels.building.resources import Resources
from hipfire_kernels.errors import InputError

SCHEMA = 1
MANIFEST = "manifest.json"
VARIABLE = "HIPFIRE_KERNELS_BUNDLE"
"""Environment variable that names a bundle to use; `use_bundle` overrides it."""


def digest(data: bytes) -> str:
    """SHA-256 in hex."""
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True)
class Bundled:
    """A kernel of a bundle.

    Attributes:
        source: digest of the rendered source.
        file, sha256: where its code is, and the digest of that.
        machine: of a kernel for the host, the CPU and C library it is for; empty for GPUs.
    """

    entry: str
    arch: str
    source: str
    file: str
    sha256: str
    toolchain: str
    compiler: str
    resources: Mapping[str, Any]
    log: str = ""
    machine: str = ""

    def report(self) -> Resources:
        """What it takes from the machine."""
        return Resources.from_dict(dict(self.resources))


class Bundle:
    """A folder with kernels built ahead.

    Raises:
        InputError: there is no manifest, or it is not one that this version reads.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder).absolute()
        try:
            found = json.loads((self.folder / MANIFEST).read_text(encoding="utf-8"))
            if found["schema"] != SCHEMA:
                raise InputError(f"bundle {self.folder} has schema {found['schema']}; this version reads {SCHEMA}")
            kernels = [Bundled(**kernel) for kernel in found["kernels"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(
                f"bundle {self.folder}: {MANIFEST} cannot be read ({error}); make one by `hfk bundle`"
            ) from error
        self.kernels = {(kernel.entry, kernel.arch): kernel for kernel in kernels}

    def find(self, entry: str, arch: str, source: str, machine: Callable[[], str]) -> tuple[Bundled, bytes] | None:
        """A kernel and its code, if it was compiled from this source for this arch (and, for the host, this machine).

        Raises:
            InputError: its file is missing, or is not what the manifest says.
        """
        kernel = self.kernels.get((entry, arch))
        if kernel is None or self.why_not(kernel, source, machine):
            return None
        try:
            code = (self.folder / kernel.file).read_bytes()
        except OSError as error:
            why = f"{kernel.file} of {entry} cannot be read ({error.strerror})"
            raise InputError(f"bundle {self.folder}: {why}") from error
        if digest(code) != kernel.sha256:
            raise InputError(f"bundle {self.folder}: {kernel.file} of {entry} is damaged; its digest is another")
        return kernel, code

    def why_not(self, kernel: Bundled, source: str, machine: Callable[[], str]) -> str:
        """Why a kernel of the bundle is not served; empty where it is."""
        if kernel.source != digest(source.encode()):
            return "it was built from another source than the templates here give"
        if kernel.machine and kernel.machine != machine():
            return f"it was built for another machine: {kernel.machine}"
        return ""

    def missing(self, entry: str, arch: str, source: str, machine: Callable[[], str]) -> str:
        """Why the bundle does not serve a kernel, in words."""
        kernel = self.kernels.get((entry, arch))
        reason = "it is not in it" if kernel is None else self.why_not(kernel, source, machine)
        return f"bundle {self.folder} does not serve {entry} for {arch}: {reason}"


def write(kernels: Iterable[tuple[Bundled, bytes]], folder: str | os.PathLike[str]) -> Path:
    """Write a bundle; its manifest comes last and by rename, so that a half-written folder is none.

    Raises:
        InputError: the folder holds a bundle already, or cannot be written.
    """
    to = Path(folder)
    if (to / MANIFEST).exists():
        raise InputError(f"{to} holds a bundle already; name another folder, or remove it first")
    try:
        to.mkdir(parents=True, exist_ok=True)
        listed = []
        for kernel, code in kernels:
            (to / kernel.file).write_bytes(code)
            listed.append({**vars(kernel), "resources": dict(kernel.resources)})
        created = datetime.now(timezone.utc).isoformat(timespec="seconds")
        text = json.dumps({"schema": SCHEMA, "created": created, "kernels": listed}, indent=1)
        beside = to / f"{MANIFEST}.part"
        beside.write_text(text + "\n", encoding="utf-8")
        beside.replace(to / MANIFEST)
    except OSError as error:
        raise InputError(f"bundle {to} cannot be written ({error.strerror})") from error
    return to / MANIFEST


_used: list[Bundle | None] = []


def use_bundle(folder: str | os.PathLike[str] | None) -> None:
    """Look builds up in a bundle first, in this process; None: in none.

    Raises:
        InputError: it is no bundle.
    """
    _used[:] = [None if folder is None else Bundle(folder)]


def current() -> Bundle | None:
    """The bundle in use: what `use_bundle` said, else what the environment names.

    Raises:
        InputError: the environment names something that is no bundle.
    """
    if not _used:
        named = os.environ.get(VARIABLE)
        _used.append(Bundle(named) if named else None)
    return _used[0]
