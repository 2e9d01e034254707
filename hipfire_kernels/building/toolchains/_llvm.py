"""Finding a clang: on the PATH by name, or in the `ziglang` wheel."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from collections.abc import Callable

from hipfire_kernels.building.toolchains import Candidate
from hipfire_kernels.building.toolchains._probe import Facts, ProbeFailed, recall
from hipfire_kernels.building.toolchains._process import run

OLDEST, NEWEST = 17, 22
"""Major versions of clang that are looked for by name. Older ones do not know gfx1151."""

MEMORY = dict[tuple[str, str], tuple[Candidate, ...]]
"""Memo of successful searches, by PATH and arch. Failed ones are repeated: a clang may be on its way."""


def look(
    stem: str, arch: str, memo: MEMORY, system: Callable[[str], Candidate], wheel: Callable[[str], Candidate]
) -> tuple[Candidate, ...]:
    """Examine what is installed, in order, up to the first that can serve.

    The order: `stem` as the user's PATH has it, then `stem-22` down to `stem-17`, then the `ziglang` wheel.
    What the user installed wins over what came along as a dependency; the wheel also takes three commands
    where clang takes one.
    """
    at = (os.environ.get("PATH", ""), arch)
    if at in memo:
        return memo[at]
    paths, zig = _on_path(stem), _wheel_program()
    seen: list[Candidate] = []
    if not paths:
        seen.append(Candidate(f"{stem}, {stem}-{NEWEST} to {stem}-{OLDEST}", "not on the PATH"))
    tries = [(system, path) for path in paths]
    if zig is not None:
        tries.append((wheel, zig))
    for examine, path in tries:
        seen.append(examine(path))
        if seen[-1].reason is None:
            memo[at] = tuple(seen)
            return memo[at]
    if zig is None:
        seen.append(Candidate("ziglang", "not installed"))
    return tuple(seen)


def _on_path(stem: str) -> list[str]:
    """Programs of that name, plain and by version, each once."""
    found: dict[str, str] = {}
    for name in (stem, *(f"{stem}-{version}" for version in range(NEWEST, OLDEST - 1, -1))):
        path = shutil.which(name)
        if path is not None:
            found.setdefault(os.path.realpath(path), path)
    return list(found.values())


def _wheel_program() -> str | None:
    """The compiler in the `ziglang` wheel, called directly: its Python launcher takes as long as it does."""
    spec = importlib.util.find_spec("ziglang")
    return None if spec is None or spec.origin is None else os.path.join(os.path.dirname(spec.origin), "zig")


def version_line(command: tuple[str, ...]) -> str:
    """First line of `--version`.

    Raises:
        ProbeFailed: the program does not run.
    """
    finished = run([*command, "--version"])
    if finished.failure is not None or not finished.out:
        raise ProbeFailed(f"--version gave no answer: {finished.failure or 'no text'} {finished.err.strip()[:200]}")
    return finished.out.splitlines()[0].strip()


def major(version: str) -> int:
    """Major version out of a clang's or lld's version line; 0 when there is none."""
    found = re.search(r"(?:clang version|LLD) (\d+)\.", version)
    return int(found.group(1)) if found else 0


def too_old(version: str, oldest: int) -> str | None:
    """The reason against a clang older than `oldest`, else None."""
    if major(version) >= oldest:
        return None
    return f"{version or 'a version that cannot be read'}; {oldest} or newer is needed"


def zig_facts(zig: str) -> Facts:
    """Versions of the wheel's compiler.

    Raises:
        ProbeFailed: it does not run.
    """

    def probe() -> Facts:
        finished = run([zig, "version"])
        if finished.failure is not None:
            raise ProbeFailed(f"`zig version` gave no answer: {finished.failure}")
        return {"zig": finished.out.strip(), "clang": version_line((zig, "clang"))}

    return recall(("ziglang",), [zig], probe)
