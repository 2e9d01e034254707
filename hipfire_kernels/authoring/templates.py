"""Template files: where a family's body and the headers it includes are found, and what a Jinja error says of them."""

from __future__ import annotations

import difflib
import functools
import re
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

from hipfire_kernels.authoring.places import Marked
from hipfire_kernels.errors import RenderError

LIBRARY = "hipfire_kernels.templates"


@dataclass(frozen=True)
class Template:
    """A kernel's body: a file of the library, a file of somebody's, or text.

    Attributes:
        name: what lines of it are called: the file's name.
        folder: where a file that is not the library's lies. Headers are looked for there first, then in the library.
        body: the text itself, where there is no file.
    """

    name: str
    folder: Path | None = None
    body: str | None = None

    @property
    def path(self) -> Path | None:
        """The file; None for text."""
        if self.body is not None:
            return None
        return (self.folder or Path(str(resources.files(LIBRARY)))) / self.name

    def render(self, names: Iterable[str], context: Mapping[str, Any]) -> str:
        """The named templates, and where a name is its own this one, one behind the other, with marks of their lines.

        Raises:
            RenderError: a template is not there, is no Jinja, or uses a name that nobody defines; with file and line.
        """
        environment = _environment(self.folder)
        try:
            return "".join(self._load(environment, name).render(context) for name in names)
        except jinja2.UndefinedError as error:
            raise RenderError(_undefined(error, context)) from error
        except jinja2.TemplateNotFound as error:
            where = _raised_at(error) or self.name
            close = difflib.get_close_matches(str(error.name), environment.list_templates(), n=1)
            meant = f"; did you mean {close[0]!r}?" if close else ""
            raise RenderError(f"{where}: there is no template {error.name!r}{meant}") from error
        except jinja2.TemplateSyntaxError as error:
            raise RenderError(f"{error.name or error.filename}:{error.lineno}: {error.message}") from error

    def _load(self, environment: jinja2.Environment, name: str) -> jinja2.Template:
        if self.body is None or name != self.name:
            return environment.get_template(name)
        code = environment.compile(self.body, name=name, filename=name)
        return jinja2.Template.from_code(environment, code, environment.make_globals(None))


@functools.lru_cache(maxsize=32)
def _environment(folder: Path | None) -> jinja2.Environment:
    library = jinja2.PackageLoader(LIBRARY, package_path="")
    return jinja2.Environment(
        loader=library if folder is None else jinja2.ChoiceLoader([jinja2.FileSystemLoader(folder), library]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        auto_reload=True,
        extensions=[Marked],
    )


def _raised_at(error: BaseException) -> str | None:
    """File name and line of the template that an error came out of; Jinja puts them into the traceback."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.endswith(".py"):
            return f"{Path(frame.filename).name}:{frame.lineno}"
    return None


def _undefined(error: jinja2.UndefinedError, context: Mapping[str, Any]) -> str:
    where, said = _raised_at(error), str(error.message)
    name = re.search(r"'(\w+)' is undefined|has no attribute '(\w+)'", said)
    close: list[str] = []
    known: Iterable[str] = sorted(context)
    if name is not None:
        wanted = name[1] or name[2]
        if name[2]:  # an attribute of `lds`, the one name with any
            known = sorted(f"lds.{region}" for region in vars(context["lds"]))
            said, wanted = f"no LDS array {wanted!r} is declared", f"lds.{wanted}"
        close = difflib.get_close_matches(wanted, known, n=1)
    meant = f" Did you mean {close[0]!r}?" if close else ""
    return f"{where}: {said}.{meant} Defined here: {', '.join(known)}"
