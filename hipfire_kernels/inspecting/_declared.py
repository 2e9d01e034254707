"""What another revision of this package renders and declares for a kernel; run as a program inside that revision.

Prints one JSON object. Uses names that every revision has.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def declared(entry: str, archs: list[str]) -> dict[str, Any] | None:
    """Sources, threads and LDS bytes by arch, and a text that is equal where a launch takes the same arguments, LDS
    arrays and grid. None: there is no such kernel."""
    from hipfire_kernels import families

    found = (v for family in families().values() for v in family.variants() if v.entry == entry)
    variant = next(found, None)
    if variant is None:
        return None
    threads = {arch: _on(getattr(variant, "threads", variant.family.block), arch) for arch in archs}
    launch = (variant.args, [_on(variant.lds, arch) for arch in archs], threads, _code(variant.family.grid))
    return {
        "sources": {arch: variant.source(arch) for arch in archs},
        "lds": {arch: _on(variant.lds_bytes, arch) for arch in archs},
        "block": threads,
        "launch": repr(launch),
    }


def _on(value: Any, arch: str) -> Any:
    """LDS and threads did not always depend on the arch."""
    return value(arch) if callable(value) else value


def _code(function: Any) -> tuple[str, list[Any], tuple[str, ...]]:
    """What a function does, without where it stands."""
    code = function.__code__
    return (code.co_code.hex(), [c for c in code.co_consts if not hasattr(c, "co_code")], code.co_names)


if __name__ == "__main__":
    print(json.dumps(declared(sys.argv[1], sys.argv[2:])))
