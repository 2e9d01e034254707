"""The engine: pairs a target with a draft, checks requests, runs them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ..errors import CheckpointError, InputError
from ..runtime import device as open_device
from .attention import KV_FORMATS, make_attention
from .layers import BLOCK_ROWS, IntArray
from .loop import Draft, Generation, GenerationResult, Request
from .qwen35 import Target


class Engine:
    """Greedy decoding of one target, speculative when it has a draft; the tokens are the same either way.

    Holds no state between requests: several threads may use one engine.

    Args:
        target: from `load_target`.
        draft: from `load_draft`, or None to decode token by token.
        device: where the attention kernels run, as for `hipfire_kernels.device`.
        kv_format: "q8_0": Q8_0 KV cache and the kernels of this library. "f32": plain numpy attention, for
            parity with other implementations; runs on "host" only.

    Raises:
        CheckpointError: the draft was made for another target.
        InputError: unknown kv_format, or one that the device or the target cannot have.
    """

    def __init__(
        self, target: Target, draft: Draft | None = None, *, device: str = "host", kv_format: str = "q8_0"
    ) -> None:
        if kv_format not in KV_FORMATS:
            raise InputError(f"kv_format is {kv_format!r}; legal are {', '.join(map(repr, KV_FORMATS))}")
        if kv_format == "f32" and device != "host":
            raise InputError(f"kv_format 'f32' is plain numpy and runs on 'host', not on {device!r}; use 'q8_0' there")
        if draft is not None:
            _check_draft(draft, target)
        self.target = target
        self.draft = draft
        self.kv_format = kv_format
        self._device = open_device(device)

    def generate(
        self,
        prompt_ids: Sequence[int] | IntArray,
        max_new_tokens: int = 128,
        stop: Iterable[int] | None = None,
        temperature: float = 0.0,
        seed: int | None = None,
        block_size: int | None = None,
    ) -> GenerationResult:
        """Run one request to its end. Arguments and errors as for `stream`."""
        generation = self.stream(prompt_ids, max_new_tokens, stop, temperature, seed, block_size)
        for _ in generation:
            pass
        return generation.result

    def stream(
        self,
        prompt_ids: Sequence[int] | IntArray,
        max_new_tokens: int = 128,
        stop: Iterable[int] | None = None,
        temperature: float = 0.0,
        seed: int | None = None,
        block_size: int | None = None,
    ) -> Generation:
        """Run one request step by step: an iterator of lists of new tokens, with the result in `.result`.

        Args:
            prompt_ids: token ids, at least one.
            max_new_tokens: at least 1.
            stop: token ids that end the generation, themselves included in the output; None for the target's
                own.
            temperature: 0.0, greedy decoding.
            seed: None; greedy decoding draws nothing.
            block_size: rows of a speculative block, from 1 (plain decoding) to the draft's own, which None
                stands for.

        Raises:
            InputError: an argument is not legal, or prompt and new tokens exceed the target's capacity.
        """
        if temperature != 0.0:
            raise InputError(f"temperature is {temperature!r}; decoding is greedy, pass temperature=0.0")
        if seed is not None:
            raise InputError(f"seed is {seed!r}; greedy decoding draws nothing at random, pass seed=None")
        config = self.target.config
        _check_count("max_new_tokens", max_new_tokens, config.max_positions)
        prompt = _token_ids("prompt_ids", prompt_ids, config.vocab_size)
        if not prompt:
            raise InputError("prompt_ids is empty; at least one token is required")
        if len(prompt) + max_new_tokens > config.max_positions:
            raise InputError(
                f"prompt_ids has {len(prompt)} tokens and max_new_tokens is {max_new_tokens}; together at "
                f"most {config.max_positions} (max_position_embeddings) fit, shorten one of them"
            )
        stop_ids = config.eos_ids if stop is None else _token_ids("stop", list(stop), config.vocab_size)
        request = Request(prompt, max_new_tokens, frozenset(stop_ids), self._block_size(block_size))
        draft = self.draft if request.block_size > 1 else None
        result = GenerationResult()
        attention = make_attention(self.kv_format, self._device, result.attention)
        return Generation(self.target, draft, request, attention, result)

    def _block_size(self, asked: int | None) -> int:
        if self.draft is None:
            if asked not in (None, 1):
                raise InputError(f"block_size is {asked!r}, but this engine has no draft; pass 1 or None")
            return 1
        if asked is None:
            return self.draft.block_size
        _check_count("block_size", asked, self.draft.block_size)
        return asked


def _check_draft(draft: Draft, target: Target) -> None:
    draft.check_pairing(target.config)
    if not 2 <= draft.block_size <= BLOCK_ROWS:
        raise CheckpointError(
            f"the draft's block_size is {draft.block_size}; a verify block has 2 to {BLOCK_ROWS} rows"
        )


def _check_count(name: str, value: int, largest: int) -> None:
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or not 1 <= value <= largest:
        raise InputError(f"{name} is {value!r}; legal are whole numbers from 1 to {largest}")


def _token_ids(name: str, values: Sequence[int] | IntArray, vocab_size: int) -> tuple[int, ...]:
    """The ids as a tuple, after checking that they are whole numbers of the vocabulary."""
    ids = np.asarray(values)
    if ids.size == 0:
        return ()
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise InputError(f"{name} must be one flat sequence of whole numbers, not {ids.dtype} of shape {ids.shape}")
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if len(outside):
        at = int(outside[0])
        raise InputError(f"{name}[{at}] is {ids[at]}; token ids of this target go from 0 to {vocab_size - 1}")
    return tuple(ids.tolist())
