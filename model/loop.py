"""The speculative loop: draft a block, verify it in one target forward, keep a prefix and one token more.

Before a cycle the target's state covers every token but the last, the anchor, which enters as row 0 of the
block. Row j of the verify logits predicts the token after row j: it judges draft j (`sampling` has the rules),
and the row after the last accepted draft gives the bonus token. Plain decoding is the same cycle with a block
of one row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from .attention import Attention, AttentionCounts
from .config import TargetConfig
from .layers import Array
from .qwen35 import Target
from .sampling import Chooser, Sampling
from .stopping import StopStrings

_PREFILL_ROWS = 512


class DraftSession(Protocol):
    """The proposer's side of one sequence."""

    @property
    def max_context(self) -> int | None:
        """Keys of context up to which it is asked; None for any number."""

    def propose(self, anchor: int, taps: Array, rows: int) -> list[int]:
        """Proposals for the rows - 1 positions after the anchor, the last known token.

        `taps` float32 [n, n_taps * hidden] are the target's tapped outputs since the last call, up to the
        position before the anchor.
        """


class Draft(Protocol):
    """Whoever proposes blocks for a target."""

    @property
    def block_size(self) -> int:
        """The most rows of a block: the anchor and block_size - 1 proposals."""

    @property
    def tap_ids(self) -> tuple[int, ...]:
        """The target layers whose outputs it wants to see."""

    def check_pairing(self, target: TargetConfig) -> None:
        """Raise CheckpointError when it cannot draft for this target."""

    def session(self, target: Target, attention: Attention) -> DraftSession:
        """A fresh session for one sequence."""


@dataclass
class GenerationResult:
    """What a request produced, and how.

    Attributes:
        tokens: the new tokens, a stop token included.
        accepted: per cycle, the accepted drafts among the tokens it produced.
        produced: per cycle, the tokens it produced: accepted drafts and, unless cut off, the bonus token. The
            first token comes from the prefill: sum(produced) + 1 == len(tokens).
        stop_reason: "stop" for a stop token, "stop_string", "length" for max_new_tokens, None while running.
        text_end: characters of the new tokens' text before the stop string that ended it, else None. The token
            that completes the string is the last of `tokens`.
        cached_prefix: prompt tokens that were taken from an earlier request.
        prefill_tokens: prompt tokens that the target processed.
        repair: how the state was repaired after a stop inside a block.
        replayed_tokens: tokens that this repair replayed.
        capped_cycles: cycles without proposals because the context was beyond the draft's cap.
        attention: how the attention calls went.
    """

    tokens: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    produced: list[int] = field(default_factory=list)
    stop_reason: Literal["stop", "stop_string", "length"] | None = None
    text_end: int | None = None
    cached_prefix: int = 0
    prefill_tokens: int = 0
    repair: Literal["none", "replayed", "reset"] = "none"
    replayed_tokens: int = 0
    capped_cycles: int = 0
    attention: AttentionCounts = field(default_factory=AttentionCounts)

    @property
    def routes(self) -> Counter[str]:
        """Route name -> attention calls that took it."""
        return self.attention.routes

    @property
    def cycles(self) -> int:
        """Target forwards after the prefill."""
        return len(self.produced)

    @property
    def tau(self) -> float:
        """Mean accepted drafts per cycle, the bonus token not counted; 0 with no cycle."""
        return sum(self.accepted) / self.cycles if self.cycles else 0.0

    @property
    def acceptance_length(self) -> float:
        """tau + 1: the other common definition, with the bonus token."""
        return self.tau + 1.0


@dataclass(frozen=True)
class Request:
    """A checked request. Neither stop tokens nor stop strings end it within its first `min_new_tokens`."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    min_new_tokens: int
    stop: frozenset[int]
    stop_strings: StopStrings | None
    block_size: int
    sampling: Sampling


class Generation(Iterator[list[int]]):
    """One running request: iterate to get the new tokens as they are accepted, one list per cycle.

    Attributes:
        result: true after every step, complete when the iterator ends.
        state: the target's state; between steps it covers the prompt and all new tokens but the last.
    """

    def __init__(
        self,
        target: Target,
        draft: Draft | None,
        request: Request,
        attention: Attention,
        result: GenerationResult,
    ) -> None:
        self.result = result
        self.state = target.new_state(attention)
        self._target = target
        self._request = request
        self._chooser = Chooser(request.sampling)
        self._session = draft.session(target, attention) if draft else None
        self._tap_ids = draft.tap_ids if draft else ()
        self._taps: Array = np.empty((0, 0), np.float32)

    def __next__(self) -> list[int]:
        if self.result.stop_reason is not None:
            raise StopIteration
        return self._cycle() if self.result.tokens else self._prefill()

    def _prefill(self) -> list[int]:
        prompt, taps = self._request.prompt, []
        for begin in range(0, len(prompt), _PREFILL_ROWS):
            chunk = prompt[begin : begin + _PREFILL_ROWS]
            out = self._target.forward(chunk, self.state, tap_ids=self._tap_ids)
            taps.append(out.taps)
        self._taps = np.concatenate(taps)
        self.result.prefill_tokens = len(prompt)
        return self._emit(self._choose([], out.logits[-1:]))

    def _cycle(self) -> list[int]:
        left = self._request.max_new_tokens - len(self.result.tokens)
        anchor = self.result.tokens[-1]
        drafts: list[int] = []
        if self._session is not None and self._capped(self._session):
            self.result.capped_cycles += 1
        elif self._session is not None:
            drafts = self._session.propose(anchor, self._taps, min(self._request.block_size, left + 1))
        snapshot = self.state.snapshot() if drafts else None
        out = self._target.forward(
            [anchor, *drafts], self.state, tap_ids=self._tap_ids, all_logits=True, record=bool(drafts)
        )
        chosen = self._choose(drafts, out.logits)
        emitted = self._emit(chosen)
        if snapshot is not None and len(emitted) <= len(drafts):
            self.state.rollback(snapshot, len(emitted))
        self._taps = out.taps[: len(emitted)]
        self.result.produced.append(len(emitted))
        self.result.accepted.append(min(len(chosen) - 1, len(emitted)))
        return emitted

    def _capped(self, session: DraftSession) -> bool:
        """Whether the context is beyond what the draft is asked at. It never shrinks, so this stays true."""
        return session.max_context is not None and self.state.length > session.max_context

    def _choose(self, drafts: list[int], logits: Array) -> list[int]:
        """The accepted drafts and one token more, with no stop token among the first `min_new_tokens`."""
        early = self._early()
        if early and self._request.stop:
            logits = logits.copy()
            logits[:early, list(self._request.stop)] = -np.inf
        return self._chooser.choose(drafts, logits)

    def _early(self) -> int:
        """How many of the next tokens are among the first `min_new_tokens`."""
        return max(0, self._request.min_new_tokens - len(self.result.tokens))

    def _emit(self, tokens: list[int]) -> list[int]:
        """Append `tokens` to the result up to the first stop token or string or the end of the budget."""
        request, result = self._request, self.result
        tokens = tokens[: request.max_new_tokens - len(result.tokens)]
        stops = [i for i, token in enumerate(tokens) if token in request.stop]
        if stops:
            tokens = tokens[: stops[0] + 1]
        cut = request.stop_strings.cut(tokens, self._early()) if request.stop_strings else None
        tokens = tokens[:cut]
        result.tokens += tokens
        if request.stop_strings and cut is not None:
            result.stop_reason, result.text_end = "stop_string", request.stop_strings.text_end
        elif stops:
            result.stop_reason = "stop"
        elif len(result.tokens) == request.max_new_tokens:
            result.stop_reason = "length"
        return tokens
