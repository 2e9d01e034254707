"""What commands print: one JSON document or plain text on stdout, progress and messages on stderr."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from hipfire_kernels.errors import InputError

_JSON_ASKED = "hipfire_kernels.json"
PIPE_WIDTH = 10_000
"""Columns of a table that goes into a pipe: enough that nothing is folded and a line can be searched for."""


def _remember(context: typer.Context, value: bool) -> bool:
    # Of a group too: `hfk cache --json ls` is `hfk cache ls --json`.
    context.meta[_JSON_ASKED] = value or json_asked(context)
    return json_asked(context)


Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.", is_eager=True, callback=_remember)]
"""The `--json` option. Read first, so that the error handler knows of it whatever goes wrong later."""


def json_asked(context: typer.Context) -> bool:
    """Whether the running command was given `--json`."""
    return bool(context.meta.get(_JSON_ASKED))


def new_file(help: str) -> Any:
    """A Typer option for a file to write: refused before the work where it cannot be one."""
    return typer.Option(help=help, metavar="FILE", callback=_check_new)


def new_file_argument(help: str) -> Any:
    """The same as an argument."""
    return typer.Argument(help=help, callback=_check_new)


def new_folder(help: str) -> Any:
    """A Typer option for a folder, which is made once there is something to put into it."""
    return typer.Option(help=help, metavar="FOLDER", callback=_check_new_folder)


def _check_new_folder(param: typer.CallbackParam, folder: Path) -> Path:
    above = folder.absolute()
    while not above.exists():
        above = above.parent
    if not above.is_dir() or not os.access(above, os.W_OK):
        why = "no permission for it" if above.is_dir() else "it is no folder"
        raise InputError(f"{param.opts[-1]} {folder} cannot be made in {above}: {why}; name another folder")
    return folder


def _check_new(param: typer.CallbackParam, file: Path | None) -> Path | None:
    if file is None:
        return None
    name = param.opts[-1] if param.param_type_name == "option" else str(param.name).upper()
    folder = file.absolute().parent
    if file.is_dir():
        raise InputError(f"{name} {file} is a folder; required: a file to write")
    if not folder.is_dir():
        why = "is no folder" if folder.exists() else "does not exist; create it"
        raise InputError(f"{name} {file} cannot be written: the folder {folder} {why}, or name another file")
    there = file.exists()
    if not os.access(file if there else folder, os.W_OK):
        raise InputError(f"{name} {file} cannot be written: no permission for {file if there else folder}")
    return file


def save(file: Path | None, text: str) -> None:
    """Write a result to a file, if one is wanted. Comes last: what was found is on the screen by then.

    Raises:
        InputError: it cannot be written.
    """
    if file is None:
        return
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{file} cannot be written ({error.strerror}); name another file") from error


def document(value: Any) -> None:
    """Print the one JSON document of a command. Infinity and NaN, which JSON has not, become null."""
    print(json.dumps(_finite(value), indent=2, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def note(text: str) -> None:
    """A message for the person at the terminal."""
    print(text, file=sys.stderr, flush=True)


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]], *, numeric: Sequence[str] = ()) -> None:
    """Print columns, the `numeric` ones set right; folded to a terminal's width, never in a pipe."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        shown.add_column(name, justify="right" if name in numeric else "left", overflow="fold")
    for row in rows:
        shown.add_row(*(Text(str(cell)) for cell in row))
    with console.capture() as captured:
        console.print(shown)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


class _Compiling(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        note(record.getMessage())


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Say on stderr which kernels are compiled in the block, while they are."""
    from hipfire_kernels.building.builder import log

    before, handler = log.level, _Compiling()
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


Step = Callable[[str], None]


@contextlib.contextmanager
def progress(label: str, total: int) -> Iterator[Step]:
    """Yields what to call after each of `total` steps: a bar on a terminal, else a line on stderr."""
    if not sys.stderr.isatty():
        done = 0

        def line(what: str) -> None:
            nonlocal done
            done += 1
            note(f"{label} {done}/{total} {what}")

        yield line
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda what: bar.update(task, advance=1, description=f"{label} {what}")
