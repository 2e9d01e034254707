"""A request, checked before anything of it runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from hipfire_kernels.errors import CheckpointError, InputError
from hipfire_kernels.model.config import TargetConfig
from hipfire_kernels.model.layers import IntArray
from hipfire_kernels.model.sampling import Sampling, is_whole
from hipfire_kernels.model.stopping import StopStrings
from hipfire_kernels.model.tokenizer import Tokenizer
from hipfire_kernels.model.trace import Trace

Speculation: TypeAlias = Literal["auto", "on", "off"]
"""Draft where it pays, always, or never."""


@dataclass(frozen=True)
class Request:
    """A checked request. Neither stop tokens nor stop strings end it within its first `min_new_tokens`.

    `block_size` is 1 for plain decoding. `fallback` says why it is, where the engine was given a draft.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    min_new_tokens: int
    stop: frozenset[int]
    stop_strings: StopStrings | None
    block_size: int
    sampling: Sampling
    speculation: Speculation = "auto"
    adaptive_b: bool = True
    trace: Trace | None = None
    fallback: str | None = None


@dataclass(frozen=True)
class Limits:
    """What requests to one engine can ask for.

    Attributes:
        target: the target's config: its vocabulary and its capacity.
        block_size: the draft's; None without a draft.
        fallback: why there is none, where one was given.
    """

    target: TargetConfig
    block_size: int | None
    fallback: str | None = None

    def prompt(self, prompt_ids: Sequence[int] | IntArray, max_new_tokens: int) -> tuple[int, ...]:
        """The prompt, after checking that it and the new tokens have room."""
        capacity = self.target.max_positions
        check_count("max_new_tokens", max_new_tokens, capacity)
        prompt = self._token_ids("prompt_ids", prompt_ids)
        if not prompt:
            raise InputError("prompt_ids is empty; at least one token is required")
        if len(prompt) + max_new_tokens > capacity:
            raise InputError(
                f"prompt_ids has {len(prompt)} tokens and max_new_tokens is {max_new_tokens}; together at "
                f"most {capacity} (max_position_embeddings) fit, shorten one of them"
            )
        return prompt

    def stop(self, asked: Iterable[int] | None, min_new_tokens: int) -> frozenset[int]:
        """The tokens that end the request; the target's own for None."""
        stop = frozenset(self.target.eos_ids if asked is None else self._token_ids("stop", _listed("stop", asked)))
        if min_new_tokens and len(stop) == self.target.vocab_size:
            raise InputError(f"stop holds all {len(stop)} tokens, so min_new_tokens must be 0, not {min_new_tokens}")
        return stop

    def stop_strings(self, strings: Sequence[str], tokenizer: Tokenizer | None) -> StopStrings | None:
        """The watcher for one request, None for no strings."""
        texts = _listed("stop_strings", strings)
        if isinstance(strings, str) or not all(isinstance(s, str) and s for s in texts):
            raise InputError(f"stop_strings is {strings!r}; required: a sequence of texts, none of them empty")
        if not texts:
            return None
        if not isinstance(tokenizer, Tokenizer):
            raise InputError(
                f"stop_strings are given and tokenizer is {tokenizer!r}; pass the target's tokenizer, to find them with"
            )
        tokenizer.check_pairing(self.target)
        return StopStrings(tuple(texts), tokenizer)

    def rows(self, asked: int | None, speculation: Speculation) -> int:
        """Rows of a block, 1 for plain decoding; the draft's block size for None."""
        if speculation not in get_args(Speculation):
            legal = ", ".join(map(repr, get_args(Speculation)))
            raise InputError(f"speculation is {speculation!r}; legal are {legal}")
        if speculation == "on":
            self._check_on(asked)
        if self.block_size is None:
            if asked not in (None, 1) and self.fallback is None:
                raise InputError(f"block_size is {asked!r}, but this engine has no draft; pass 1 or None")
            return 1
        rows = self.block_size if asked is None else check_count("block_size", asked, self.block_size)
        return 1 if speculation == "off" else rows

    def _check_on(self, asked: int | None) -> None:
        """Whether it is possible to speculate."""
        if self.fallback is not None:
            raise CheckpointError(f"speculation is 'on': {self.fallback}")
        if self.block_size is None:
            raise InputError(
                "speculation is 'on', but this engine has no draft; give it one (NgramDraft needs no checkpoint)"
            )
        if asked == 1:
            raise InputError("speculation is 'on' and block_size is 1, which is plain decoding; pass one of them")

    def _token_ids(self, name: str, values: Sequence[int] | IntArray) -> tuple[int, ...]:
        """The ids as a tuple, after checking that they are whole numbers of the vocabulary."""
        try:
            ids = np.asarray(values)
        except ValueError:  # a list of lists of different lengths
            raise InputError(f"{name} must be one flat sequence of whole numbers, not ragged lists of them") from None
        if ids.size == 0:
            return ()
        if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
            raise InputError(f"{name} must be one flat sequence of whole numbers, not {ids.dtype} of shape {ids.shape}")
        outside = np.flatnonzero((ids < 0) | (ids >= self.target.vocab_size))
        if len(outside):
            at = int(outside[0])
            raise InputError(
                f"{name}[{at}] is {ids[at]}; token ids of this target go from 0 to {self.target.vocab_size - 1}"
            )
        return tuple(ids.tolist())


def check_minimum(value: int, max_new_tokens: int) -> int:
    """`value` as min_new_tokens."""
    if not is_whole(value) or not 0 <= value <= max_new_tokens:
        raise InputError(
            f"min_new_tokens is {value!r}; legal are whole numbers from 0 to max_new_tokens, here {max_new_tokens}"
        )
    return int(value)


def check_count(name: str, value: int, largest: int, least: int = 1) -> int:
    """`value` as a number of something."""
    if not is_whole(value) or not least <= value <= largest:
        raise InputError(f"{name} is {value!r}; legal are whole numbers from {least} to {largest}")
    return int(value)


def _listed(name: str, values: Iterable[Any]) -> list[Any]:
    try:
        return list(values)
    except TypeError:
        raise InputError(f"{name} is {values!r}; required: a sequence") from None
