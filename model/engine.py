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
from .sampling import Sampling, is_whole
from .stopping import StopStrings
from .tokenizer import Tokenizer


class Engine:
    """Decoding of one target, speculative when it has a draft.

    Speculation loses nothing: the same tokens when greedy, tokens of the same distribution when sampled.

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
        *,
        top_k: int = 0,
        top_p: float = 1.0,
        min_new_tokens: int = 0,
        stop_strings: Sequence[str] = (),
        tokenizer: Tokenizer | None = None,
    ) -> GenerationResult:
        """Run one request to its end. Arguments and errors as for `stream`."""
        generation = self.stream(
            prompt_ids,
            max_new_tokens,
            stop,
            temperature,
            seed,
            block_size,
            top_k=top_k,
            top_p=top_p,
            min_new_tokens=min_new_tokens,
            stop_strings=stop_strings,
            tokenizer=tokenizer,
        )
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
        *,
        top_k: int = 0,
        top_p: float = 1.0,
        min_new_tokens: int = 0,
        stop_strings: Sequence[str] = (),
        tokenizer: Tokenizer | None = None,
    ) -> Generation:
        """Run one request step by step: an iterator of lists of new tokens, with the result in `.result`.

        Args:
            prompt_ids: token ids, at least one.
            max_new_tokens: at least 1.
            stop: token ids that end the generation, themselves included in the output; None for the target's
                own.
            temperature, top_k, top_p, seed: as of `Sampling`. A seed repeats its tokens under equal arguments;
                another block_size draws other tokens, of the same distribution.
            block_size: rows of a speculative block, from 1 (plain decoding) to the draft's own, which None
                stands for.
            min_new_tokens: stop tokens are not produced, and stop strings not heeded, within so many tokens.
            stop_strings: texts that end the generation with the token that completes one of them.
            tokenizer: the target's; stop_strings need it.

        Raises:
            InputError: an argument is not legal, or prompt and new tokens exceed the target's capacity.
        """
        vocab_size = self.target.config.vocab_size
        stop_ids = frozenset(self.target.config.eos_ids if stop is None else self._token_ids("stop", list(stop)))
        request = Request(
            prompt=self._prompt(prompt_ids, max_new_tokens),
            max_new_tokens=max_new_tokens,
            min_new_tokens=_checked_minimum(min_new_tokens, max_new_tokens),
            stop=stop_ids,
            stop_strings=_stop_strings(stop_strings, tokenizer),
            block_size=self._block_size(block_size),
            sampling=Sampling(temperature, top_k, top_p, seed),
        )
        if request.min_new_tokens and len(stop_ids) == vocab_size:
            raise InputError(f"stop holds all {vocab_size} tokens, so min_new_tokens must be 0, not {min_new_tokens}")
        draft = self.draft if request.block_size > 1 else None
        result = GenerationResult()
        attention = make_attention(self.kv_format, self._device, result.attention)
        return Generation(self.target, draft, request, attention, result)

    def _prompt(self, prompt_ids: Sequence[int] | IntArray, max_new_tokens: int) -> tuple[int, ...]:
        """The prompt, after checking that it and the new tokens have room."""
        capacity = self.target.config.max_positions
        _check_count("max_new_tokens", max_new_tokens, capacity)
        prompt = self._token_ids("prompt_ids", prompt_ids)
        if not prompt:
            raise InputError("prompt_ids is empty; at least one token is required")
        if len(prompt) + max_new_tokens > capacity:
            raise InputError(
                f"prompt_ids has {len(prompt)} tokens and max_new_tokens is {max_new_tokens}; together at "
                f"most {capacity} (max_position_embeddings) fit, shorten one of them"
            )
        return prompt

    def _token_ids(self, name: str, values: Sequence[int] | IntArray) -> tuple[int, ...]:
        return _token_ids(name, values, self.target.config.vocab_size)

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
    if not is_whole(value) or not 1 <= value <= largest:
        raise InputError(f"{name} is {value!r}; legal are whole numbers from 1 to {largest}")


def _checked_minimum(value: int, max_new_tokens: int) -> int:
    if not is_whole(value) or not 0 <= value <= max_new_tokens:
        raise InputError(
            f"min_new_tokens is {value!r}; legal are whole numbers from 0 to max_new_tokens, here {max_new_tokens}"
        )
    return value


def _stop_strings(strings: Sequence[str], tokenizer: Tokenizer | None) -> StopStrings | None:
    """The watcher for one request, None for no strings."""
    if isinstance(strings, str) or not all(isinstance(s, str) and s for s in strings):
        raise InputError(f"stop_strings is {strings!r}; required: a sequence of texts, none of them empty")
    if not strings:
        return None
    if tokenizer is None:
        raise InputError("stop_strings are given and tokenizer is None; pass the target's tokenizer, to find them with")
    return StopStrings(tuple(strings), tokenizer)


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
