"""The tests themselves, for `from hipfire_kernels.testing.suite import *` in a test file of an engine."""

from __future__ import annotations

from hipfire_kernels.testing.case import FuzzCase
from hipfire_kernels.testing.checking import assert_parity
from hipfire_kernels.testing.subjects import Subject

__all__ = ["test_parity_and_invariant"]


def test_parity_and_invariant(hk_subject: Subject, hk_case: FuzzCase) -> None:
    """A case against the float64 oracle, worst row, and against the exact invariant it names."""
    assert_parity(hk_subject, hk_case)
