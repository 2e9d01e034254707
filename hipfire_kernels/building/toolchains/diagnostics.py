"""What a compiler says of a source, by the lines of the templates it comes from."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from hipfire_kernels.authoring.places import NOWHERE, Place, Places

_CLANG = re.compile(r"^(?P<file>[^\n:]+):(?P<line>\d+):\d+: (?:fatal )?(?P<kind>error|warning): (?P<said>.*)$")
_NVRTC = re.compile(
    r"^(?P<file>[^\n()]+)\((?P<line>\d+)\): (?:catastrophic )?(?P<kind>error|warning)[^:]*: (?P<said>.*)$"
)
_PLAIN = re.compile(r"^(?:[^\n:]+: )?(?:fatal )?(?P<kind>error|warning): (?P<said>.*)$")


@dataclass(frozen=True)
class Diagnostic:
    """One error or warning.

    Attributes:
        kind: `error` or `warning`.
        place: the line of a template, or of the declaration; nowhere where the compiler names none.
        said: its words.
        text: the line, as it was rendered.
    """

    kind: str
    place: Place
    said: str
    text: str

    def __str__(self) -> str:
        where = f"{self.place}: " if self.place.file else ""
        return f"{where}{self.kind}: {self.said}" + (f"  | {self.text}" if self.text else "")


def read(log: str, source: str) -> tuple[Diagnostic, ...]:
    """Every error and warning of a log, in its order, each once.

    Args:
        log: what clang, hiprtc or NVRTC wrote.
        source: the rendered source, with its `#line` directives.
    """
    return tuple(dict.fromkeys(_read(log, Places.of(source))))


def _read(log: str, places: Places) -> Iterator[Diagnostic]:
    for line in log.splitlines():
        found = _CLANG.match(line) or _NVRTC.match(line)
        if found is not None:
            place = Place(found["file"], int(found["line"]))
            yield Diagnostic(found["kind"], place, found["said"], places.text(place))
        elif (plain := _PLAIN.match(line)) is not None and not re.match(r"\d+ (?:error|warning)s?", plain["said"]):
            yield Diagnostic(plain["kind"], NOWHERE, plain["said"], "")
