"""Conversations: requests one after the other that share the state of what they have in common."""

from __future__ import annotations

import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from hipfire_kernels.dispatch import policy
from hipfire_kernels.errors import InputError
from hipfire_kernels.model.adaptive import Prices
from hipfire_kernels.model.layers import IntArray
from hipfire_kernels.model.loop import Generation
from hipfire_kernels.model.repair import RepairDesign
from hipfire_kernels.model.request import Limits, Request, Speculation, check_minimum
from hipfire_kernels.model.result import GenerationResult
from hipfire_kernels.model.sampling import Sampling
from hipfire_kernels.model.state import WarmState
from hipfire_kernels.model.tokenizer import Tokenizer
from hipfire_kernels.model.trace import TextFile, Trace
from hipfire_kernels.running.arguments import flag


class Requests(ABC):
    """What takes requests: an engine, each on its own, or a conversation, each after the other."""

    @property
    @abstractmethod
    def limits(self) -> Limits:
        """What can be asked for."""

    @abstractmethod
    def start(self, request: Request) -> Generation:
        """Run a checked request, step by step."""

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
        speculation: Speculation = "auto",
        adaptive_b: bool | None = None,
        trace: TextFile | str | os.PathLike[str] | None = None,
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
            speculation=speculation,
            adaptive_b=adaptive_b,
            trace=trace,
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
        speculation: Speculation = "auto",
        adaptive_b: bool | None = None,
        trace: TextFile | str | os.PathLike[str] | None = None,
    ) -> Generation:
        """Run one request step by step: an iterator of lists of new tokens, with the result in `.result`.

        Args:
            prompt_ids: token ids, at least one.
            max_new_tokens: at least 1.
            stop: token ids that end the generation, themselves included in the output; None for the target's
                own.
            temperature, top_k, top_p, seed: as of `Sampling`. A seed repeats its tokens, whatever is drafted.
            block_size: the most rows of a speculative block, from 1 (plain decoding) to the draft's own, which None
                stands for.
            min_new_tokens: stop tokens are not produced, and stop strings not heeded, within so many tokens.
            stop_strings: texts that end the generation with the token that completes one of them.
            tokenizer: the target's; stop_strings need it.
            speculation: "auto": where it is faster than plain decoding by the times that are measured. It falls behind
                by at most 5% of max_new_tokens; in an engine of requests below 80 tokens, by that of all of them
                together (`adaptive` has the rule, and what it takes for granted). "on": in every cycle. "off": in none.
            adaptive_b: whether fewer rows than drafted may be verified, by how many were accepted lately; None for
                HIPFIRE_DFLASH_ADAPTIVE_B.
            trace: a text file, or the path of one to append to, for a record of each cycle (`trace` has the fields).

        Raises:
            InputError: an argument is not legal, prompt and new tokens exceed the target's capacity, or the
                conversation runs a request already. Nothing has changed then.
            CheckpointError: the tokenizer is not the target's, or speculation is "on" and the engine's draft could
                not be loaded.
            NumericsError: while it runs, logits or keys and values are not finite. The request has failed then.
        """
        limits = self.limits
        prompt = limits.prompt(prompt_ids, max_new_tokens)
        if not (trace is None or isinstance(trace, (str, os.PathLike)) or hasattr(trace, "write")):
            raise InputError(f"trace is {trace!r}; required: a text file, or the path of one to append to")
        request = Request(
            prompt=prompt,
            max_new_tokens=int(max_new_tokens),
            min_new_tokens=check_minimum(min_new_tokens, max_new_tokens),
            stop=limits.stop(stop, min_new_tokens),
            stop_strings=limits.stop_strings(stop_strings, tokenizer),
            block_size=limits.rows(block_size, speculation),
            sampling=Sampling(temperature, top_k, top_p, seed),
            speculation=speculation,
            adaptive_b=policy.current().adaptive_b if adaptive_b is None else flag("adaptive_b", adaptive_b),
            trace=None if trace is None else Trace(trace),
            fallback=None if speculation == "off" else limits.fallback,
        )
        return self.start(request)


class Conversation(Requests):
    """Requests that run one after the other on one warm state; from `Engine.conversation`.

    A prompt that begins with what an earlier one left (its prompt, its tokens) is processed from there on. One that
    leaves it earlier goes back to the last checkpoint of the recurrent state before that point, or starts cold;
    `result.cached_prefix` and `result.prefill_tokens` say how much was taken over. The tokens are those of a cold run
    up to rounding: a prefill sums in another order than the steps that left the state. The logits of the demo pair, of
    standard deviation 3 or so, differ by up to 1e-5 with "f32", and by up to 3e-3 with "q8_0", where that flips a code
    of the cache. A token can differ where the two best logits are closer than that.

    Any thread may use it, one request at a time: a second is refused until the first ended, was cancelled or was
    given up (nobody holds its `Generation` any more).
    """

    def __init__(self, warm: WarmState, limits: Limits, repair: RepairDesign, prices: Prices) -> None:
        self._warm = warm
        self._limits = limits
        self._repair = repair
        self._prices = prices
        self._lock = threading.Lock()
        self._current: weakref.ref[Generation] | None = None

    @property
    def limits(self) -> Limits:
        """What can be asked for."""
        return self._limits

    @property
    def tokens(self) -> tuple[int, ...]:
        """What the state covers: a prompt that begins so is a hit."""
        return tuple(self._warm.tokens)

    def start(self, request: Request) -> Generation:
        """Run a checked request, step by step."""
        if not self._lock.acquire(blocking=False):
            raise InputError(_BUSY)
        try:
            current = self._current() if self._current else None
            if current is not None and current.result.stop_reason is None:
                raise InputError(_BUSY)
            generation = Generation(self._warm, request, self._repair, self._prices, self._lock)
            self._current = weakref.ref(generation)
            return generation
        finally:
            self._lock.release()


_BUSY = (
    "this conversation runs a request already; required: one at a time. Finish or cancel it, or open another "
    "conversation of the engine"
)
