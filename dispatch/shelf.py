"""Records of a kind, by what they decide on: those that ship with the package, and those of the user, which win.

Files are read when a record is first looked for, once for each folder that the environment has named.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from importlib import resources
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from hipfire_kernels.dispatch.record import Record
from hipfire_kernels.errors import InputError

if TYPE_CHECKING:
    from importlib.abc import Traversable
    from pathlib import Path

R = TypeVar("R", bound=Record)


class Shelf(Generic[R]):
    """Where records of one kind are looked up.

    Args:
        what: they are, in messages; also the name of their folder in the package.
        parse: the records of a file's text; told what the file is called in messages.
        folder: the user's, which need not exist.
    """

    def __init__(self, what: str, parse: Callable[[str, str], tuple[R, ...]], folder: Callable[[], Path]) -> None:
        self._what, self._parse, self._folder = what, parse, folder
        self._shipped: tuple[R, ...] | None = None
        self._on_file: dict[str | None, Mapping[Any, R]] = {}
        self._override: ContextVar[Mapping[Any, R] | None] = ContextVar(f"hipfire_{what}", default=None)

    def shipped(self) -> tuple[R, ...]:
        """The records that come with the package."""
        if self._shipped is None:
            folder = resources.files("hipfire_kernels.dispatch") / self._what
            self._shipped = self._read(folder.iterdir() if folder.is_dir() else ())
        return self._shipped

    def current(self) -> Mapping[Any, R]:
        """The records in force.

        Raises:
            InputError: a file of the user cannot be read or is not right, or two records decide on the same thing.
        """
        chosen = self._override.get()
        if chosen is not None:
            return chosen
        named = os.environ.get("HIPFIRE_EVIDENCE_DIR")
        named = named and os.path.abspath(named)
        if named not in self._on_file:
            own = self._read(self._files())
            self._on_file[named] = {r.key: r for records in (self.shipped(), own) for r in records}
        return self._on_file[named]

    @contextlib.contextmanager
    def using(self, records: Sequence[R]) -> Iterator[None]:
        """Decide on these records, and no others, inside the block."""
        token = self._override.set({r.key: r for r in records})
        try:
            yield
        finally:
            self._override.reset(token)

    def forget(self) -> None:
        """Read the user's files anew when a record is next looked for."""
        self._on_file.clear()

    def read_file(self, file: Traversable) -> tuple[R, ...]:
        """The records of one file.

        Raises:
            InputError: it cannot be read, or is none of this kind; the message names the record and the field.
        """
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{self._what} file {file} cannot be read ({error}); repair it or remove it") from error
        return self._parse(text, f"{self._what} file {file}")

    def _read(self, files: Iterable[Traversable]) -> tuple[R, ...]:
        owner: dict[Any, str] = {}
        found: list[R] = []
        for file in sorted(files, key=lambda f: f.name):
            if not file.name.endswith(".json"):
                continue
            for record in self.read_file(file):
                if record.key in owner:
                    both = f"{owner[record.key]} and {file}"
                    raise InputError(
                        f"{both} both have {self._what} for {record.key}; required: one record, remove the other"
                    )
                owner[record.key] = str(file)
                found.append(record)
        return tuple(found)

    def _files(self) -> list[Path]:
        folder = self._folder()
        try:
            return list(folder.iterdir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise InputError(f"evidence folder {folder} cannot be read ({error.strerror})") from error
