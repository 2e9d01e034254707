"""Kernel variants by name: a family's, or the entry point of one variant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from hipfire_kernels.authoring.family import KernelFamily, Variant
from hipfire_kernels.cli import _choices
from hipfire_kernels.errors import InputError
from hipfire_kernels.kernels import families

Variants = Annotated[
    list[str] | None, typer.Argument(metavar="VARIANT", help="Entry names, or families for all variants.")
]
All = Annotated[bool, typer.Option("--all", help="Every variant of every family.")]


def many(names: Sequence[str], *, everything: bool) -> list[Variant]:
    """The variants that names choose, each once: a family's name stands for all its variants.

    Raises:
        InputError: a name is unknown, or there is none and `--all` was not given, or there are both.
    """
    if everything == bool(names):
        raise InputError(
            "VARIANT and --all are both given; required: one of them"
            if names
            else "no VARIANT is given; name some, or pass --all"
        )
    known = families()
    wanted = list(known) if everything else names
    found = [v for name in wanted for v in (known[name].variants() if name in known else [_by_entry(name)])]
    return list(dict.fromkeys(found))


def one(name: str, params: Sequence[str]) -> Variant:
    """The one variant that a name and `key=value` parameters choose.

    Raises:
        InputError: the name or a parameter is unknown, or more than one variant is left.
    """
    family = families().get(name)
    if family is None:
        variant = _by_entry(name)
        if params:
            raise InputError(f"--param {params[0]} with {name}, which is one variant already; drop --param")
        return variant
    given = dict(_parameter(family, text) for text in params)
    left = [v for v in family.variants() if given.items() <= dict(v.params).items()]
    if not params:
        # A family may share its name with the entry point of its plainest variant.
        left = [v for v in left if v.entry == name] or left
    if len(left) > 1:
        free = ", ".join(f"{k} ({_listed(legal)})" for k, legal in family.params.items() if k not in given)
        raise InputError(
            f"{' '.join([name, *params])} stands for {len(left)} variants; choose one with --param "
            f"for {free}, or by its entry name: {_listed(v.entry for v in left)}"
        )
    return left[0]


def _by_entry(name: str) -> Variant:
    entries = {v.entry: v for family in families().values() for v in family.variants()}
    if name in entries:
        return entries[name]
    names = [*families(), *entries]
    inside = [n for n in names if name and name in n]
    close = inside[:8] or _choices.closest(name, names, most=5)
    hint = f"did you mean {_listed(close)}?" if close else "`hfk list` has all names"
    raise InputError(f"no kernel family or variant is named {name!r}; {hint}")


def _parameter(family: KernelFamily, text: str) -> tuple[str, Any]:
    """`head_dim=128` as the name and the declared value it spells."""
    name, equals, value = text.partition("=")
    if not equals:
        raise InputError(
            f"--param is {text!r}; required: KEY=VALUE, KEYs of {family.name} are {_listed(family.params)}"
        )
    _choices.require("the KEY of --param", name, family.params)
    legal = {str(value).lower(): value for value in family.params[name]}
    _choices.require(f"--param {name}", value.lower(), legal)
    return name, legal[value.lower()]


def _listed(values: Any) -> str:
    return ", ".join(map(str, values))
