"""What commands print: one JSON document or plain text on stdout, progress and messages on stderr."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import typer

_JSON_ASKED = "hipfire_kernels.json"
PIPE_WIDTH = 10_000
"""Columns of a table that goes into a pipe: enough that nothing is folded and a line can be searched for."""


def _remember(context: typer.Context, value: bool) -> bool:
    context.meta[_JSON_ASKED] = value
    return value


Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.", is_eager=True, callback=_remember)]
"""The `--json` option. Read first, so that the error handler knows of it whatever goes wrong later."""


def json_asked(context: typer.Context) -> bool:
    """Whether the running command was given `--json`."""
    return bool(context.meta.get(_JSON_ASKED))


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
    """A message for the person at the terminal. It is no failure if there is none."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
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
