"""Where a line of a rendered source comes from: a template's file and line, kept through loops and includes.

While a template is rendered, each of its lines carries a mark. `resolve` turns the marks into `#line` directives, one
wherever the next line is not the one that a compiler counts to by itself. Compilers, debuggers and the host's runtime
then speak of the template; `Places` finds the text of a line that they name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from jinja2.ext import Extension
from jinja2.lexer import Token, TokenStream

_OPEN, _CLOSE = "\ue000", "\ue001"
_MARK = re.compile(f"{_OPEN}([^:{_CLOSE}]*):(\\d+){_CLOSE}")
_DIRECTIVE = re.compile(r'#line (\d+) "([^"]*)"')


@dataclass(frozen=True, order=True)
class Place:
    """A line of a template. `line` counts from 1; (“”, 0) is nowhere."""

    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.file else "no line"


NOWHERE = Place()


def mark(file: str, line: int) -> str:
    """What `resolve` reads: the text behind it, up to the end of its line, is of this place."""
    return f"{_OPEN}{file}:{line}{_CLOSE}"


class Marked(Extension):
    """Marks the lines of the templates of an environment."""

    def filter_stream(self, stream: TokenStream) -> Iterator[Token]:
        """Put a mark in front of each line of template text."""
        begins = True
        for token in stream:
            if token.type == "data":
                yield Token(token.lineno, token.type, _marked(stream.name or "", token.lineno, token.value, begins))
            else:
                yield token
            begins = token.type == "block_end"


def _marked(file: str, line: int, text: str, begins: bool) -> str:
    pieces = text.split("\n")
    marked = [mark(file, line + n) + piece if n or begins else piece for n, piece in enumerate(pieces)]
    return "\n".join(marked)


def resolve(text: str) -> str:
    """A text without its marks, with `#line` directives in their place.

    The last mark in front of a line's first character is its place: those before it are of lines that came out empty.
    """
    lines: list[str] = []
    expected: Place | None = None
    for line in text.splitlines(keepends=True):
        ahead = re.match(f"(?:\\s|{_MARK.pattern})*", line)
        marks = list(_MARK.finditer(ahead[0] if ahead else ""))
        place = Place(marks[-1][1], int(marks[-1][2])) if marks else expected
        plain = _MARK.sub("", line)
        # A directive inside a macro's definition would end it.
        continued = bool(lines) and lines[-1].endswith("\\\n")
        if place is not None and place != expected and plain.strip() and not continued:
            lines.append(f'#line {place.line} "{place.file}"\n')
            expected = place
        lines.append(plain)
        if expected is not None:
            expected = Place(expected.file, expected.line + 1)
    return "".join(lines)


def without(source: str) -> str:
    """A rendered source without its `#line` directives: what the kernel is, wherever its lines stand."""
    return "".join(line for line in source.splitlines(keepends=True) if not _DIRECTIVE.match(line))


@dataclass(frozen=True)
class Places:
    """The places of a rendered source.

    Attributes:
        by_line: the place of each of its lines, counted from 0.
        texts: the text of each place, as it was rendered last.
    """

    by_line: tuple[Place, ...]
    texts: dict[Place, str] = field(repr=False)

    @classmethod
    def of(cls, source: str) -> Places:
        """Read the directives of a source. Without any, its lines are those of a file without a name."""
        found: list[Place] = []
        texts: dict[Place, str] = {}
        place = Place("", 1)
        for line in source.splitlines():
            directive = _DIRECTIVE.match(line)
            if directive:
                place = Place(directive[2], int(directive[1]))
                found.append(place)
                continue
            found.append(place)
            texts[place] = line
            place = Place(place.file, place.line + 1)
        return cls(tuple(found), texts)

    def text(self, place: Place) -> str:
        """The text of a place, without its margin; empty where the source has no such line."""
        return self.texts.get(place, "").strip()

    def around(self, place: Place, reach: int = 2) -> str:
        """A few lines around a place with their numbers; that one is marked. Lines that were not rendered are left
        out."""
        near = (Place(place.file, place.line + step) for step in range(-reach, reach + 1))
        return "\n".join(_numbered(self.texts[one], one, one == place) for one in near if one in self.texts)


def _numbered(text: str, place: Place, marked: bool) -> str:
    return f"{'>' if marked else ' '} {place.line:5} | {text}"
