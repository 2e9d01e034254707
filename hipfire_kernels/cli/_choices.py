"""Options that take one of a few words: checked before anything runs, with the word that was meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any

import typer

from hipfire_kernels.errors import InputError

Legal = Callable[[], Iterable[str]]
"""The words of an option. A function, for some are known to parts of the library that a `--help` must not load."""


def option(legal: Legal | Sequence[str], *names: str, help: str, listed: bool = False, metavar: str = "") -> Any:
    """A Typer option that takes one of the words, or with None as its default none.

    Args:
        legal: the words, or a function that gives them.
        names: of the option, where it is not called as its parameter.
        listed: it takes several, with commas between.
        metavar: what stands for a value in the help; by default the words.
    """
    words = legal if callable(legal) else lambda: legal

    def check(param: typer.CallbackParam, value: Any) -> Any:
        given = [value] if isinstance(value, str) else [] if value is None else value
        for text in given:
            for word in text.split(",") if listed else [text]:
                require(param.opts[-1], word, words())
        return value

    shown = metavar or ("" if callable(legal) else "|".join(legal))
    return typer.Option(*names, help=help, metavar=shown or None, callback=check)


def require(name: str, word: str, legal: Iterable[str]) -> None:
    """Refuse a word that is not one of the legal ones.

    Args:
        name: of the option, for the message.
        legal: a word that ends in `:N` stands for any whole number there.

    Raises:
        InputError: with the word that was probably meant.
    """
    words = list(legal)
    # An arch may have feature suffixes, which nobody compares.
    if not {re.sub(r":\d+$", ":N", word), word.partition(":")[0]} & set(words):
        meant = closest(word, words)
        hint = f"did you mean {meant[0]}? " if meant else ""
        raise InputError(f"{name} is {word!r}; {hint}legal: {', '.join(words)}")


def closest(word: str, legal: Iterable[str], most: int = 1) -> list[str]:
    """The legal words that look most like one."""
    return difflib.get_close_matches(word, list(legal), n=most, cutoff=0.5)


# ---- words that several commands take -------------------------------------------------------------------------------


def archs() -> list[str]:
    """Every arch."""
    from hipfire_kernels.archs import ARCHS

    return list(ARCHS)


def archs_or_all() -> list[str]:
    """Every arch, and the word for all of them."""
    return [*archs(), "all"]


def toolchains() -> list[str]:
    """Every toolchain, those that are taken by name alone last."""
    from hipfire_kernels.building.toolchains import registry

    return [toolchain.name for toolchain in (*registry.toolchains(), *registry.sanitized())]


def devices() -> list[str]:
    """Every kind of device name."""
    from hipfire_kernels.running.devices import GPU_VENDORS, HOSTS, isa

    return ["auto", *(f"{vendor}:N" for vendor in GPU_VENDORS), *HOSTS, *isa.names()]


def cards() -> list[str]:
    """Every kind of device that is a GPU, or stands for one."""
    from hipfire_kernels.running.devices import GPU_VENDORS, isa

    return [*(f"{vendor}:N" for vendor in GPU_VENDORS), *isa.names()]


def checked_devices() -> list[str]:
    """The host, and the devices that have checks of their own."""
    from hipfire_kernels.running.devices import isa

    return ["host", *isa.names()]


def routes() -> list[str]:
    """Every route."""
    from hipfire_kernels.dispatch.routes import ROUTES

    return [route.name for route in ROUTES]


def families() -> list[str]:
    """Every kernel family."""
    from hipfire_kernels.kernels import families

    return list(families())


# ---- extents of a declared case -------------------------------------------------------------------------------------

Extents = Annotated[
    list[str] | None,
    typer.Option("--extent", metavar="NAME=N", help="Of a family with a reference: an extent that is not the largest."),
]


def extents(given: Sequence[str] | None) -> dict[str, int]:
    """`--extent rows=16` as name and number.

    Raises:
        InputError: it is not of that form.
    """
    found = {}
    for text in given or ():
        name, _, number = text.partition("=")
        if not (name.isidentifier() and number.isdigit()):
            raise InputError(f"--extent is {text!r}; required: NAME=N, a symbol of the declaration and a whole number")
        found[name] = int(number)
    return found
