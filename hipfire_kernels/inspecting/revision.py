"""A kernel as a git revision has it: its sources rendered by that revision's own code, in a process of its own."""

from __future__ import annotations

import functools
import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from hipfire_kernels.building import scratch
from hipfire_kernels.errors import InputError
from hipfire_kernels.inspecting import _declared

_PARTS = {"hipfire_kernels": "hipfire_kernels", "templates": "hipfire_kernels/templates"}
"""Folders of the repository that rendering needs, and where they are in the package."""


@dataclass(frozen=True)
class Pinned:
    """A kernel of a revision; what `builder.build` and `isa.listing` take.

    Attributes:
        entry: the kernel's symbol.
        sources: by arch.
        block: threads of a workgroup, by arch.
        lds: LDS of a workgroup in bytes, by arch.
        launch: equal to another's where the arguments, the LDS arrays and the grid are declared alike.
    """

    entry: str
    sources: Mapping[str, str]
    block: Mapping[str, int]
    lds: Mapping[str, int]
    launch: str

    def lds_bytes(self, arch: str) -> int:
        """LDS of one workgroup on an arch, in bytes."""
        return self.lds[arch]

    def threads(self, arch: str) -> int:
        """Threads of one workgroup on an arch."""
        return self.block[arch]

    def source(self, arch: str) -> str:
        """The source that the revision renders for an arch."""
        if arch not in self.sources:
            raise InputError(f"{self.entry} was rendered for {', '.join(self.sources)}, not for {arch}")
        return self.sources[arch]


def current(entry: str, archs: Sequence[str]) -> Pinned:
    """A kernel of the package that runs.

    Raises:
        InputError: it has no such kernel.
        RenderError: it does not fit one of the archs.
    """
    found = _declared.declared(entry, list(archs))
    if found is None:
        raise InputError(f"no kernel is named {entry!r}; `hfk list` has all names")
    return Pinned(entry, **found)


def at(revision: str, entry: str, archs: Sequence[str]) -> Pinned:
    """A kernel of a git revision.

    Args:
        revision: whatever git takes for a commit.

    Raises:
        InputError: this package is in no git checkout, git does not know the revision, or it has no such kernel.
    """
    with scratch.folder(what="a revision's code") as folder:
        _unpack(_archive(revision), folder)
        text = Path(_declared.__file__).read_text(encoding="utf-8")
        # With -c the current folder comes first on the path, before the package that is installed.
        done = subprocess.run(
            [sys.executable, "-c", text, entry, *archs], cwd=folder, capture_output=True, text=True,
            env={**os.environ, "PYTHONPATH": str(folder), "PYTHONSAFEPATH": "", "PYTHONDONTWRITEBYTECODE": "1"},
        )  # fmt: skip
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no word"])[-1]
        raise InputError(f"{entry} cannot be rendered by revision {revision}: {said}")
    found = json.loads(done.stdout)
    if found is None:
        raise InputError(f"revision {revision} has no kernel {entry!r}")
    return Pinned(entry, **found)


@functools.cache
def _checkout() -> Path:
    """Top of the git checkout that holds the templates."""
    templates = Path(str(resources.files("hipfire_kernels.templates")))
    done = _git(templates, "rev-parse", "--show-toplevel")
    if done.returncode:
        raise InputError(f"{templates} is in no git checkout: a revision can be named where the package was cloned")
    return Path(done.stdout.decode().strip())


def _archive(revision: str) -> bytes:
    known = _git(_checkout(), "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    if known.returncode:
        raise InputError(f"git knows no revision {revision!r} in {_checkout()}")
    done = _git(_checkout(), "archive", "--format=tar", known.stdout.decode().strip(), *_PARTS)
    if done.returncode:
        raise InputError(f"revision {revision} cannot be read: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout


def _git(folder: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True)
    except FileNotFoundError as error:
        raise InputError("a revision needs git, which is not on the PATH") from error


def _unpack(archive: bytes, folder: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        for member in files:
            top, _, rest = member.name.partition("/")
            content = files.extractfile(member) if member.isfile() else None
            if content is not None:
                to = folder / _PARTS[top] / rest
                to.parent.mkdir(parents=True, exist_ok=True)
                to.write_bytes(content.read())
