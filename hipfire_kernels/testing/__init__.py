"""Hold kernels, this library's or an engine's, against the oracle and against exact invariants on drawn cases.

    case = next(generate([variant], seed=0))    # names and numbers; to_json() is what `hfk replay` takes
    assert_parity(variant, case)                # or an EngineSubject: a kernel behind one function

`strategies` has the same axes for Hypothesis, `plugin` and `suite` the same check for pytest.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hipfire_kernels.checking.result import Finding
    from hipfire_kernels.testing.axes import AXES, draw, generate
    from hipfire_kernels.testing.campaign import ledger
    from hipfire_kernels.testing.case import FuzzCase, variant_of
    from hipfire_kernels.testing.casefile import case_from, read_cases
    from hipfire_kernels.testing.checking import assert_parity, check, request_of
    from hipfire_kernels.testing.invariants import INVARIANTS
    from hipfire_kernels.testing.requests import DraftRequest, Request
    from hipfire_kernels.testing.subjects import Arrangement, EngineSubject, VariantSubject

_LATE = {
    "AXES": "axes",
    "Arrangement": "subjects",
    "DraftRequest": "requests",
    "EngineSubject": "subjects",
    "Finding": "checking",
    "FuzzCase": "case",
    "INVARIANTS": "invariants",
    "Request": "requests",
    "VariantSubject": "subjects",
    "assert_parity": "checking",
    "case_from": "casefile",
    "check": "checking",
    "draw": "axes",
    "generate": "axes",
    "ledger": "campaign",
    "read_cases": "casefile",
    "request_of": "checking",
    "variant_of": "case",
}
"""Public names and the module each lives in, imported at first use: pytest loads the plugin in every run."""

__all__ = [
    "AXES",
    "INVARIANTS",
    "Arrangement",
    "DraftRequest",
    "EngineSubject",
    "Finding",
    "FuzzCase",
    "Request",
    "VariantSubject",
    "assert_parity",
    "case_from",
    "check",
    "draw",
    "generate",
    "ledger",
    "read_cases",
    "request_of",
    "variant_of",
]


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_LATE[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
