"""Cases in files: JSON, one a line. What is read is checked before anything runs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from hipfire_kernels.errors import InputError
from hipfire_kernels.kernels.arguments import HEAD_DIMS
from hipfire_kernels.testing.axes import AXES, spoils_of
from hipfire_kernels.testing.case import FuzzCase, variant_of
from hipfire_kernels.testing.invariants import invariants_of

LEAST = {
    "rows": 1,
    "ctx": 0,
    "n_kv_heads": 1,
    "group": 1,
    "window": 0,
    "slack": 0,
    "seed": 0,
    "extra_cols": 0,
    "spare_tiles": 0,
    "partials_rows": 1,
    "offset": 0,
}
"""Fields that are whole numbers, and the least each may be."""

NAMED = ("queries", "keys", "values", "positions", "causal", "bias", "unseen", "stream")
"""Fields that take a value of their axis and no other."""


def case_from(found: Any) -> FuzzCase:
    """A case from what `FuzzCase.as_dict` gave. Keys that start with _ are notes and are passed over.

    Raises:
        InputError: not a dict, no or an unknown variant, an unknown field or a value that is not legal there.
    """
    if not isinstance(found, dict):
        raise InputError(f"a case is {found!r}; required: a JSON object with `variant` and other fields of FuzzCase")
    fields = {name: value for name, value in found.items() if name[:1] != "_"}
    known = [f.name for f in dataclasses.fields(FuzzCase)]
    if unknown := sorted(set(fields) - set(known)):
        raise InputError(f"a case has {', '.join(unknown)}; its fields are {', '.join(known)}")
    if not isinstance(fields.get("variant"), str):
        raise InputError("a case has no `variant`; required: the entry name of a variant")
    case = FuzzCase(**fields)
    _check(case)
    return case


def _check(case: FuzzCase) -> None:
    """Refuse a case that no axis could have given, naming the field, what it is and what is legal."""
    variant = variant_of(case)
    params = dict(variant.params)
    for name in ("head_dim", "group"):
        if params.get(name, getattr(case, name)) != getattr(case, name):
            raise InputError(f"{name} is {getattr(case, name)!r}; required: that of {case.variant}, {params[name]}")
    if case.head_dim not in HEAD_DIMS:
        raise InputError(f"head_dim is {case.head_dim!r}; required: one of {', '.join(map(str, HEAD_DIMS))}")
    for name, least in LEAST.items():
        value = getattr(case, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise InputError(f"{name} is {value!r}; required: a whole number, at least {least}")
    if isinstance(case.scale, bool) or not isinstance(case.scale, (int, float, type(None))):
        raise InputError(f"scale is {case.scale!r}; required: a number, or nothing for 1 / sqrt(head_dim)")
    legal = {name: AXES[name].values for name in NAMED}
    legal |= {"invariant": ("", *invariants_of(variant)), "spoilt": ("", *spoils_of(variant))}
    for name, values in legal.items():
        if getattr(case, name) not in values:
            raise InputError(f"{name} is {getattr(case, name)!r}; required: one of {', '.join(map(repr, values))}")


def read_cases(file: Path) -> list[FuzzCase]:
    """The cases of a file: one JSON object a line, or a single one over many lines.

    Raises:
        InputError: the file cannot be read, or holds something that is no case; the message says where.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file} cannot be read ({error})") from error
    lines = [line for line in text.splitlines() if line.strip()]
    if lines and lines[0].strip() == "{":
        lines = [text]
    cases = []
    for number, line in enumerate(lines, 1):
        try:
            cases.append(case_from(json.loads(line)))
        except ValueError as error:
            raise InputError(f"{file}, case {number}: {error}") from error
    return cases
