"""What is refused where a family is declared, by a message that shows it: before any render, compile or launch."""

from __future__ import annotations

import importlib.util
import inspect
import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from hipfire_kernels.authoring.args import C_TYPES, FLOATS, LDS_ALIGNMENT, LDS_TYPES, Arg, Lds, Scalar, Tensor
from hipfire_kernels.authoring.templates import Template
from hipfire_kernels.errors import InputError

_WORD = re.compile(r"[A-Za-z_]\w*")

Grid = tuple[int, int, int]


def check_name(name: Any) -> None:
    """A family's name is the stem of a file and part of symbols."""
    if not isinstance(name, str) or not _WORD.fullmatch(name):
        raise InputError(f"a family is named {name!r}; required: letters, digits and underscores")


def check_params(name: str, params: Mapping[str, Sequence[Any]], taken: Collection[str]) -> None:
    """Every parameter has a word for a name, and values, each once.

    Args:
        taken: names of a variant that are no parameters, and would be read in a parameter's place.
    """
    check_free(name, params, taken, "of every variant")
    for parameter, values in params.items():
        if not _WORD.fullmatch(parameter):
            raise InputError(f"{name}: a parameter is named {parameter!r}; required: a word, as a template uses it")
        if isinstance(values, str) or not isinstance(values, Sequence):
            raise InputError(f"{name}: parameter {parameter} has {values!r}; required: a tuple of its legal values")
        if not values:
            raise InputError(f"{name}: parameter {parameter} has no value; give its legal values, at least one")
        if len(set(values)) < len(values):
            raise InputError(f"{name}: parameter {parameter} has a value twice: {', '.join(map(str, values))}")


def check_free(name: str, params: Iterable[str], taken: Collection[str], of: str) -> None:
    """No parameter has a name that means something else already."""
    for parameter in params:
        if parameter in taken:
            raise InputError(f"{name}: a parameter is named {parameter!r}, which is a name {of}; call it otherwise")


def check_extents(name: str, extents: Mapping[str, tuple[int, int]]) -> None:
    """Each has a least and a greatest value."""
    if not isinstance(extents, Mapping):
        raise InputError(f"{name}: extents are {extents!r}; required: a name to (least, greatest) for each")
    for symbol, bounds in extents.items():
        if not isinstance(bounds, tuple) or len(bounds) != 2 or not 0 <= bounds[0] <= bounds[1]:
            raise InputError(f"{name}: extent {symbol} has {bounds!r}; required: (least, greatest)")


def check_oracle(name: str, reference: Any, oracle: Any) -> None:
    """Not both, and of a kind that can be used. A family with neither can be built and launched, but not checked."""
    if reference is not None and oracle is not None:
        raise InputError(f"{name}: reference= and oracle= are both given; required: one of them")
    if reference is not None and not callable(reference):
        raise InputError(f"{name}: reference is {reference!r}; required: a function")
    if isinstance(oracle, str):
        module, colon, attribute = oracle.partition(":")
        try:
            found = bool(colon and attribute.isidentifier()) and importlib.util.find_spec(module) is not None
        except (ImportError, ValueError):
            found = False
        if not found:
            raise InputError(f'{name}: oracle {oracle!r} is not known; required: an Oracle, or "package.module:NAME"')


def check_reference(name: str, reference: Callable[..., Any] | None, args: Sequence[Arg]) -> None:
    """Its parameters are arguments of the kernel."""
    known = {arg.name for arg in args}
    for parameter in named_by(reference) if reference is not None else ():
        if parameter not in known:
            raise InputError(
                f"{name}: its reference takes {parameter}, which is no argument of it; those are "
                f"{', '.join(arg.name for arg in args)}"
            )


def named_by(function: Callable[..., Any]) -> tuple[str, ...]:
    """The parameters that a function cannot be called without."""
    parameters = inspect.signature(function).parameters.values()
    return tuple(p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and p.default is p.empty)


def check_template(name: str, template: Template) -> None:
    """The body is there."""
    if template.path is not None and not template.path.is_file():
        raise InputError(
            f"{name}: there is no template {template.path.name} in {template.path.parent}; write it, or give the "
            "family template=Path(...) of another file, or body='...'"
        )


def check_entry(name: str, entry: Any, others: Mapping[str, str], which: str) -> None:
    """A symbol of C that no other variant has."""
    if not isinstance(entry, str) or not _WORD.fullmatch(entry):
        raise InputError(f"{name}: entry of {which} is {entry!r}; required: a C identifier")
    if entry in others:
        raise InputError(f"{name}: {others[entry]} and {which} have one entry, {entry}; name the parameters in it")


def check_args(name: str, args: Sequence[Arg]) -> None:
    """Tensors, at least one of them written, then scalars; of known dtypes, each name once."""
    seen: set[str] = set()
    for arg in args:
        if not isinstance(arg, (Tensor, Scalar)):
            raise InputError(f"{name}: an argument is {arg!r}; required: a Tensor or a Scalar")
        if not isinstance(arg.name, str) or not _WORD.fullmatch(arg.name):
            raise InputError(f"{name}: an argument is named {arg.name!r}; required: a word")
        if arg.name in seen:
            raise InputError(f"{name}: two arguments are named {arg.name}")
        seen.add(arg.name)
        if arg.dtype not in C_TYPES:
            raise InputError(f"{name}: {arg.name} has dtype {arg.dtype!r}; required: one of {', '.join(C_TYPES)}")
        if isinstance(arg, Tensor):
            _check_shape(name, arg)
            _check_align(name, arg.name, arg.align)
        else:
            _check_between(name, arg)
    kinds = [isinstance(arg, Scalar) for arg in args]
    if kinds != sorted(kinds):
        order = ", ".join(arg.name for arg in args)
        raise InputError(f"{name}: its arguments are {order}; required: its tensors, then its scalars")
    if not any(isinstance(arg, Tensor) and arg.writes for arg in args):
        raise InputError(f"{name}: no argument has writes=True; a kernel that writes nothing has no result")


def _check_between(name: str, arg: Scalar) -> None:
    low, high = arg.between
    if not low <= high:
        raise InputError(f"{name}: {arg.name} has between={arg.between}; required: (least, greatest)")
    if arg.dtype not in FLOATS and (low != int(low) or high != int(high)):
        raise InputError(f"{name}: {arg.name} is {arg.dtype} between {low:g} and {high:g}; required: whole numbers")


def _check_shape(name: str, arg: Tensor) -> None:
    for extent in arg.shape:
        good = _WORD.fullmatch(extent) if isinstance(extent, str) else isinstance(extent, int) and extent > 0
        if not good:
            raise InputError(
                f"{name}: {arg.name} has an extent {extent!r}; required: a positive number, or a symbol's name"
            )


def _check_align(name: str, what: str, align: Any, most: int | None = None) -> None:
    if not isinstance(align, int) or align < 1 or align & (align - 1) or (most is not None and align > most):
        upto = "" if most is None else f" up to {most}"
        raise InputError(f"{name}: {what} has align={align!r}; required: a power of two{upto}, in bytes")


def check_lds(name: str, regions: Sequence[Lds]) -> None:
    """Known C types, positive counts, each name once."""
    names = [region.name for region in regions]
    for region in regions:
        if region.ctype not in LDS_TYPES:
            raise InputError(
                f"{name}: LDS array {region.name} is of {region.ctype!r}; required: one of {', '.join(LDS_TYPES)}"
            )
        if names.count(region.name) > 1:
            raise InputError(f"{name}: two LDS arrays are named {region.name}")
        if region.count < 1:
            raise InputError(f"{name}: LDS array {region.name} has {region.count} elements; required: at least one")
        _check_align(name, f"LDS array {region.name}", region.align, LDS_ALIGNMENT)


def check_grid(name: str, grid: Callable[[SimpleNamespace], Any], known: Sequence[str]) -> None:
    """The grid is tried with every symbol at 1: names that no argument gives, and what is no grid, are found so."""
    try:
        found = grid(SimpleNamespace(**dict.fromkeys(known, 1)))
    except AttributeError as error:
        raise InputError(
            f"{name}: its grid uses {error.name!r}, which nobody gives; it may use the symbols of shapes, scalars and "
            f"extents: {', '.join(known)}"
        ) from error
    except ArithmeticError:  # one that needs larger extents
        return
    as_grid(name, found)


def as_grid(name: str, blocks: Any) -> Grid:
    """Blocks in x, y, z as three integers, of which none is negative.

    Raises:
        InputError: they are something else.
    """
    try:
        x, y, z = (operator.index(extent) for extent in blocks)
    except (TypeError, ValueError):
        raise InputError(f"{name}: its grid is {blocks!r}; required: three integers, the blocks in x, y, z") from None
    if min(x, y, z) < 0:
        raise InputError(f"{name}: its grid is {blocks!r}; required: no negative number of blocks")
    return (x, y, z)
