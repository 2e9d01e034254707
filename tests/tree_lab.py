"""A copy of the repository that a test may edit, and commands that run on it instead of the installed package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROOMS = ("templates", "dispatch", "model", "bench")


class Tree:
    """The copy: the repository's folders, with links that make them the package it installs as."""

    def __init__(self, root: Path) -> None:
        self.root, self.evidence = root / "tree", root / "evidence"
        for name in ("hipfire_kernels", *ROOMS):
            # Links of that kind may be in the repository already.
            inside = ROOMS if name == "hipfire_kernels" else ()
            shutil.copytree(ROOT / name, self.root / name, ignore=shutil.ignore_patterns("__pycache__", *inside))
        for name in ROOMS:
            (self.root / "hipfire_kernels" / name).symlink_to(Path("..") / name)
        self.env = {
            **os.environ,
            "PYTHONPATH": str(self.root),
            "PYTHONUNBUFFERED": "1",
            "HIPFIRE_EVIDENCE_DIR": str(self.evidence),
        }

    def command(self, *arguments: str) -> list[str]:
        """An `hfk` command line."""
        return [sys.executable, "-m", "hipfire_kernels.cli", *arguments]

    def hfk(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run `hfk` on the copy."""
        return subprocess.run(
            self.command(*arguments), cwd=self.root, env={**self.env, **env}, capture_output=True, text=True
        )

    def edit(self, file: str, old: str, new: str) -> None:
        """Replace a text that is there once."""
        path = self.root / file
        text = path.read_text(encoding="utf-8")
        assert text.count(old) == 1, (file, old)
        path.write_text(text.replace(old, new), encoding="utf-8")

    def commit(self) -> None:
        """Make it a git checkout, all committed but the links."""
        who = ("-c", "user.name=test", "-c", "user.email=test@example.invalid")
        for arguments in (("init", "-q"), ("add", "hipfire_kernels/*.py", *ROOMS), ("commit", "-q", "-m", "before")):
            subprocess.run(["git", *who, *arguments], cwd=self.root, check=True, capture_output=True)
