"""The n-gram proposer: what it proposes, and that taking tokens back leaves no trace of them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from hipfire_kernels import InputError
from hipfire_kernels.model.ngram import NgramDraft, NgramSession

NO_TAPS = np.zeros((0, 0), np.float32)


def told(tokens: list[int], longest: int = 4, shortest: int = 2) -> NgramSession:
    session = NgramSession(range(longest, shortest - 1, -1))
    session.extend(tokens, NO_TAPS)
    return session


@pytest.mark.parametrize(
    ("tokens", "anchor", "rows", "proposals"),
    [
        ([1, 2, 3, 4, 5, 6, 1], 2, 4, [3, 4, 5]),
        ([1, 2, 3, 4, 5, 6, 1], 2, 2, [3]),
        ([1, 2, 7, 1, 2, 8, 1], 2, 3, [8, 1]),  # the latest one
        ([9, 1, 2, 7, 5, 1, 2, 8, 9, 1], 2, 3, [7, 5]),  # a longer match before a later one
        ([1, 2, 3, 1, 2], 3, 8, [1, 2, 3, 1, 2, 3, 1]),  # a period goes on
        ([5, 5], 5, 5, [5, 5, 5, 5]),
        ([1, 2, 3, 4], 1, 8, []),  # one token is too little
        ([], 1, 8, []),
        ([1], 2, 8, []),
    ],
)
def test_proposals(tokens: list[int], anchor: int, rows: int, proposals: list[int]) -> None:
    session = told(tokens)
    assert session.propose(anchor, rows) == proposals
    assert session.propose(anchor, rows) == proposals
    assert session.length == len(tokens)


def test_the_sizes_that_have_to_recur() -> None:
    assert told([1, 2, 3, 4], shortest=1).propose(1, 3) == [2, 3]
    assert told([1, 2, 3, 9, 1], longest=3, shortest=3).propose(2, 3) == []
    assert told([7, 1, 2, 3, 9, 7, 1], longest=3, shortest=3).propose(2, 3) == [3, 9]


@pytest.mark.parametrize("seed", range(20))
def test_cropped_equals_never_told(seed: int) -> None:
    rng, session = random.Random(seed), told([])
    tokens: list[int] = []
    for _ in range(12):
        more = [rng.randrange(3) for _ in range(rng.randrange(20))]
        session.extend(more, NO_TAPS)
        tokens += more
        tokens = tokens[: rng.randrange(len(tokens) + 1)]
        session.crop(len(tokens))
        fresh = told(tokens)
        assert session.length == len(tokens)
        assert session._ends == fresh._ends
        for anchor in range(3):
            assert session.propose(anchor, 6) == fresh.propose(anchor, 6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 1}, "block_size is 1; legal are whole numbers from 2 to 32"),
        ({"block_size": 33}, "block_size is 33"),
        ({"block_size": 8.5}, "block_size is 8.5; legal are whole numbers"),
        ({"block_size": True}, "block_size is True"),
        ({"block_size": "8"}, "block_size is '8'"),
        ({"longest": 4.0}, "longest is 4.0"),
        ({"shortest": None}, "shortest is None"),
        ({"shortest": 0}, "shortest is 0; legal are whole numbers from 1"),
        ({"longest": 1}, "shortest is 2 and longest 1"),
    ],
)
def test_refused_sizes(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        NgramDraft(**options)


def test_numpy_integers_are_sizes() -> None:
    draft = NgramDraft(np.int64(6), np.int32(3), np.uint8(2))
    assert draft == NgramDraft(6, 3, 2)
    assert {type(size) for size in (draft.block_size, draft.longest, draft.shortest)} == {int}
