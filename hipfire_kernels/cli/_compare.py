"""One build report against an earlier one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hipfire_kernels.cli import _out
from hipfire_kernels.errors import InputError

Rows = list[dict[str, Any]]
"""Kernels of a build report: dicts with `entry`, `arch` and `resources`."""


def read(file: Path) -> Rows:
    """The kernels of a report that `hfk build --json` wrote.

    Raises:
        InputError: the file cannot be read, or is no such report.
    """
    from hipfire_kernels.building.resources import Resources

    try:
        rows: Rows = json.loads(file.read_text(encoding="utf-8"))["kernels"]
        for row in rows:
            Resources.from_dict(row["resources"])
            str(row["entry"] + row["arch"])
    except OSError as error:
        raise InputError(f"--against {file} cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"--against {file} is no report of `hfk build --json` ({error})") from error
    return rows


def changes(earlier: Rows, built: Rows) -> Rows:
    """What differs, a resource a row. A kernel that the earlier report lacks is one row, verdict `new`."""
    from hipfire_kernels.building.resources import Resources, diff

    before = {(row["entry"], row["arch"]): Resources.from_dict(row["resources"]) for row in earlier}
    found: Rows = []
    for row in built:
        kernel = {"entry": row["entry"], "arch": row["arch"]}
        old = before.get((row["entry"], row["arch"]))
        if old is None:
            found.append({**kernel, "field": None, "before": None, "after": None, "verdict": "new"})
            continue
        found += [{**kernel, **vars(change)} for change in diff(old, Resources.from_dict(row["resources"]))]
    return found


def show(found: Rows, earlier: str) -> None:
    """Print what changed."""
    if not found:
        print(f"nothing changed against {earlier}")
        return
    print(f"against {earlier}")
    columns = ["entry", "arch", "field", "before", "after", "verdict"]
    _out.table(columns, [["-" if row[c] is None else row[c] for c in columns] for row in found])
