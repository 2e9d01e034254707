"""Checkpoints for commands: loaded with a bar on a terminal, and a word about what was left out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from hipfire_kernels.cli import _out

if TYPE_CHECKING:
    from collections.abc import Callable

    from hipfire_kernels.model import LoadProgress
    from hipfire_kernels.model.dflash import DFlashDraft
    from hipfire_kernels.model.qwen35 import Target

    Model = TypeVar("Model", Target, DFlashDraft)


def target(path: Path) -> Target:
    """The target of a folder or container."""
    from hipfire_kernels.model import load_target

    with _Bar(path) as bar:
        return _noted(load_target(path, progress=bar))


def draft(path: Path) -> DFlashDraft:
    """The draft of a folder or container."""
    from hipfire_kernels.model import load_draft

    with _Bar(path) as bar:
        return _noted(load_draft(path, progress=bar))


def _noted(model: Model) -> Model:
    """The model, after a word about keys of its config that were not read or are missing."""
    if said := str(model.config.notes):
        _out.note(f"config of {model.config.source}: {said}")
    return model


class _Bar:
    """A bar of bytes while one checkpoint loads; nothing of it where stderr is no terminal."""

    def __init__(self, path: Path) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

        self._path = path
        self._skipped: tuple[str, ...] = ()
        columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn()
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
        self._task = self._bar.add_task(path.name, total=None)

    def __enter__(self) -> Callable[[LoadProgress], None]:
        self._bar.start()
        return self._step

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
        if self._skipped:
            _out.note(f"{self._path}: {len(self._skipped)} tensors left out ({_kinds(self._skipped)})")

    def _step(self, progress: LoadProgress) -> None:
        self._skipped = progress.skipped
        self._bar.update(self._task, completed=progress.done, total=progress.total)


def _kinds(skipped: tuple[str, ...]) -> str:
    """What the names begin with, each once."""
    return ", ".join(dict.fromkeys(name.removeprefix("model.").split(".")[0] for name in skipped))
