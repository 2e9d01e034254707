"""What a request produced, and how."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from hipfire_kernels.model.attention import AttentionCounts

StopReason = Literal["stop", "stop_string", "length", "caller", "cancelled", "failed"]


@dataclass
class GenerationResult:
    """What a request produced, and how.

    Attributes:
        tokens: the new tokens, a stop token included.
        accepted: per cycle, the accepted drafts among the tokens it produced.
        produced: per cycle, the tokens it produced: accepted drafts and, unless cut off, the bonus token. The
            first token comes from the prefill: sum(produced) + 1 == len(tokens).
        stop_reason: "stop" for a stop token, "stop_string", "length" for max_new_tokens, "caller" for
            `Generation.truncate`, "cancelled", "failed" for an error, which was raised; None while running.
        text_end: characters of the new tokens' text before the stop string that ended it, else None. The token
            that completes the string is the last of `tokens`.
        cached_prefix: prompt tokens that were taken from an earlier request.
        prefill_tokens: prompt tokens that the target processed.
        repair: how the state was repaired after only a part of a block was used: "replayed" or "reset" at the end
            of the request (`repair` has both), "realigned" before it went on.
        replayed_tokens: tokens that this repair went through again.
        capped_cycles: cycles without proposals because the context was beyond the draft's cap.
        retired_cycles: plain steps of "auto", because speculating did not pay, or had not been paid for yet.
        probes: how many of them drafted a block to compare it with what came.
        block_sizes: rows of a verified block, the anchor included -> cycles that verified so many.
        draft_faults: cycles without proposals because the draft's numbers were not finite.
        fallback: why a draft that the engine was given could not be used, or not in every cycle; None where nothing
            was wrong.
        attention: how the attention calls went.
    """

    tokens: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    produced: list[int] = field(default_factory=list)
    stop_reason: StopReason | None = None
    text_end: int | None = None
    cached_prefix: int = 0
    prefill_tokens: int = 0
    repair: Literal["none", "replayed", "reset", "realigned"] = "none"
    replayed_tokens: int = 0
    capped_cycles: int = 0
    retired_cycles: int = 0
    probes: int = 0
    block_sizes: Counter[int] = field(default_factory=Counter)
    draft_faults: int = 0
    fallback: str | None = None
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
