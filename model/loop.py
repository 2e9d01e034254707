"""The speculative loop: draft a block, verify it in one target forward, keep a prefix and one token more.

Before a cycle the target's state covers every token but the last, the anchor, which enters as row 0 of the
block. Row j of the verify logits predicts the token after row j: it judges draft j (`sampling` has the rules),
and the row after the last accepted draft gives the bonus token. Plain decoding is the same cycle with a block
of one row.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Iterator
from time import perf_counter

import numpy as np

from hipfire_kernels.errors import InputError, NumericsError
from hipfire_kernels.model.adaptive import CAPPED, PLAIN, Cycle, Pace, Plan, Prices
from hipfire_kernels.model.layers import Array, first_broken_row
from hipfire_kernels.model.qwen35 import TargetState
from hipfire_kernels.model.repair import RepairDesign, realign, repair_terminal
from hipfire_kernels.model.request import Request
from hipfire_kernels.model.result import GenerationResult
from hipfire_kernels.model.sampling import Chooser, is_whole
from hipfire_kernels.model.state import WarmState

_log = logging.getLogger(__name__)


class Generation(Iterator[list[int]], AsyncIterator[list[int]]):
    """One running request: iterate to get the new tokens as they are accepted, one list per cycle.

    `for` and `async for` both work; the latter runs each cycle in a thread of its own. One step at a time: a second
    thread is refused while one is inside. What ends early, by `cancel` or because nobody iterates any more, leaves
    an exact state; an error gives the state up, and the conversation's next request is cold.

    Attributes:
        result: true after every step, complete when the iterator ends.
    """

    def __init__(
        self, warm: WarmState, request: Request, design: RepairDesign, prices: Prices, lock: threading.Lock
    ) -> None:
        self.result = GenerationResult(fallback=request.fallback)
        self._warm = warm
        self._request = request
        self._design = design
        self._lock = lock
        self._stop_strings = request.stop_strings
        self._chooser = Chooser(request.sampling)
        self._pace: Pace | None = None
        if request.block_size > 1:
            measured = prices if request.speculation == "auto" else None
            self._pace = Pace(request.block_size, measured, request.adaptive_b, request.max_new_tokens)
        self._last = 0  # tokens of the last list
        warm.holder = self.result
        warm.attention.count_in(self.result.attention)

    @property
    def state(self) -> TargetState:
        """The target's state; between steps it covers the prompt and all new tokens but the last."""
        return self._warm.target_state

    def __next__(self) -> list[int]:
        with self._alone(), self._failing_closed():
            tokens = None if self.result.stop_reason else self._step()
            self._trace_end()
        if tokens is None:
            raise StopIteration
        return tokens

    async def __anext__(self) -> list[int]:
        step = asyncio.ensure_future(asyncio.to_thread(next, self, None))
        try:
            tokens = await asyncio.shield(step)
        except asyncio.CancelledError:
            self.cancel()
            with contextlib.suppress(Exception):  # raised where nobody waits for tokens any more
                await asyncio.shield(step)
            raise
        if tokens is None:
            raise StopAsyncIteration
        return tokens

    def cancel(self) -> None:
        """End the request before its next cycle, or its next pass of the prefill. From any thread, at any time."""
        if self.result.stop_reason is None:
            self.result.stop_reason = "cancelled"

    def truncate(self, count: int, *, resume: bool = False) -> None:
        """Use only the first `count` tokens of the last list: for ends that the caller finds, a closed tool call say.

        The request ends there, or with `resume` goes on from there; sampled tokens are then drawn anew.

        Raises:
            InputError: the last list has fewer tokens, or the conversation has gone on to another request.
        """
        with self._alone():
            if self._warm.holder is not self.result:
                raise InputError("truncate comes too late: it is for the last list of a conversation's last request")
            if not is_whole(count) or not 1 <= count <= self._last:
                raise InputError(f"count is {count!r}; the last list has {self._last} tokens, legal are 1 to that")
            if count < self._last:
                with self._failing_closed():
                    self._drop(self._last - count, resume)
                self.result.stop_reason = None
            if not resume and self.result.stop_reason is None:
                self.result.stop_reason = "caller"
            self._trace_end()

    def _drop(self, count: int, resume: bool) -> None:
        """Take the last `count` tokens back."""
        result, warm = self.result, self._warm
        del result.tokens[-count:]
        self._last -= count
        result.produced[-1] = self._last
        result.accepted[-1] = min(result.accepted[-1], self._last)
        result.text_end = None
        if self._stop_strings:
            self._stop_strings = self._stop_strings.restarted(result.tokens)
        if resume:
            realign(warm, self._used(), len(self._request.prompt), result)
        else:
            repair_terminal(warm, self._used(), self._design, result)

    def _used(self) -> list[int]:
        """What the state is to cover: all tokens but the last, which is pending."""
        return [*self._request.prompt, *self.result.tokens[:-1]]

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            raise InputError("another thread is inside this conversation; one step at a time, wait for it")
        try:
            yield
        finally:
            self._lock.release()

    @contextlib.contextmanager
    def _failing_closed(self) -> Iterator[None]:
        """An error leaves the layers at different tokens, perhaps: it gives the state up."""
        try:
            yield
        except BaseException:
            self.result.stop_reason = "failed"
            if self._warm.holder is self.result:
                self._warm.reset()
            self._trace_end()
            raise

    def _trace_end(self) -> None:
        if self._request.trace and self.result.stop_reason:
            self._request.trace.end(len(self._warm.tokens), self.result)

    def _step(self) -> list[int] | None:
        tokens = self._cycle() if self.result.tokens else self._prefill()
        self._last = len(tokens) if tokens else 0
        return tokens

    def _prefill(self) -> list[int] | None:
        """The prompt, as far as the state does not cover it; None when cancelled inside."""
        warm, prompt, result, began = self._warm, self._request.prompt, self.result, perf_counter()
        result.cached_prefix = warm.align(prompt)
        for logits in warm.prefill(prompt):
            result.prefill_tokens = len(warm.tokens) - result.cached_prefix
            if result.stop_reason:
                return None
            if len(warm.tokens) == len(prompt):
                self._note_prefill(perf_counter() - began)
                return self._emit(self._choose([], logits))
        raise RuntimeError("a prompt without a last token to process")

    def _cycle(self) -> list[int]:
        warm, result = self._warm, self.result
        left = self._request.max_new_tokens - len(result.tokens)
        anchor, context, began = result.tokens[-1], len(warm.tokens), perf_counter()
        rows = min(self._request.block_size, left + 1)
        plan = self._plan(rows)
        proposals = self._propose(anchor, rows) if plan.draft else []
        drafts, proposed = proposals[: plan.rows - 1], perf_counter()
        chosen = self._choose(drafts, warm.verify(anchor, drafts))
        window = chosen[:left]
        warm.keep(len(window))
        emitted = self._emit(window)
        result.produced.append(len(emitted))
        result.accepted.append(min(len(chosen) - 1, len(emitted)))
        if len(emitted) < len(window):
            repair_terminal(warm, self._used(), self._design, result)
        self._note(Cycle(plan, proposals, emitted, proposed - began, perf_counter() - proposed), context)
        return emitted

    def _plan(self, rows: int) -> Plan:
        """What the next cycle does; `rows` are what block and budget allow."""
        session = self._warm.session
        if self._pace is None or session is None:
            return PLAIN
        if session.max_context is not None and session.length > session.max_context:
            return CAPPED
        return self._pace.plan(rows)

    def _propose(self, anchor: int, rows: int) -> list[int]:
        """The draft's proposals, none where its numbers are not finite."""
        if self._warm.session is None:
            return []
        try:
            return self._warm.session.propose(anchor, rows)
        except NumericsError as error:
            self.result.draft_faults += 1
            if self.result.fallback is None:
                self.result.fallback = str(error)
                _log.warning("%s", error)
            return []

    def _note_prefill(self, seconds: float) -> None:
        if self._pace:
            self._pace.prefilled(seconds)
        if self._request.trace:
            self._request.trace.prefill(len(self._request.prompt), self.result, seconds)

    def _note(self, cycle: Cycle, context: int) -> None:
        """Learn from a cycle, count it, trace it."""
        result, pace = self.result, self._pace
        if pace:
            pace.note(cycle)
            if cycle.rows > 1:
                result.block_sizes[cycle.rows] += 1
            elif cycle.plan.capped:
                result.capped_cycles += 1
            elif cycle.plan.rows == 1:
                result.retired_cycles += 1
                result.probes += cycle.kind == "probe"
        if self._request.trace:
            self._request.trace.cycle(context, result, cycle)

    def _choose(self, drafts: list[int], logits: Array) -> list[int]:
        """The accepted drafts and one token more, with no stop token among the first `min_new_tokens`.

        Raises:
            NumericsError: a row of the logits that a token has to be chosen from is not finite.
        """
        broken = first_broken_row(logits)
        if broken is None:
            return self._chooser.choose(drafts, self._masked(logits))
        # The row counts only where all drafts before it are kept, as in plain decoding, which would never see it.
        chosen = self._chooser.choose(drafts[: broken - 1], self._masked(logits[:broken])) if broken else []
        if chosen == drafts[:broken]:
            row, new = logits[broken], len(self.result.tokens) + broken
            bad = np.flatnonzero(~np.isfinite(row))
            raise NumericsError(
                f"the logits for position {len(self._request.prompt) + new} (new token {new}, counted from 0) hold "
                f"{row[bad[0]]} at token id {bad[0]}, {len(bad)} of {len(row)} are not finite; no token can be chosen. "
                "Look for the weights or activations that overflow; kv_format='f32' shows whether kernels take part"
            )
        return chosen

    def _masked(self, logits: Array) -> Array:
        """The logits without the stop tokens in the rows of the first `min_new_tokens`."""
        early = self._early()
        if early and self._request.stop:
            logits = logits.copy()
            logits[:early, list(self._request.stop)] = -np.inf
        return logits

    def _early(self) -> int:
        """How many of the next tokens are among the first `min_new_tokens`."""
        return max(0, self._request.min_new_tokens - len(self.result.tokens))

    def _emit(self, tokens: list[int]) -> list[int]:
        """Append `tokens` to the result up to the first stop token or string."""
        request, result = self._request, self.result
        stops = [i for i, token in enumerate(tokens) if token in request.stop]
        if stops:
            tokens = tokens[: stops[0] + 1]
        cut = self._stop_strings.cut(tokens, self._early()) if self._stop_strings else None
        tokens = tokens[:cut]
        result.tokens += tokens
        if self._stop_strings and cut is not None:
            result.stop_reason, result.text_end = "stop_string", self._stop_strings.text_end
        elif stops:
            result.stop_reason = "stop"
        elif len(result.tokens) == request.max_new_tokens:
            result.stop_reason = "length"
        return tokens
